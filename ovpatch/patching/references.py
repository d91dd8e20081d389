"""References to a function that modules hold, as after ``from m import f as g``.

Only the ``vars()`` of real modules are looked at, without asking them for anything, and values are recognised by
identity. What sits in registries, default arguments or closures is not reached: patch where callers look it up.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ovpatch.patching.patches import bare_function
from ovpatch.patching.targets import is_module, namespace

_OURS: Final = ("ovpatch", "ovpatch_plugins")

Reference = tuple[types.ModuleType, str, int]


def find(ids: Mapping[int, Any] | set[int]) -> Iterable[Reference]:
    """Yield ``(module, name, id)`` of every reference to one of some objects, in one pass over all modules.

    Args:
        ids: ``id()`` of the objects, which the caller keeps alive.
    """
    wanted = set(ids)
    for module in {id(module): module for module in list(sys.modules.values()) if is_module(module)}.values():
        values = namespace(module)
        if wanted.isdisjoint(map(id, list(values.values()))):
            continue
        for name, value in list(values.items()):
            if id(value) in wanted:
                yield module, name, id(value)


def author_packages(sources: Iterable[Any]) -> frozenset[str]:
    """Return the packages that some patches come from.

    They keep the original: ``from m import f; def new_f(): return f()`` must not call itself.

    Args:
        sources: Replacements and wrap functions as their authors gave them.
    """
    packages = set(_OURS)
    for source in sources:
        function = bare_function(source)
        module = getattr(function, "__module__", None) or type(function).__module__
        packages.add(module if _is_package(module) else module.rpartition(".")[0] or module)
    return frozenset(packages)


def _is_package(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and is_module(found) and "__path__" in namespace(found)


def within(packages: Iterable[str]) -> Callable[[str], bool]:
    """Return a test whether a module, given by name, belongs to one of some packages."""
    prefixes = tuple(f"{package}." for package in packages)
    return lambda module: f"{module}.".startswith(prefixes)


def keeps_its_own(module: types.ModuleType, raw: Any) -> bool:
    """Whether a module must go on holding a function that was written in C, because C code or torch look it up there.

    Args:
        module: Holds a reference.
        raw: The function.
    """
    if isinstance(raw, types.FunctionType):
        return False
    values = namespace(module)
    spec = values.get("__spec__")
    origin = values.get("__file__") or getattr(spec, "origin", None) or ""
    in_c = origin.endswith((".so", ".pyd")) or origin == "built-in"
    return in_c or module.__name__ == getattr(raw, "__module__", None)

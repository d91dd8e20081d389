"""References to a function in modules, as after ``from m import f as g``.

The search reads the ``vars()`` of real modules only, calls none of their code, and compares by identity. References in
registries, default arguments and closures are not found; such a function is patched where its callers look it up.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ovpatch.patching.patch import unwrap_callable
from ovpatch.patching.slot import unwrap_descriptor
from ovpatch.patching.target import get_namespace, is_class, is_module

_OURS: Final = ("ovpatch", "ovpatch_plugins")

Reference = tuple[types.ModuleType, str, int]


def find_references(ids: Mapping[int, Any] | set[int]) -> Iterable[Reference]:
    """Yield ``(module, name, id)`` of every reference, in any module, to objects that the caller keeps alive."""
    wanted = set(ids)
    for module in {
        id(module): module for module in list(sys.modules.values()) if is_module(module)
    }.values():
        values = get_namespace(module)
        if wanted.isdisjoint(map(id, list(values.values()))):
            continue
        for name, value in list(values.items()):
            if id(value) in wanted:
                yield module, name, id(value)


def list_author_packages(sources: Iterable[Any]) -> frozenset[str]:
    """Return the packages that some patches, as declared, come from.

    These packages keep the original: ``from m import f; def new_f(): return f()`` must not call itself.
    """
    packages = set(_OURS)
    for source in sources:
        function = unwrap_callable(source)
        module = getattr(function, "__module__", None) or type(function).__module__
        packages.add(module if _is_package(module) else module.rpartition(".")[0] or module)
    return frozenset(packages)


def _is_package(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and is_module(found) and "__path__" in get_namespace(found)


def match_packages(packages: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate: whether a module, given by name, belongs to one of some packages."""
    prefixes = tuple(f"{package}." for package in packages)
    return lambda module: f"{module}.".startswith(prefixes)


def keeps_original(module: types.ModuleType, raw: Any) -> bool:
    """Whether a module must keep a function written in C, because C code or torch looks it up there."""
    if isinstance(raw, types.FunctionType):
        return False
    values = get_namespace(module)
    spec = values.get("__spec__")
    origin = values.get("__file__") or getattr(spec, "origin", None) or ""
    in_c = origin.endswith((".so", ".pyd")) or origin == "built-in"
    return in_c or module.__name__ == getattr(raw, "__module__", None)


_MAX_SEARCHED: Final = 500


def leads_to(value: Any, function: Any, original: Any) -> bool:
    """Whether calling ``value``, the content of a slot, may run ``function``, which was installed over ``original``.

    The search follows ``__wrapped__``, closures, partials, bound methods and attributes of objects, and then the
    globals that ``value`` names. After a reload, where ``value`` is a fresh copy of the original, globals are left out:
    functions of one library name each other.
    """
    if value is function or _search(value, function):
        return True
    if is_fresh_copy(value, original):
        return False
    return any(
        one is function or _search(one, function)
        for one in _named_globals(unwrap_descriptor(value))
    )


def is_fresh_copy(value: Any, original: Any) -> bool:
    """Whether a function comes from the same definition as another one, as after ``importlib.reload``."""
    one, other = unwrap_descriptor(value), unwrap_descriptor(original)
    codes = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if not all(isinstance(code, types.CodeType) for code in codes):
        return False
    return bool(
        one is not other
        and codes[0].co_filename == codes[1].co_filename  # type: ignore[union-attr]  # both are code: looked at above
        and (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
    )


def _search(value: Any, function: Any) -> bool:
    seen: set[int] = set()
    waiting = deque([value])
    while waiting and len(seen) < _MAX_SEARCHED:
        one = waiting.popleft()
        if one is function:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            waiting.extend(_next(one))
    return False


def _next(value: Any) -> Iterable[Any]:
    if is_module(value) or is_class(value):
        return ()
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, (staticmethod, classmethod, property)):
        return (unwrap_descriptor(value),)
    if isinstance(value, types.FunctionType):
        wrapped = value.__dict__.get("__wrapped__")
        return (wrapped, *_cells(value), *(value.__defaults__ or ()))
    return tuple(_attributes(value).values()) if callable(value) else ()


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object without running code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _cells(function: types.FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue


def _named_globals(function: Any) -> Iterable[Any]:
    if not isinstance(function, types.FunctionType):
        return ()
    names = function.__code__.co_names
    return [function.__globals__[name] for name in names if name in function.__globals__]

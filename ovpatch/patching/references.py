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

_OWN_PACKAGES: Final = ("ovpatch", "ovpatch_plugins")

# Does what get_namespace() does, for modules alone, in the loop over all modules.
_read_namespace: Final = types.ModuleType.__getattribute__

# The module, the name of its attribute, and the id() of the object that the attribute refers to.
Reference = tuple[types.ModuleType, str, int]


def find_references(ids: Mapping[int, Any] | set[int]) -> Iterable[Reference]:
    """Yield ``(module, name, id)`` of every reference in any module to some objects.

    Args:
        ids: The ``id()`` of the objects, which the caller keeps alive.
    """
    wanted = set(ids)
    # sys.modules may have a module under several names. list() copies a dictionary in one step, so that imports on
    # other threads cannot change it during the loop.
    for module in {
        id(module): module for module in list(sys.modules.values()) if is_module(module)
    }.values():
        values = _read_namespace(module, "__dict__")
        if wanted.isdisjoint(map(id, list(values.values()))):
            continue
        for name, value in list(values.items()):
            if id(value) in wanted:
                yield module, name, id(value)


def list_author_packages(sources: Iterable[Any]) -> frozenset[str]:
    """Return the packages in which the authors of some patches wrote them.

    These packages keep the original: ``from m import f; def new_f(): return f()`` must not call itself.

    Args:
        sources: The declared replacements and wrap functions.
    """
    packages = set(_OWN_PACKAGES)
    for source in sources:
        function = unwrap_callable(source)
        module = getattr(function, "__module__", None) or type(function).__module__
        packages.add(module if _is_package(module) else module.rpartition(".")[0] or module)
    return frozenset(packages)


def _is_package(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and is_module(found) and "__path__" in get_namespace(found)


def match_packages(packages: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate on the name of a module: whether the module belongs to one of some packages."""
    prefixes = tuple(f"{package}." for package in packages)
    return lambda module: f"{module}.".startswith(prefixes)


def keeps_original(module: types.ModuleType, raw: Any) -> bool:
    """Return whether a module must keep a function written in C, because C code or torch looks it up there."""
    if isinstance(raw, types.FunctionType):
        return False
    values = get_namespace(module)
    spec = values.get("__spec__")
    origin = values.get("__file__") or getattr(spec, "origin", None) or ""
    is_in_c = origin.endswith((".so", ".pyd")) or origin == "built-in"
    return is_in_c or module.__name__ == getattr(raw, "__module__", None)


# The number of objects after which a search ends: a wrapper may refer to a model, and the model to everything.
_MAX_SEARCHED_OBJECTS: Final = 500


def leads_to(value: Any, function: Any, original: Any) -> bool:
    """Return whether a call of ``value`` may run ``function``.

    The search follows ``__wrapped__``, closures, partials, bound methods and attributes of objects, and then the
    globals that ``value`` names. It leaves the globals out if ``value`` is a fresh copy of the original, as after a
    reload, because functions of one library name each other.

    Args:
        value: The content of a slot.
        function: The function that was installed in the slot.
        original: The function that it replaced there.
    """
    if value is function or _can_reach(value, function):
        return True
    if is_fresh_copy(value, original):
        return False
    return any(
        found is function or _can_reach(found, function)
        for found in _list_named_globals(unwrap_descriptor(value))
    )


def is_fresh_copy(value: Any, original: Any) -> bool:
    """Return whether a function is another copy of the original's definition, as after ``importlib.reload``."""
    copy, stock = unwrap_descriptor(value), unwrap_descriptor(original)
    codes = getattr(copy, "__code__", None), getattr(stock, "__code__", None)
    if not all(isinstance(code, types.CodeType) for code in codes):
        return False
    return bool(
        copy is not stock
        and codes[0].co_filename == codes[1].co_filename  # type: ignore[union-attr]  # checked above
        and (copy.__module__, copy.__qualname__) == (stock.__module__, stock.__qualname__)
    )


def _can_reach(value: Any, function: Any) -> bool:
    """Search breadth-first, because wrappers keep the function that they wrap close by."""
    seen: set[int] = set()
    waiting = deque([value])
    while waiting and len(seen) < _MAX_SEARCHED_OBJECTS:
        candidate = waiting.popleft()
        if candidate is function:
            return True
        if id(candidate) not in seen:
            seen.add(id(candidate))
            waiting.extend(_list_referents(candidate))
    return False


def _list_referents(value: Any) -> Iterable[Any]:
    # Modules and classes lead to everything, and calling a function does not run all that they contain.
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
        return (wrapped, *_read_cells(value), *(value.__defaults__ or ()))
    return tuple(_read_attributes(value).values()) if callable(value) else ()


def _read_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object without running code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _read_cells(function: types.FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        # The variable of the enclosing function has no value yet.
        except ValueError:
            continue


def _list_named_globals(function: Any) -> Iterable[Any]:
    if not isinstance(function, types.FunctionType):
        return ()
    names = function.__code__.co_names
    return [function.__globals__[name] for name in names if name in function.__globals__]

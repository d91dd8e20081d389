"""Whether a function that somebody else put in our place still runs ours."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from ovpatch.patching.originals import function_in
from ovpatch.patching.targets import is_class, is_module

_ENOUGH: Final = 500


def reaches(value: Any, function: Any, original: Any) -> bool:
    """Whether calling ``value`` may run ``function``.

    It follows ``__wrapped__``, closures, partials, bound methods and attributes of objects, and the globals that
    ``value`` itself names. Globals come last and only if ``value`` is no fresh copy of the original, as a reload
    makes: functions of a library name each other all the time.

    Args:
        value: What lies in the slot now.
        function: What we had installed there.
        original: What had been there before.
    """
    if value is function or _search(value, function):
        return True
    if is_fresh_copy(value, original):
        return False
    return any(one is function or _search(one, function) for one in _named_globals(function_in(value)))


def is_fresh_copy(value: Any, original: Any) -> bool:
    """Whether a function comes from the same definition as another one, as after ``importlib.reload``."""
    one, other = function_in(value), function_in(original)
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
    while waiting and len(seen) < _ENOUGH:
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
        return (function_in(value),)
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

"""Whether one function can be called in every way another one can, by its signature alone."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from inspect import Parameter
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def difference(original: Callable[..., Any], new: Callable[..., Any], *, bound: bool) -> str | None:
    """Return what differs between two signatures, or None if ``new`` can stand for ``original``.

    Names, kinds, order and the presence of defaults must agree; ``*args`` and ``**kwargs`` of ``new`` stand for
    whatever is left. Functions without a signature (most of C) are not compared. The original counts as it shows
    itself, ``new`` as it can be called: ``functools.wraps`` shows a signature that the function itself may not have.

    Args:
        original: What callers know.
        new: What shall stand in its place.
        bound: Whether the first parameter is ``self`` or ``cls``, whose name is free.
    """
    old_parameters, new_parameters = _parameters(original, bound), _parameters(_undisguised(new), bound, follow=False)
    if old_parameters is None or new_parameters is None or _accepts_anything(old_parameters):
        return None
    return _compare(old_parameters, new_parameters)


def _undisguised(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without what ``functools.wraps`` has copied to it, such as ``__signature__``."""
    if not isinstance(function, types.FunctionType):
        return function
    bare = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


def _parameters(function: Callable[..., Any], bound: bool, *, follow: bool = True) -> list[Parameter] | None:
    try:
        found = list(inspect.signature(function, follow_wrapped=follow).parameters.values())
    except (ValueError, TypeError):
        return None
    return found[1:] if bound and found and found[0].kind in _POSITIONAL else found


def _accepts_anything(parameters: list[Parameter]) -> bool:
    return {parameter.kind for parameter in parameters} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def _compare(old: list[Parameter], new: list[Parameter]) -> str | None:
    kinds = {parameter.kind for parameter in new}
    left = {parameter.name: parameter for parameter in old}
    for mine, theirs in zip(_ordered(new), _ordered(old), strict=False):
        if mine.name != theirs.name and theirs.name not in {parameter.name for parameter in _ordered(new)}:
            return f"parameter {theirs.name!r} is called {mine.name!r}"
    for mine in new:
        if mine.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            left = {name: theirs for name, theirs in left.items() if theirs.kind is not mine.kind}
            continue
        if mine.name not in left:
            return f"parameter {mine.name!r} is not in the original"
        problem = _compare_one(left.pop(mine.name), mine)
        if problem:
            return problem
    missing = [name for name, theirs in left.items() if not _absorbed(theirs, kinds)]
    if missing:
        return f"parameter {missing[0]!r} of the original is missing"
    return _order(old, new)


def _ordered(parameters: list[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.kind in _POSITIONAL]


def _compare_one(old: Parameter, new: Parameter) -> str | None:
    if old.kind is not new.kind:
        return f"parameter {old.name!r} is {new.kind.description} and was {old.kind.description}"
    if (old.default is Parameter.empty) is not (new.default is Parameter.empty):
        return f"parameter {old.name!r} has {'no ' if new.default is Parameter.empty else 'a new '}default"
    return None


def _absorbed(parameter: Parameter, kinds: set[Any]) -> bool:
    """Whether ``*args`` and ``**kwargs`` take everything a caller may pass for a parameter."""
    by_position = parameter.kind in _POSITIONAL
    by_name = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return (
        parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and (not by_position or Parameter.VAR_POSITIONAL in kinds)
        and (not by_name or Parameter.VAR_KEYWORD in kinds)
    )


def _order(old: list[Parameter], new: list[Parameter]) -> str | None:
    mine = [parameter.name for parameter in _ordered(new)]
    theirs = [parameter.name for parameter in _ordered(old)][: len(mine)]
    return None if mine == theirs else f"parameters come as ({', '.join(mine)}) instead of ({', '.join(theirs)})"

"""Parameters that a function may read, as far as that can be seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import Tensor, nn

from ovpatch.overlap.nested import leaves

_DEEPEST: Final = 4  # functions that call functions


def params_within(*values: Any) -> Iterator[Tensor]:
    """Yield the parameters among values: in modules, containers, objects, and in what functions refer to.

    Functions refer to their closures and to the global variables that they name, and those again to others.
    """
    seen: set[int] = set()
    yield from _within(values, seen, _DEEPEST)


def _within(values: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    for value in leaves(values):
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, nn.Module):
            if id(value) not in seen:
                seen.add(id(value))
                yield from value.parameters()
        elif depth and id(value) not in seen:
            seen.add(id(value))
            yield from _within(list(_referred(value)), seen, depth - 1)


def _referred(value: Any) -> Iterator[Any]:
    """Yield what a function, a method or an object of a script's class refers to."""
    if isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        names = set(_names(value.__code__))
        yield from (found for name, found in value.__globals__.items() if name in names)
    elif not isinstance(value, (type, Tensor)) and type(value).__module__.partition(".")[0] not in (
        "builtins",
        "torch",
    ):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

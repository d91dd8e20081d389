"""Collectives as dispatch modes see them: the functional operators that stock's DTensors dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from ovpatch.overlap.comm.work import Work, WorkWithEpilogue

Started = tuple[Tensor, Sequence[Work]]
"""The result of a collective, and the works that will have written it."""

Start = Callable[[Tensor], Started]


def all_gather(rows: Tensor, group: dist.ProcessGroup, start: Start) -> Started:
    """Let the modes see an all-gather of rows, which ``start`` starts."""
    return _dispatch("all_gather_into_tensor", (rows, group.size(), group.group_name), start)


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup, start: Start) -> Started:
    """Let the modes see a reduce-scatter of rows, which ``start`` starts."""
    return _dispatch("reduce_scatter_tensor", (rows, "sum", group.size(), group.group_name), start)


def all_reduce(rows: Tensor, group: dist.ProcessGroup, start: Start) -> Sequence[Work]:
    """Let the modes see an all-reduce of rows, which ``start`` starts; the works put the result in their place."""
    total, works = _dispatch("all_reduce", (rows, "sum", group.group_name), start)

    def put_in_place() -> None:
        rows.copy_(total)

    return [WorkWithEpilogue(works, put_in_place)]


def _dispatch(name: str, args: tuple[Any, ...], start: Start) -> Started:
    operator = getattr(torch.ops._c10d_functional, name).default
    taking = _Taking(operator, start)
    with torch.no_grad(), _at_the_bottom(taking):
        answer: Tensor = operator(*args)
    return taking.started or (answer, ())


class _Taking(TorchDispatchMode):
    """Starts a collective in a functional operator's place.

    [Note: what a mode sees] ``CommDebugMode`` and its like count operators by name. A rank's collectives must not
    depend on its modes, since other ranks may have none. So the functional operator is dispatched to the modes; at the
    bottom of their stack this mode takes it, and starts the collective that all ranks start. A mode that does not pass
    the operator on, as one that simulates ranks, returns the result itself.
    """

    def __init__(self, operator: Any, start: Start) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mypy excuses torch's names, no inherited ones
        self._operator, self._start = operator, start
        self.started: Started | None = None  # the result of ``start``; None if no mode has passed the operator on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._operator:
            return func(*args, **(kwargs or {}))
        self.started = self._start(args[0])
        return self.started[0]


@contextmanager
def _at_the_bottom(mode: TorchDispatchMode) -> Iterator[None]:
    """Put a mode below all that a script has entered; torch's own, for tracing, stay below it."""
    stack = _get_current_dispatch_mode_stack()
    above = [other for other in stack if getattr(other, "_mode_key", None) is None]
    _replace(above, [mode, *above])
    try:
        yield
    finally:
        _replace([mode, *above], above)


def _replace(before: Sequence[TorchDispatchMode], after: Sequence[TorchDispatchMode]) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)

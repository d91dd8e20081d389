"""The collectives of one process group, on rows of matrices; dispatch modes see them as functional operators.

``[rows, columns]`` of all ranks lie one behind the other, by rank, in what is gathered and in what is scattered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ovpatch.overlap.comm.collectives import (
    AllGather,
    AllReduce,
    ReduceScatter,
    Work,
    WorkGroup,
    WorkWithEpilogue,
)
from ovpatch.overlap.comm.lifetimes import drop_values, group_state

# Where a backend tells messages apart by tags (gloo), ours must not be taken for the script's, nor for each other.
_TAGS = range(1 << 20, 1 << 21)

_watched = torch._C._len_torch_dispatch_stack  # see [Note: what a mode sees]


class TPGroup:
    """What one process group's ranks send each other, from one device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.world, self.rank = group, group.size(), group.rank()
        self.kind, self._name = device.type, group.group_name
        self._gather = AllGather(group, device)
        self._scatter = ReduceScatter(group, device)
        self._reduce = AllReduce(group, device)
        self._tags = itertools.cycle(
            _TAGS
        )  # of this group: other ranks may be in other groups as well

    def all_gather(self, rows: Tensor) -> tuple[Tensor, WorkGroup]:
        """Start to gather ``[m, k]`` into ``[world * m, k]``; there when the second result has been waited for."""
        whole, works = dispatch(
            "all_gather_into_tensor", (rows, self.world, self._name), self._start_gather
        )
        return whole, WorkGroup(works)

    def _start_gather(self, rows: Tensor) -> tuple[Tensor, Sequence[Work]]:
        whole = rows.new_empty((self.world * rows.shape[0], rows.shape[1]))
        return whole, self._gather([whole], [rows])

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather ``[m, k]`` into ``[world * m, k]``."""
        if _watched():
            whole, pending = self.all_gather(rows)
            pending.wait()
        else:
            whole = rows.new_empty((self.world * rows.shape[0], rows.shape[1]))
            self._gather.run(whole, rows)
        return whole

    def reduce_scatter(self, rows: Tensor) -> tuple[Tensor, WorkGroup]:
        """Start to sum ``[world * m, n]`` over the ranks, and give each its ``[m, n]``."""
        part, works = dispatch(
            "reduce_scatter_tensor", (rows, "sum", self.world, self._name), self._start_scatter
        )
        return part, WorkGroup(works, (rows,))

    def scatter_rows(self, rows: Tensor) -> Tensor:
        """Sum ``[world * m, n]`` over the ranks, and return this rank's ``[m, n]``."""
        if _watched():
            part, pending = self.reduce_scatter(rows)
            pending.wait()
        else:
            part = rows.new_empty((rows.shape[0] // self.world, rows.shape[1]))
            self._scatter.run(part, rows)
        return part

    def _start_scatter(self, rows: Tensor) -> tuple[Tensor, Sequence[Work]]:
        part = rows.new_empty((rows.shape[0] // self.world, rows.shape[1]))
        return part, self._scatter([part], [rows])

    def all_reduce(self, rows: Tensor) -> WorkGroup:
        """Start to sum over the ranks, in place."""
        if not _watched():
            return WorkGroup(self._reduce([rows]))
        total, works = dispatch("all_reduce", (rows, "sum", self._name), self._start_reduce)
        return WorkGroup([WorkWithEpilogue(works, lambda: rows.copy_(total))])

    def _start_reduce(self, rows: Tensor) -> tuple[Tensor, Sequence[Work]]:
        total = rows.clone()  # the operator that modes see leaves its input as it is
        return total, self._reduce([total])

    def exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> WorkGroup:
        """Start to send one tensor to a rank and to receive one from another; all ranks do so in the same order."""
        tag = next(self._tags)
        operations = [
            dist.P2POp(dist.isend, sent, group=self.group, tag=tag, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=source),
        ]
        return WorkGroup(dist.batch_isend_irecv(operations), (sent,))


def get_tp_group(group: dist.ProcessGroup, device: torch.device) -> TPGroup:
    """Return the :class:`TPGroup` of a process group; it is made once."""
    state, key = group_state(group), (TPGroup, device)
    found: TPGroup | None = state.values.get(
        key
    )  # without the calls of a first time, for every linear asks
    if found is None:
        found = state.get_or_create(key, lambda: TPGroup(group, device), keeps_group=True)
    return found


_generation = 0
_world: dist.ProcessGroup | None = None  # the default group of that generation


def get_generation() -> int:
    """Return a number that changes when settings may have changed, or process groups were made again."""
    global _generation, _world
    if distributed_c10d.GroupMember.WORLD is not _world:
        _world = distributed_c10d.GroupMember.WORLD
        _generation += 1
    return _generation


def drop_tp_groups() -> None:
    """Drop all groups, and have ranks compare their settings again."""
    global _generation
    _generation += 1
    drop_values(TPGroup)


Started = tuple[Tensor, Sequence[Work]]
"""The result of a collective, and the works that will have written it."""

Start = Callable[[Tensor], Started]


def dispatch(name: str, args: tuple[Any, ...], start: Start) -> Started:
    """Start a collective of rows, the first argument of a functional operator; let modes, if any, see the operator."""
    if not _watched():
        return start(args[0])
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
        self.started: Started | None = (
            None  # the result of ``start``; None if no mode has passed the operator on
        )

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

"""The collectives of one process group, on rows of matrices; dispatch modes see them as functional operators.

A gathered matrix, and the input of a reduce-scatter, has the rows of all ranks in the order of the ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from ovpatch.overlap.comm.lifetimes import (
    drop_values,
    group_state,
    group_values,
    is_destroyed,
)

# Some backends, such as gloo, match messages by tag. Our tags must differ from the tags of the script, and two messages
# in flight must have different tags.
_TAGS = range(1 << 20, 1 << 21)

# Returns the number of dispatch modes; see [Note: what a mode sees].
_has_modes = torch._C._len_torch_dispatch_stack


class TPGroup:
    """The collectives and messages of one process group's ranks, from one device.

    Attributes:
        group: The process group.
        world: The number of its ranks.
        rank: This rank in the group.
        kind: The type of the device, such as ``cuda``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world = group.size()
        self.rank = group.rank()
        self.kind = device.type
        self._name = group.group_name
        self._all_gather = AllGather(group, device)
        self._reduce_scatter = ReduceScatter(group, device)
        self._all_reduce = AllReduce(group, device)
        # Each group counts its tags itself, because its ranks may exchange different numbers of messages in other
        # groups.
        self._tags = itertools.cycle(_TAGS)

    def all_gather(self, rows: Tensor) -> tuple[Tensor, WorkGroup]:
        """Start to gather ``[m, k]``; return ``[world * m, k]``, and the collective that writes it."""
        gathered, works = dispatch(
            "all_gather_into_tensor", (rows, self.world, self._name), self._start_gather
        )
        return gathered, WorkGroup(works)

    def _start_gather(self, rows: Tensor) -> tuple[Tensor, Sequence[Work]]:
        gathered = _make_rows(rows, rows.shape[0] * self.world)
        return gathered, self._all_gather([gathered], [rows])

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather ``[m, k]`` into ``[world * m, k]``."""
        # run() gathers on the current stream, without the events of a start and a wait.
        if _has_modes():
            gathered, pending = self.all_gather(rows)
            pending.wait()
        else:
            gathered = _make_rows(rows, rows.shape[0] * self.world)
            self._all_gather.run(gathered, rows)
        return gathered

    def reduce_scatter(self, rows: Tensor) -> tuple[Tensor, WorkGroup]:
        """Start to sum ``[world * m, n]`` over the ranks; return this rank's ``[m, n]``, and the collective."""
        part, works = dispatch(
            "reduce_scatter_tensor", (rows, "sum", self.world, self._name), self._start_scatter
        )
        return part, WorkGroup(works, (rows,))

    def scatter_rows(self, rows: Tensor) -> Tensor:
        """Sum ``[world * m, n]`` over the ranks, and return this rank's ``[m, n]``."""
        if _has_modes():
            part, pending = self.reduce_scatter(rows)
            pending.wait()
        else:
            part = _make_rows(rows, rows.shape[0] // self.world)
            self._reduce_scatter.run(part, rows)
        return part

    def _start_scatter(self, rows: Tensor) -> tuple[Tensor, Sequence[Work]]:
        part = _make_rows(rows, rows.shape[0] // self.world)
        return part, self._reduce_scatter([part], [rows])

    def all_reduce(self, rows: Tensor) -> WorkGroup:
        """Start to sum rows over the ranks, in place."""
        if not _has_modes():
            return WorkGroup(self._all_reduce([rows]))
        total, works = dispatch("all_reduce", (rows, "sum", self._name), self._start_reduce)
        # The functional operator returns a new tensor, but callers read the sum in place.
        return WorkGroup([WorkWithEpilogue(works, lambda: rows.copy_(total))])

    def _start_reduce(self, rows: Tensor) -> tuple[Tensor, Sequence[Work]]:
        # The functional operator that modes see does not change its input.
        total = rows.clone()
        return total, self._all_reduce([total])

    def exchange(self, outgoing: Tensor, target: int, incoming: Tensor, source: int) -> WorkGroup:
        """Start to send one tensor and to receive another one.

        All ranks exchange in the same order, which gives both ends of a message the same tag.

        Args:
            outgoing: The tensor to send.
            target: The rank that receives it.
            incoming: The memory of the tensor to receive.
            source: The rank that sends it.
        """
        tag = next(self._tags)
        operations = [
            dist.P2POp(dist.isend, outgoing, group=self.group, tag=tag, group_peer=target),
            dist.P2POp(dist.irecv, incoming, group=self.group, tag=tag, group_peer=source),
        ]
        return WorkGroup(dist.batch_isend_irecv(operations), (outgoing,))


def _make_rows(like: Tensor, count: int) -> Tensor:
    """Return undefined rows with the features of other rows."""
    # new_empty() parses a tuple of sizes nearly twice as long as two numbers.
    return like.new_empty(count, like.shape[1])


def get_tp_group(group: dist.ProcessGroup, device: torch.device) -> TPGroup:
    """Return the :class:`TPGroup` of a process group, created by the first call."""
    state, key = group_state(group), (TPGroup, device)
    # Every linear calls this function, and a read of the dictionary takes fewer calls than get_or_create().
    tp_group: TPGroup | None = state.values.get(key)
    if tp_group is None:
        tp_group = state.get_or_create(key, lambda: TPGroup(group, device), keeps_group=True)
    return tp_group


def resolve_group(name: Any) -> dist.ProcessGroup:
    """Return the process group of a name.

    Raises:
        RuntimeError: There is no group of this name.
    """
    return distributed_c10d._resolve_process_group(name)


# Operators of graphs have names of groups. The references are weak, so that this table keeps no group alive.
_tp_groups_by_name: dict[tuple[str, torch.device], weakref.ref[TPGroup]] = {}


def resolve_tp_group(name: str, device: torch.device) -> TPGroup:
    """Return the :class:`TPGroup` of a process group's name; see :func:`resolve_group`."""
    reference = _tp_groups_by_name.get((name, device))
    found = None if reference is None else reference()
    # A new group may have the name of a destroyed group.
    if found is None or is_destroyed(found.group):
        found = get_tp_group(resolve_group(name), device)
        _tp_groups_by_name[name, device] = weakref.ref(found)
    return found


_generation = 0
# The default process group of the current generation.
_default_group: dist.ProcessGroup | None = None


def get_generation() -> int:
    """Return a number that changes when settings may have changed, or process groups were created again."""
    global _generation, _default_group
    # A script may destroy all groups and create them again. The new default group is another object.
    if distributed_c10d.GroupMember.WORLD is not _default_group:
        _default_group = distributed_c10d.GroupMember.WORLD
        _generation += 1
    return _generation


@dataclass(frozen=True)
class _Agreement:
    """The generation in which the ranks of a group agreed on the settings."""

    generation: int


def record_agreement(group: dist.ProcessGroup) -> None:
    """Record that the ranks of a group have agreed on the settings, so that graphs may contain its operators."""
    group_state(group).values[_Agreement] = _Agreement(get_generation())


def list_agreed_groups() -> list[str]:
    """Return the names of the groups whose ranks have agreed on the current settings, sorted."""
    generation = get_generation()
    return sorted(
        group.group_name
        for group, agreement in group_values(_Agreement)
        if agreement.generation == generation and not is_destroyed(group)
    )


def drop_tp_groups() -> None:
    """Drop all :class:`TPGroup` objects, and make ranks compare their settings again."""
    global _generation
    _generation += 1
    _tp_groups_by_name.clear()
    drop_values(TPGroup)
    drop_values(_Agreement)


StartedCollective = tuple[Tensor, Sequence[Work]]
"""The result of a collective, and the works that write it."""

StartCollective = Callable[[Tensor], StartedCollective]


def dispatch(name: str, args: tuple[Any, ...], start: StartCollective) -> StartedCollective:
    """Start a collective, and let dispatch modes see it as a functional operator.

    Args:
        name: Name of the operator in ``torch.ops._c10d_functional``.
        args: Its arguments; the first one is the rows.
        start: Starts the collective of the rows.
    """
    if not _has_modes():
        return start(args[0])
    operator = getattr(torch.ops._c10d_functional, name).default
    intercept = _InterceptMode(operator, start)
    with torch.no_grad(), _push_at_bottom(intercept):
        result: Tensor = operator(*args)
    return intercept.started or (result, ())


class _InterceptMode(TorchDispatchMode):
    """The mode that starts a collective instead of a functional operator.

    [Note: what a mode sees] ``CommDebugMode`` and similar modes count operators by name. A rank's collectives must not
    depend on its modes, because peers may have none. So the functional operator is dispatched to the modes. At the
    bottom of their stack this mode intercepts it, and starts the collective that all ranks start. A mode that does not
    pass the operator on returns the result itself, as a mode that simulates ranks does.
    """

    def __init__(self, operator: Any, start: StartCollective) -> None:
        # The settings of mypy excuse calls of torch's names, but not of inherited names.
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator = operator
        self._start = start
        # The result of `start`; None if a mode did not pass the operator on.
        self.started: StartedCollective | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._operator:
            return func(*args, **(kwargs or {}))
        self.started = self._start(args[0])
        return self.started[0]


@contextmanager
def _push_at_bottom(mode: TorchDispatchMode) -> Iterator[None]:
    """Push a mode below all modes that the script has entered, and above the modes by which torch traces."""
    stack = _get_current_dispatch_mode_stack()
    script_modes = [
        script_mode for script_mode in stack if getattr(script_mode, "_mode_key", None) is None
    ]
    _replace_modes(script_modes, [mode, *script_modes])
    try:
        yield
    finally:
        _replace_modes([mode, *script_modes], script_modes)


def _replace_modes(
    popped: Sequence[TorchDispatchMode], pushed: Sequence[TorchDispatchMode]
) -> None:
    for _ in popped:
        _pop_mode()
    for mode in pushed:
        _push_mode(mode)

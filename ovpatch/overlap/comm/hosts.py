"""The hosts of a process group's ranks, and reductions that cross the links between hosts seldom.

Ranks reduce within their host first, then one sum per host crosses the links. A flat ring, or a
tree, sends more over each link if a host has several ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import (
    IS_COMPLETED,
    AllReduce,
    Broadcast,
    BufferPool,
    Collectives,
    ReduceScatter,
    Work,
    WorkWithEpilogue,
    backend_name,
)
from ovpatch.overlap.comm.consensus import agree_on_name, find_hosts
from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    outside_modes,
    reset_after_fork,
)
from ovpatch.overlap.comm.step_communicators import (
    close_communicator,
    connect_for_steps,
    connect_step_communicator,
    lacks_rank,
    make_communicator,
    step_communicator,
)
from ovpatch.overlap.comm.streams import unwatched_stream

T = TypeVar("T")

# --- the layout ---


@dataclass(frozen=True)
class HostLayout:
    """The ranks of a process group by host.

    Attributes:
        names: The identifiers of the hosts, sorted by the first rank of each host.
        ranks: The group ranks of each host, in ascending order.
        host: The index of this rank's host.
        place: The index of this rank in its host.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    host: int
    place: int

    @classmethod
    def of(cls, names_by_rank: Sequence[str], rank: int) -> HostLayout:
        """Return the layout in which each group rank has a host, as ``rank`` sees it."""
        by_name: dict[str, list[int]] = {}
        for member, name in enumerate(names_by_rank):
            by_name.setdefault(name, []).append(member)
        own = names_by_rank[rank]
        ranks = tuple(map(tuple, by_name.values()))
        return cls(tuple(by_name), ranks, list(by_name).index(own), by_name[own].index(rank))

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The group ranks of this rank's host."""
        return self.ranks[self.host]

    @property
    def num_lanes(self) -> int:
        """Number of ranks per host that send over the links: those that each host has."""
        return min(map(len, self.ranks))

    @property
    def is_even(self) -> bool:
        """True if each host has the same number of ranks."""
        return self.num_lanes == max(map(len, self.ranks))

    @property
    def is_hierarchical(self) -> bool:
        """True if there are several hosts, and several ranks on one of them."""
        return len(self.ranks) > 1 and max(map(len, self.ranks)) > 1

    def sends_less_by_exchange(self) -> bool:
        """Return whether an all-to-all of terms sends less over each link than the ring of an all-reduce."""
        world = sum(map(len, self.ranks))
        # In units of a tensor divided by the number of ranks. A single host has no link.
        sent = max(len(ranks) * (world - len(ranks)) for ranks in self.ranks)
        return 0 < sent < 2 * (world - 1)


def find_host_layout(group: dist.ProcessGroup) -> HostLayout:
    """Return the hosts of a group's ranks; the first call is made by all ranks together."""
    layout: HostLayout = group_state(group).get_or_create(
        HostLayout, lambda: HostLayout.of(find_hosts(group), group.rank())
    )
    return layout


def spans_hosts(group: dist.ProcessGroup) -> bool:
    """Return whether a group has ranks on several hosts, if its ranks have called :func:`find_host_layout`."""
    layout: HostLayout | None = group_state(group).values.get(HostLayout)
    return layout is not None and len(layout.ranks) > 1


# --- communicators ---


class HostGroups:
    """The communicators of one group and type of device within hosts and across them.

    A reduction has stages: within the host, across hosts, within the host. Ranks pair the
    collectives of a communicator by position, so each stage has its communicator.

    On gloo, a rank that waited for each stage would wait in a backward that still computes. So each
    start of a reduction also starts the stages that are ready, and the end of the backward waits
    for the rest. A reduction starts a stage only after all earlier reductions have started theirs,
    which is the same order on all ranks.

    On CUDA, the host launches all stages of a reduction at once, and a stream waits between them.
    So all hosts launch the collectives of all communicators in one order, and the first collective
    that is not over waits for no later one. Stages of several reductions overlap, because each
    communicator of NCCL has its own stream: links between hosts and within a host work at the same
    time, as under FSDP2's hybrid shards.

    Args:
        group: The process group; no reference is stored.
        device: A device of that type.
        layout: The hosts of the group.

    Attributes:
        layout: See the argument.
        within: The communicator of this host for the first stage.
        across: The communicator of the ranks in this place of each host; None if a host has none.
        gather: The communicator of this host for the last stage; None on CUDA, where all-reduces
            are left to NCCL.
        steps: The communicator of this host for collectives in steps.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, layout: HostLayout) -> None:
        self.layout = layout
        self._device_type = device.type
        has_lane = layout.place < layout.num_lanes
        lane = [ranks[layout.place] for ranks in layout.ranks] if has_lane else []
        timeout_s = group_timeout_s(group)
        # Torch does not register the communicators, see [Note: step communicators].
        name = agree_on_name(group, f"hosts of {device.type}", timeout_s=timeout_s)

        def make(purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            return make_communicator(group, device, f"{name}/{purpose}/{ranks[0]}", ranks)

        # All ranks create the communicators in this order.
        self.within = make("within", layout.own_ranks)
        self.across = make("across", lane) if has_lane else None
        self.gather = None if self.has_streams else make("gather", layout.own_ranks)
        self.steps = make("steps", layout.own_ranks)
        # The streams that wait between stages, by device.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # The reductions whose last stage has not started, in the order of their calls.
        self._started: deque[_Reduction] = deque()
        self._lock = threading.RLock()
        reset_after_fork(self, "_lock", threading.RLock)
        # The error of a stage. Later collectives would pair with those that it left out.
        self._failure: BaseException | None = None

    @property
    def has_streams(self) -> bool:
        """True if streams wait for collectives; otherwise the host does."""
        return self._device_type == "cuda"

    def connect(self, device: torch.device) -> None:
        """Connect the ranks of each communicator; all ranks call this.

        See :func:`.connect_step_communicator`.
        """
        assert self.across is not None, "each host has the same number of ranks"
        with outside_modes():
            own = torch.zeros(1, dtype=torch.float32, device=device)
            terms = torch.zeros(self.within.size(), dtype=torch.float32, device=device)
            self.within._reduce_scatter_base(own, terms, dist.ReduceScatterOptions()).wait()
            self.across.allreduce([own]).wait()
        connect_for_steps(self.steps, device)

    def start_on_streams(
        self, stages: Sequence[Callable[[], Sequence[Work]]], tensors: tuple[Tensor, ...]
    ) -> Work:
        """Launch all stages of a reduction in the order that the class describes.

        Args:
            stages: The stages. The first one reads after the work so far on the current stream.
            tensors: The tensors that the stages read and write.
        """
        works = stages[0]()
        with unwatched_stream(self._find_stream(tensors[0].device)):
            for stage in stages[1:]:
                for work in works:
                    work.wait()
                works = stage()
        return _ReductionOnStreams(works, tensors)

    def _find_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def start(self, stages: Sequence[Callable[[], Sequence[Work]]]) -> _Reduction:
        """Start the first stage of a reduction, and the stages of earlier ones that are ready."""
        with self._lock:
            self._advance()
            reduction = _Reduction(self, stages)
            self._started.append(reduction)
            reduction.start_stage()
            return reduction

    def finish(self, reduction: _Reduction) -> None:
        """Start the remaining stages of all reductions up to ``reduction``, and wait for its last."""
        with self._lock:
            if reduction in self._started:
                due = list(self._started)[: self._started.index(reduction) + 1]
                # Peers wait for the next stage of each of them, so the links stay in use.
                for stage in range(1, max(earlier.num_stages for earlier in due)):
                    for earlier in due:
                        earlier.reach(stage)
                self._drop_complete()
        reduction.wait_for_stage()

    def run_stage(self, function: Callable[[], Sequence[Work] | None]) -> Sequence[Work] | None:
        """Call a function that starts a stage or waits for it; after a failure, raise that again."""
        if self._failure is not None:
            raise RuntimeError(_ERROR_FAILED.format(self._failure)) from self._failure
        try:
            return function()
        except Exception as error:
            self._failure = error
            raise

    def close(self, *, aborts: bool) -> None:
        """Close the communicators after their collectives, or abort these if a rank is missing."""
        for communicator in (self.within, self.across, self.gather, self.steps):
            if communicator is not None:
                close_communicator(communicator, self._device_type, aborts=aborts)

    def _advance(self) -> None:
        """Start the stages that are ready, in the order that :class:`HostGroups` describes."""
        if self._failure is not None:
            return
        limit = None
        for reduction in self._started:
            while (limit is None or reduction.stage < limit) and reduction.is_ready():
                reduction.reach(reduction.stage + 1)
            limit = reduction.stage
        self._drop_complete()

    def _drop_complete(self) -> None:
        while self._started and self._started[0].is_last_stage:
            self._started.popleft()


_ERROR_FAILED: Final = (
    "ovpatch: gradients cannot be reduced over hosts, because an earlier reduction has failed: {}. "
    "Restart all ranks "
    "from the last checkpoint."
)


class _Reduction:
    """A reduction in stages: a :class:`Work`."""

    def __init__(self, groups: HostGroups, stages: Sequence[Callable[[], Sequence[Work]]]) -> None:
        self._groups = groups
        self._stages = stages
        self.num_stages = len(stages)
        # The index of the stage that was started last.
        self.stage = -1
        self._works: Sequence[Work] = ()

    @property
    def is_last_stage(self) -> bool:
        """True if no stage is left to start."""
        return self.stage == self.num_stages - 1

    def is_ready(self) -> bool:
        """Return whether there is another stage, and the host would not wait before it."""
        return not self.is_last_stage and all(map(IS_COMPLETED, self._works))

    def start_stage(self) -> None:
        """Start the next stage."""
        self.stage += 1
        self._works = self._groups.run_stage(self._stages[self.stage]) or ()

    def reach(self, stage: int) -> None:
        """Wait for earlier stages, and start this one."""
        while self.stage < min(stage, self.num_stages - 1):
            current = self.stage
            self.wait_for_stage()
            # A signal handler that waits, too, may have started the next stage.
            if self.stage == current:
                self.start_stage()

    def wait_for_stage(self) -> None:
        """Wait for the stage that was started last."""

        def wait() -> None:
            for work in self._works:
                work.wait()

        self._groups.run_stage(wait)

    def wait(self) -> None:
        """Wait for the result."""
        self._groups.finish(self)

    def is_completed(self) -> bool:
        """Return whether the result is there."""
        return self.is_last_stage and all(map(IS_COMPLETED, self._works))


class _ReductionOnStreams:
    """A reduction whose stages are launched, and the tensors that they use: a :class:`Work`.

    The stream that launched the first stage owns these tensors, and does not wait for the stages.
    """

    def __init__(self, works: Sequence[Work], tensors: tuple[Tensor, ...]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        """Make the current stream wait for the result, and drop the tensors."""
        for work in self._works:
            work.wait()
        self._tensors = ()


def find_host_groups(
    group: dist.ProcessGroup, device: torch.device, layout: HostLayout
) -> HostGroups:
    """Return the communicators of a group's hosts, created by the first call of all ranks."""
    state = group_state(group)
    made: HostGroups = state.get_or_create(
        (HostGroups, device.type), lambda: HostGroups(group, device, layout)
    )
    return made


def close_host_groups(group: dist.ProcessGroup | None = None) -> None:
    """Close the communicators of the hosts of one group, or of all, after their collectives.

    See :func:`.close_step_communicators`.
    """
    if is_exiting_by_error():
        return
    for owner, groups in group_values(HostGroups, group):
        groups.close(aborts=lacks_rank(owner))
        for key in [key for key, value in group_state(owner).values.items() if value is groups]:
            del group_state(owner).values[key]


def find_hierarchy_objection(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason why reductions over hosts are left to the backend; "" if there is none."""
    backend = backend_name(group, device)
    if backend == "gloo" and device.type == "cpu":
        return ""
    return f"{backend} on {device.type} chooses its ways between hosts itself"


def find_shards_objection(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason why hosts cannot have all shards each; "" if there is none."""
    backend = backend_name(group, device)
    if (backend, device.type) in _SHARDING_BACKENDS:
        return ""
    return (
        f"shards within hosts need gloo on the CPU or NCCL on CUDA, not {backend} on {device.type}"
    )


# The backends whose collectives keep shards within hosts, with the type of the device.
_SHARDING_BACKENDS: Final = (("gloo", "cpu"), ("nccl", "cuda"))


class ShardHolders:
    """The ranks that together have all shards of a model: the ranks of a group, or of each host.

    Args:
        group: The process group of the model.
        layout: The hosts of the group, each of which has all shards; the number of ranks is the
            same on each. Default: the ranks of the group have one shard each.

    Attributes:
        ranks: The group ranks that have the shards, by the index of the shard. Each host has its
            own holders.
        place: The index of this rank's shard.
        peers: The group ranks of the other shards.
        layout: See the argument.
        is_first: Whether this rank is one of the first holders, which count in sums over the group.
    """

    def __init__(self, group: dist.ProcessGroup, layout: HostLayout | None = None) -> None:
        self._group = group
        self.layout = layout
        self.ranks = tuple(range(group.size())) if layout is None else layout.own_ranks
        self.place = self.ranks.index(group.rank())
        self.peers = [rank for rank in self.ranks if rank != group.rank()]
        self.is_first = layout is None or layout.host == 0

    def __len__(self) -> int:
        return len(self.ranks)

    def by_place(self, replies: Mapping[int, T]) -> dict[int, T]:
        """Return the replies of peers by the index of their shards instead of their group ranks."""
        return {self.ranks.index(rank): reply for rank, reply in replies.items()}

    def step_communicator(self, device: torch.device) -> dist.ProcessGroup:
        """Return the communicator of the holders for collectives in steps.

        All ranks of the group call this at the same place, see [Note: step communicators].
        """
        if self.layout is None:
            return step_communicator(self._group, device)
        return find_host_groups(self._group, device, self.layout).steps

    def connect(self, device: torch.device) -> None:
        """Create the communicators of steps, and connect their ranks; all ranks call this.

        See :func:`.connect_step_communicator`.
        """
        # Clips sum over all ranks of the group.
        connect_step_communicator(self._group, device)
        if self.layout is not None:
            find_host_groups(self._group, device, self.layout).connect(device)


# --- collectives ---


class HostCollectives(Collectives):
    """Collectives that reduce within hosts first.

    Args:
        group: The process group.
        device: The device of the gradients.
        layout: The hosts of the group.
        average: Whether to average instead of sum, which NCCL can.
        reduces_by_host: Whether all-reduces work so; otherwise they are flat.
        shards_by_host: Whether each host gets all shards, one per rank of the host; otherwise
            reduce-scatters are flat, and all ranks of the group get one each.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        layout: HostLayout,
        *,
        average: bool,
        reduces_by_host: bool,
        shards_by_host: bool,
    ) -> None:
        super().__init__(group, device, average=average, exchanges=layout.sends_less_by_exchange())

        def find() -> HostGroups:
            return find_host_groups(group, device, layout)

        if reduces_by_host:
            assert not average, "gloo cannot average"
            self.all_reduce = HostAllReduce(group, device, find)
        if shards_by_host:
            self.reduce_scatter = HostReduceScatter(group, device, find, average=average)


class HostAllReduce(AllReduce):
    """The implementation of :class:`AllReduce` in which one sum per host crosses the links.

    Each host sums all elements. The ranks in one place of each host sum their slice over hosts.
    Then each of them broadcasts its slice within its host.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, find: Callable[[], HostGroups]
    ) -> None:
        super().__init__(group, device)
        # The communicators are created in the first backward, which all ranks reach.
        self._find = find
        self._within: AllReduce | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums; see :class:`AllReduce`."""
        # Ranks have values at different rows, which slices of elements do not fit.
        if len(tensors) == 1 and tensors[0].is_sparse:
            return super().__call__(tensors)
        groups = self._find()
        if self._within is None:
            self._within = AllReduce(groups.within, tensors[0].device)
        sum_within = self._within
        place = groups.layout.place
        num_lanes = groups.layout.num_lanes
        slices = [_view_reals(tensor).tensor_split(num_lanes) for tensor in tensors]

        def sum_across() -> Sequence[Work]:
            if groups.across is None:
                return ()
            return _sum_each(groups.across, [lanes[place] for lanes in slices])

        assert groups.gather is not None, "NCCL reduces over hosts itself"
        roots = [Broadcast(groups.gather, root) for root in range(num_lanes)]

        def gather() -> Sequence[Work]:
            return [
                broadcast(lane)
                for lanes in slices
                for broadcast, lane in zip(roots, lanes, strict=True)
                if lane.numel()
            ]

        return [groups.start([lambda: sum_within(tensors), sum_across, gather])]


class HostReduceScatter(ReduceScatter):
    """The implementation of :class:`ReduceScatter` in which each host gets all shards.

    Each host reduces to shards, one per rank. The ranks in one place of each host then sum their
    shards over hosts. An average over all ranks is the average of the hosts' averages, because each
    host has the same number of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        find: Callable[[], HostGroups],
        *,
        average: bool = False,
    ) -> None:
        super().__init__(group, device, average=average)
        self._find = find
        self._pool = BufferPool()
        # The collectives of both stages.
        self._stages: tuple[ReduceScatter, AllReduce] | None = None

    def __call__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: object = None
    ) -> Sequence[Work]:
        """Start the reduce-scatters; see :class:`ReduceScatter`.

        Args:
            outputs: The contiguous shards of this rank, of shape ``[size]``.
            inputs: Contiguous tensors of one dtype, of shape ``[ranks of a host * size]``.
            options: Not used, because no call is blocking.
        """
        del options
        groups = self._find()
        if self._stages is None:
            assert groups.across is not None, "each host has the same number of ranks"
            self._stages = (
                ReduceScatter(groups.within, self._device, average=self._average),
                AllReduce(groups.across, self._device, average=self._average),
            )
        reduce_within, reduce_across = self._stages
        if groups.has_streams:
            return [
                groups.start_on_streams(
                    [lambda: reduce_within(outputs, inputs), lambda: reduce_across(outputs)],
                    (*outputs, *inputs),
                )
            ]
        # Peers may read the last shards until this rank waits, so the sums get other memory.
        sizes = [output.numel() for output in outputs]
        staged = self._pool.get(sum(sizes), outputs[0])
        shards = list(staged.split(sizes))

        def unpack() -> None:
            torch._foreach_copy_(list(outputs), shards)
            self._pool.put(staged)

        reduction = groups.start(
            [lambda: reduce_within(shards, inputs), lambda: reduce_across([staged])]
        )
        return [WorkWithEpilogue([reduction], unpack)]


def make_collectives(
    group: dist.ProcessGroup,
    device: torch.device,
    layout: HostLayout | None,
    *,
    average: bool,
    reduces_by_host: bool,
    shards_by_host: bool,
) -> Collectives:
    """Return the collectives that reduce gradients; see :class:`HostCollectives`."""
    if layout is None:
        return Collectives(group, device, average=average)
    return HostCollectives(
        group,
        device,
        layout,
        average=average,
        reduces_by_host=reduces_by_host,
        shards_by_host=shards_by_host,
    )


def _view_reals(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _sum_each(communicator: dist.ProcessGroup, tensors: Iterable[Tensor]) -> Sequence[Work]:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return [communicator.allreduce([tensor], options) for tensor in tensors if tensor.numel()]

"""All-gathers of parameters after a step in which every rank updated its own slice, hidden under what comes next.

[Note: one bucket settles as one] A bucket is gathered by one launch, whose parts cannot be waited for one by one, and
ranks must launch the same. Whether a parameter can be pending is a question of this rank alone. So the launch is the
same in any case, and if one parameter cannot be pending, this rank waits for the whole bucket at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.hookspecs import cache_dir
from ovpatch.overlap.comm.collectives import AllGather
from ovpatch.overlap.comm.side_streams import quietly_on, side_streams
from ovpatch.overlap.comm.step_communicator import step_communicator
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.comm.work import Work, WorkWithEpilogue
from ovpatch.overlap.copy_engine.registry import attend, gathering
from ovpatch.overlap.copy_engine.selection import choose
from ovpatch.overlap.data_parallel.bucket_assignment import layer_of
from ovpatch.overlap.tensors.pending_param import is_pending, lose, mark, owners_of, plainly, unmark
from ovpatch.overlap.tensors.shard import Shard, flat, shard_range, shard_view
from ovpatch_plugins.dist_optimizer.report import COUNTERS

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.optim import Optimizer

    from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


class _Arrived(NamedTuple):
    """What one stream has waited for, so that others can.

    Attributes:
        works: The collectives.
        event: Behind what was copied out of them, if anything was.
        followers: Streams that have waited, by their number.
    """

    works: Sequence[Work]
    event: torch.cuda.Event | None
    followers: set[int]


class _Padded(NamedTuple):
    """A parameter that does not divide by the number of ranks is gathered elsewhere, and copied out."""

    param: Tensor
    gathered: Tensor


def launch(gathers: Iterable[ParamAllGather]) -> None:
    """Launch gathers one behind the other; see :meth:`ParamAllGather.launch`."""
    with plainly():
        for gather in gathers:
            gather._launch()


class ParamAllGather:
    """ParamAllGathers the slices of a bucket's parameters, in the parameters' own memory.

    Use it over and over: :meth:`launch` after each step, :meth:`settle` before the next. Readers in between settle by
    themselves.

    Args:
        params: Dense parameters of one dtype and device, each cut by :func:`ovpatch.overlap.tensors.shard.shard_range`.
        group: The process group, on whose ranks the slices are.
        feature: For labels in profiles.
        name: Of the bucket, for labels in profiles.
        communicator: Over the same ranks, which the backend gathers on; by default the group itself.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        *,
        feature: str = "dist_optimizer",
        name: str = "",
        communicator: dist.ProcessGroup | None = None,
    ) -> None:
        self._params = tuple(params)
        self._group, self._world, self._rank = group, group.size(), group.rank()
        self._device = params[0].device
        self._gather = AllGather(group, self._device, communicator)
        self._labels = profiler_label(feature, "all_gather", name), profiler_label(feature, "wait", name)
        self._lock = threading.RLock()  # re-entered if a finaliser or a signal handler reads while we settle
        self._works: Sequence[Work] = []
        self._padded: list[_Padded] = []
        self._stream: torch.cuda.Stream | None = None
        self._arrived: _Arrived | None = None
        # Memory that torch cannot resize was made by another library (``from_numpy()``), which may read it. Asked once:
        # a later ``numpy()`` looks alike for ever, though its arrays are counted while there are any.
        self._foreign = any(not param.untyped_storage().resizable() for param in params)
        # [Note: owners of a parameter] With these nodes kept, a tensor has as many owners with a graph as without. Who
        # else is legitimate differs: DDP's C++ reducer is, ours is none, and the former lets go of some after the first
        # step. So the fewest owners that any parameter of the bucket has ever had are normal, and one more is a
        # scripted module, or a graph that is still to be run backward.
        self._owners = sys.maxsize
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params if p.requires_grad]

    @property
    def is_pending(self) -> bool:
        """Whether a gather has been launched and nobody has waited for it."""
        return bool(self._works)

    @property
    def is_copied(self) -> bool:
        """Whether copy engines gather, instead of the group's backend."""
        return gathering(self._group, self._device) is not None

    def launch(self) -> str:
        """Start gathering: a collective, which all ranks of the group must call in the same order.

        It reads this rank's slices as the current stream leaves them.

        Returns:
            Nothing if the parameters are pending now, else why not: then they are complete, in stream order.

        Raises:
            RuntimeError: The last gather has not been settled, so its results would mix with the slices of now.
        """
        with plainly():
            return self._launch()

    def _launch(self) -> str:
        if self._world == 1:
            return ""
        with self._lock:
            if self._works:
                raise RuntimeError("a gather was launched while the last one was under way; call settle() before step")
            if self._arrived is not None:
                self._arrived = None  # whose works hold the parameters' memory
                side_streams.remove_transfer(self, self._device.index)
            reason = self._mark()
            try:
                self._start()
            except BaseException:  # a KeyboardInterrupt, too: nobody would ever bring what is marked
                self._unmark()
                raise
            if reason:
                self.settle()
            return reason

    def settle(self) -> None:
        """Make the caller's stream, launch's and all that are current in some thread wait for the values.

        No collective, so on any rank, by any thread, in any mode.
        """
        with self._lock:
            if not self._works:
                return
            try:
                with plainly(), profiler_span(self._labels[1]):
                    self._wait()
            except RuntimeError as error:  # of the collective
                for param in self._params:
                    if is_pending(param):
                        lose(param, self.settle, error)
                raise
            self._unmark()
            self._works = []
            self._padded.clear()

    def _mark(self) -> str:
        if self._foreign:
            return "another library made its memory"
        self._owners = min(self._owners, *map(owners_of, self._params))
        for param in self._params:
            if reason := mark(param, self.settle, owners=self._owners):
                self._unmark()
                return reason
        return ""

    def _unmark(self) -> None:
        for param in self._params:
            unmark(param)

    def _start(self) -> None:
        with profiler_span(self._labels[0]):
            pairs = [self._output_and_input(param) for param in self._params]
            device = self._params[0].device
            self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._works = self._gather(*zip(*pairs, strict=True))

    def _output_and_input(self, param: Parameter) -> tuple[Tensor, Tensor]:
        data = param.data
        numel = data.numel()
        part = shard_range(numel, self._world, self._rank)
        if part.size * self._world == numel:
            return flat(data), shard_view(data, part)
        return self._padded_copy(flat(data), part)

    def _padded_copy(self, elements: Tensor, part: Shard) -> tuple[Tensor, Tensor]:
        gathered = elements.new_empty(part.size * self._world)
        begin = self._rank * part.size
        gathered[begin : begin + part.numel].copy_(elements[part.begin : part.end])
        self._padded.append(_Padded(elements, gathered))
        return gathered, gathered[begin : begin + part.size]

    def _wait(self) -> None:
        if self._stream is None:
            self._take()
            return
        reader = torch.cuda.current_stream(self._device)
        if reader == self._stream:
            self._take()
        else:
            with quietly_on(self._stream):
                self._take()
        copied = self._padded or any(isinstance(work, WorkWithEpilogue) for work in self._works)  # on launch's stream
        event = self._stream.record_event() if copied else None
        self._arrived = _Arrived(self._works, event, {self._stream.stream_id})
        for stream in (reader, *side_streams.add_transfer(self, self._stream)):
            self.follow(stream)

    def follow(self, stream: torch.cuda.Stream) -> bool:
        """Make one more stream wait for values that others have waited for; see [Note: streams that have not waited].

        What else was queued on launch's stream is not waited for, unless values were copied there.

        Returns:
            Whether it has waited by now.
        """
        arrived = self._arrived
        if arrived is None or stream.stream_id in arrived.followers:
            return True
        with quietly_on(stream):
            if torch.cuda.is_current_stream_capturing():
                return False  # what is captured has been waited for before
            for work in arrived.works if arrived.event is None else (arrived.event,):
                work.wait()
        arrived.followers.add(stream.stream_id)
        return True

    def _take(self) -> None:
        for work in self._works:
            work.wait()
        for param, gathered in self._padded:
            param.copy_(gathered[: param.numel()])


# ParamAllGathers whose optimizer is gone.
#
# [Note: orphans] A parameter stays alive until its values have come, which its next reader or its optimizer's next
# step sees to. If a script drops model and optimizer right after a step, there is neither. So the gathers of an
# optimizer that is gone are settled before the next step of any other one. Not in the finaliser: that may run in a
# thread on which the collective itself depends, or while a CUDA graph is captured.

_orphans: list[ParamAllGathers] = []


def after(optimizer: Optimizer, gathers: ParamAllGathers) -> None:
    """Remember gathers once their optimizer is gone."""
    weakref.finalize(optimizer, _orphans.append, gathers).atexit = False


def settle() -> None:
    """Wait for what dropped optimizers have left under way."""
    while _orphans:
        with contextlib.suppress(RuntimeError):  # whoever reads these parameters, if anybody, is told
            _orphans.pop().settle()


# Gathering the parameters of one optimizer after its step.
#
# [Note: in forward order] Parameters are gathered in buckets, in the order in which the model registered them, which
# is mostly that in which forward uses them: the first layers can compute while the last are still on their way. A
# bucket is waited for when the first of its parameters is read. A small model is cut, too, else there is nothing to
# hide behind.

MIB = 1024 * 1024

_FEWEST = 16  # buckets of a model, as far as they hold more than _SMALLEST bytes
_SMALLEST = MIB


class ParamAllGathers:
    """The gathers of one optimizer's parameters.

    Args:
        overlap: Wait for a bucket when it is read; otherwise at once.
        granularity: What a bucket holds: ``size``, ``layer`` or ``module``.
        bucket_mb: Capacity of a bucket in MiB, for ``size``; with overlap, at most a sixteenth of the model's size.
        copy_engines: Whether the GPUs' copy engines gather, and reduce what is gathered: ``on``, ``off`` or ``auto``.
    """

    def __init__(self, *, overlap: bool, granularity: str, bucket_mb: float, copy_engines: str) -> None:
        self._overlap, self._granularity, self._capacity = overlap, granularity, bucket_mb * MIB
        self._copy_engines = copy_engines
        self._of: tuple[tuple[int, int], ...] = ()
        self._buckets: list[ParamAllGather] = []
        self._places: Iterable[tuple[dist.ProcessGroup, torch.device]] = ()

    def launch(self, parts: Sequence[ShardedParam]) -> None:
        """Start to gather; all ranks do so for the same parameters."""
        which = tuple((id(part.shards), id(part.param)) for part in parts)
        if which != self._of:
            self._of, self._buckets = which, []
            self._places = dict.fromkeys((part.shards.group, part.param.device) for part in parts)
        if not self._buckets:
            self._buckets = [self._gather(bucket) for bucket in self._cut(parts)]
        nbytes = sum(part.param.nbytes for part in parts)  # now: while they are on their way, Python answers
        copied = self._places if self._copy_engines != "off" else ()
        for group, device in copied:
            choose(
                group,
                device,
                self._copy_engines,
                feature="dist_optimizer",
                directory=cache_dir(),
                communicator=step_communicator(group, device),
            )
        launch(self._buckets)
        for group, device in copied:
            attend(group, device, step_communicator(group, device))
        COUNTERS.bytes_gathered += nbytes
        COUNTERS.gathers += len(self._buckets)
        COUNTERS.gathers_copied += sum(gather.is_copied for gather in self._buckets)
        COUNTERS.gathers_overlapped += sum(gather.is_pending for gather in self._buckets) if self._overlap else 0
        if not self._overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for what is still on its way."""
        for gather in self._buckets:
            gather.settle()

    def _gather(self, parts: Sequence[ShardedParam]) -> ParamAllGather:
        shards = parts[0].shards
        name = shards.names[parts[0].index]
        communicator = step_communicator(shards.group, parts[0].param.device)
        return ParamAllGather([part.param for part in parts], shards.group, name=name, communicator=communicator)

    def _cut(self, parts: Sequence[ShardedParam]) -> Iterator[list[ShardedParam]]:
        for ones in alike(parts, self._kind):
            yield from by_size(ones, self._capacity_for(ones)) if self._granularity == "size" else [ones]

    def _capacity_for(self, parts: Sequence[ShardedParam]) -> float:
        sixteenth = sum(part.param.nbytes for part in parts) / _FEWEST
        return min(self._capacity, max(_SMALLEST, sixteenth)) if self._overlap else self._capacity

    def _kind(self, part: ShardedParam) -> tuple[Hashable, ...]:
        layer = layer_of(part.shards.names[part.index]) if self._granularity == "layer" else ""
        return layer, part.param.dtype


def alike(parts: Sequence[ShardedParam], kind: Callable[[ShardedParam], Hashable]) -> Iterable[list[ShardedParam]]:
    """Return the parameters of each model and kind, in registration order, each kind where the first of it stands."""
    ones: dict[Hashable, list[ShardedParam]] = {}
    models = list(dict.fromkeys(part.shards for part in parts))
    for part in sorted(parts, key=lambda part: (models.index(part.shards), part.index)):
        ones.setdefault((part.shards, kind(part)), []).append(part)
    return ones.values()


def by_size(parts: Iterable[ShardedParam], capacity: float) -> Iterator[list[ShardedParam]]:
    """Yield buckets of at most ``capacity`` bytes; a parameter that is larger is one by itself."""
    bucket: list[ShardedParam] = []
    size = 0
    for part in parts:
        if bucket and size + part.param.nbytes > capacity:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.param.nbytes
    if bucket:
        yield bucket

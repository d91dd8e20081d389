"""The all-gather of parameters after a step in which every rank has updated its shard; it overlaps the next forward."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.hookspecs import cache_dir, note_failures, refuse_option
from ovpatch.overlap.comm.collectives import AllGather, Work, WorkWithEpilogue, step_communicator
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import profiler_label, profiler_span, side_streams, unwatched_stream
from ovpatch.overlap.data_parallel.bucket_assignment import get_layer
from ovpatch.overlap.data_parallel.grad_bucket import SMALL_NUMEL
from ovpatch.overlap.tensors.pending_param import mark_lost, mark_pending, mark_ready
from ovpatch.overlap.tensors.shard import shard_range, shard_view
from ovpatch_plugins.dist_optimizer.options import OPTIONS
from ovpatch_plugins.dist_optimizer.param_sync import group_alike, split_by_size
from ovpatch_plugins.dist_optimizer.report import COUNTERS, remark
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, read_versions

MIB = 1024 * 1024

# A bucket holds at most an eighth of a model, so that the gathers of most buckets hide behind computation; smaller
# buckets would cost the host more time. The first ones hold half of that, since the forward waits for them soon. All
# may hold _MIN_BUCKET_BYTES.
_SHARE = 1 / 8
_HALF_BUCKETS = 2
_MIN_BUCKET_BYTES = MIB

_REMARK_MESH = (
    "step() waits for the parameters of DistributedDataParallel(device_mesh=): the DTensors that the wrapper puts into "
    "the module read their memory"
)


class FinishedGather(NamedTuple):
    """What one stream has waited for, so that others can.

    Attributes:
        works: The collectives.
        event: Behind what was copied out of them, if anything was.
        followers: Streams that have waited, by their number.
    """

    works: Sequence[Work]
    event: torch.cuda.Event | None
    followers: set[int]


class GatherBuffer(NamedTuple):
    """Memory for the shards of coalesced parameters, and views of it, which stay from step to step.

    Attributes:
        rows: What is gathered, ``[ranks, elements]``.
        shards: A view of this rank's row for each parameter, ``[shard.numel]``.
        columns: A view of that for each parameter, ``[ranks, size]``.
        pieces: As the columns, one after the other in other memory.
        wholes: Views of the pieces without padding, each of its parameter's shape, or of one dimension.
        reordered: The parameters, by index, whose chunks along the first dimension are not the ranks' shards.
    """

    rows: Tensor
    shards: Sequence[Tensor]
    columns: list[Tensor]
    pieces: list[Tensor]
    wholes: list[Tensor]
    reordered: Sequence[int]

    @classmethod
    def of(cls, params: Sequence[Tensor], world: int, rank: int) -> GatherBuffer:
        """Return it for some parameters of one dtype and device."""
        sizes = [-(-param.numel() // world) for param in params]
        with outside_modes():
            rows = torch.empty(world, sum(sizes), dtype=params[0].dtype, device=params[0].device)
            parts = torch.empty_like(rows).view(-1).split([world * size for size in sizes])
        reordered = [
            i
            for i, param in enumerate(params)
            if not param.is_contiguous() or param.dim() == 0 or (param.dim() > 1 and len(param) % world)
        ]
        wholes = [part[: param.numel()].view(param.shape) for part, param in zip(parts, params, strict=True)]
        for i in reordered:
            wholes[i] = wholes[i].view(-1)
        owned = [shard_range(param.numel(), world, rank).numel for param in params]
        shards = [part[:numel] for part, numel in zip(rows[rank].split(sizes), owned, strict=True)]
        pieces = [part.view(world, -1) for part in parts]
        return cls(rows, shards, list(rows.split(sizes, dim=1)), pieces, wholes, reordered)

    def in_order(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters, or views of one dimension in memory order, whose chunks are the ranks' shards."""
        elements = list(params)
        for i in self.reordered:
            elements[i] = elements[i].as_strided((elements[i].numel(),), (1,))
        return elements

    def resize(self, elements: int) -> None:
        """Take memory on a GPU, or give it back with 0; on the CPU, where fresh memory is slow, it stays."""
        if self.rows.is_cuda:
            for tensor in (self.rows, self.pieces[0]):
                tensor.untyped_storage().resize_(elements * tensor.element_size())


class AllGatherBucket:
    """All-gathers the shards of a bucket's parameters: large ones in their own memory, small ones by a coalesced copy.

    It is used over and over: :meth:`start_all_gather` after each step, :meth:`finish_all_gather` before the next one.
    Readers in between wait by themselves. A bucket is one launch, which is the same on all ranks; whether a parameter
    can be pending differs by rank. So if one parameter cannot, this rank waits for the whole bucket at once.

    Args:
        params: Dense parameters of one dtype and device, sharded by :func:`ovpatch.overlap.tensors.shard.shard_range`.
        group: The process group, whose ranks have the shards.
        name: Of the bucket, for labels in profiles.
        communicator: Over the same ranks, which the backend gathers on; by default the group itself.
        before_wait: Called before a stream waits for the values.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        *,
        name: str = "",
        communicator: dist.ProcessGroup | None = None,
        before_wait: Callable[[], None] | None = None,
    ) -> None:
        self._params, self._before_wait = tuple(params), before_wait
        self._group, self._world, self._rank = group, group.size(), group.rank()
        self._device = params[0].device
        self._all_gather = AllGather(group, self._device, communicator)
        self._labels = [profiler_label("dist_optimizer", phase, name) for phase in ("all_gather", "wait")]
        self._lock = threading.RLock()  # re-entered if a finaliser or a signal handler reads during the wait
        self._works: Sequence[Work] = []
        self._depth = 0  # how many calls wait for them, one inside of the other
        self._coalesced = tuple([param for param in params if param.numel() < SMALL_NUMEL])
        self._alone = [param for param in params if param.numel() >= SMALL_NUMEL]
        self._output: GatherBuffer | None = None  # of these
        self._is_packed = False  # whether their shards are in the output, and not gathered yet
        self._copies: list[tuple[Tensor, Tensor]] = []  # what is written when the values are there, and from what
        self._stream: torch.cuda.Stream | None = None
        self._arrived: FinishedGather | None = None
        # Memory that torch cannot resize was made by another library (from_numpy()), which may read it. Asked once:
        # after a numpy() it looks alike for ever, though that array is counted while it lives.
        self._foreign = any(not param.untyped_storage().resizable() for param in params)
        # With these nodes kept, a tensor has as many owners with a graph as without. One more is a scripted module, or
        # a graph that is still to run backward; they read memory without asking.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params if p.requires_grad]

    def lend_shards(self) -> dict[int, Tensor]:
        """Return memory for this rank's shards of coalesced parameters, ``[shard.numel]``, by ``id()`` of these.

        Between :meth:`begin_update` and the start of the all-gather they are here, and may be updated.
        """
        if self._world == 1 or not self._coalesced:
            return {}
        with outside_modes():
            self._output = GatherBuffer.of(self._coalesced, self._world, self._rank)
        return dict(zip(map(id, self._coalesced), self._output.shards, strict=True))

    def begin_update(self) -> None:
        """Copy this rank's shards of coalesced parameters to :meth:`lend_shards`, from where they are gathered.

        The others' places get what this rank has of them: to copy all is one call, and they are overwritten.
        """
        output = self._output
        if output is not None:
            output.resize(output.rows.numel())
            torch._chunk_cat(output.in_order(self._coalesced), 0, self._world, out=output.rows)
            self._is_packed = True

    def keep_update(self) -> None:
        """Copy lent shards to the parameters, if they were updated and no all-gather was started."""
        if self._output is not None and self._is_packed:
            self._is_packed = False
            ranges = [shard_range(param.numel(), self._world, self._rank) for param in self._coalesced]
            places = [shard_view(param.data, own) for param, own in zip(self._coalesced, ranges, strict=True)]
            torch._foreach_copy_(places, list(self._output.shards))

    def start_all_gather(self) -> str:
        """Start the collective, which all ranks of the group must call in the same order.

        It reads this rank's shards as the current stream leaves them.

        Returns:
            "" if the parameters are pending now, else the reason; then they are complete, in stream order.

        Raises:
            RuntimeError: The last all-gather has not been waited for, so its results would mix with the shards of now.
        """
        with outside_modes():
            return self._start()

    def _start(self) -> str:
        if self._world == 1:
            return ""
        with self._lock:
            if self._works:
                raise RuntimeError(
                    "ovpatch: an all-gather was started while the last one was in flight; call finish_all_gather() "
                    "before step"
                )
            if self._arrived is not None:
                self._arrived = None  # whose works hold the parameters' memory
                side_streams.remove_transfer(self, self._device.index)
            if self._foreign:
                reason = "another library made its memory"
            else:
                reason = mark_pending(self._params, self.finish_all_gather)
            try:
                self._launch()
            except BaseException:  # a KeyboardInterrupt, too: nothing would ever arrive
                mark_ready(self._params)
                raise
            if reason:
                self.finish_all_gather()
            return reason

    def _launch(self) -> None:
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        outputs, inputs = [], []
        if self._output is None:
            self.lend_shards()
        if self._output is not None:
            if not self._is_packed:
                self.begin_update()
            outputs.append(self._output.rows.view(-1))
            inputs.append(self._output.rows[self._rank])
        for param in self._alone:
            data = param.data
            numel = data.numel()
            elements, shard = data.as_strided((numel,), (1,)), shard_range(numel, self._world, self._rank)
            begin, end = self._rank * shard.size, (self._rank + 1) * shard.size
            if shard.size * self._world == numel:
                gathered = elements
            else:
                gathered = elements.new_empty(shard.size * self._world)
                gathered[begin : begin + shard.numel].copy_(elements[shard.begin : shard.end])
                self._copies.append((elements, gathered[:numel]))
            outputs.append(gathered)
            inputs.append(gathered[begin:end])
        with profiler_span(self._labels[0]):
            self._works = self._all_gather(outputs, inputs)
        self._is_packed = False

    def finish_all_gather(self) -> None:
        """Make the caller's stream, that of the start, and all that are current in some thread wait for the values.

        It is no collective: any rank, any thread, in any mode.
        """
        with self._lock:
            if not self._works:
                return
            self._depth += 1
            try:
                with outside_modes(), profiler_span(self._labels[1]):
                    if self._before_wait is not None:
                        self._before_wait()
                    if not self._works:  # a signal handler has read a parameter meanwhile
                        return
                    self._wait()
            except RuntimeError as error:  # of the collective
                mark_lost(self._params, self.finish_all_gather, error)
                raise
            finally:
                self._depth -= 1
            mark_ready(self._params)
            self._works = []
            self._copies.clear()
            if self._output is not None and not self._depth:
                self._output.resize(0)

    def _wait(self) -> None:
        if self._stream is None:
            self._wait_and_copy_out()
            return
        reader = torch.cuda.current_stream(self._device)
        if reader == self._stream:
            self._wait_and_copy_out()
        else:
            with unwatched_stream(self._stream):
                self._wait_and_copy_out()
        copies = self._output is not None or self._copies  # on that stream, as epilogues do
        copied = copies or any(isinstance(work, WorkWithEpilogue) for work in self._works)
        event = self._stream.record_event() if copied else None
        self._arrived = FinishedGather(self._works, event, {self._stream.stream_id})
        for stream in (reader, *side_streams.add_transfer(self, self._stream)):
            self.follow(stream)

    def _wait_and_copy_out(self) -> None:
        for work in self._works:
            work.wait()
        if self._output is not None and self._works:
            torch._foreach_copy_(self._output.pieces, self._output.columns)
            versions = tuple(read_versions(self._coalesced))
            torch._foreach_copy_(self._output.in_order(self._coalesced), self._output.wholes)
            torch._C._autograd._unsafe_set_version_counter(self._coalesced, versions)  # the step's writes have counted
        if self._copies:
            targets, sources = zip(*self._copies, strict=True)
            torch._foreach_copy_(targets, sources)

    def follow(self, stream: torch.cuda.Stream) -> bool:
        """Make one more stream wait for values that others have waited for; see [Note: streams that have not waited].

        What else was queued on the stream of the start is not waited for, unless values were copied there.

        Returns:
            Whether it has waited by now.
        """
        arrived = self._arrived
        if arrived is None or stream.stream_id in arrived.followers:
            return True
        with unwatched_stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return False  # what is captured has been waited for before
            for work in arrived.works if arrived.event is None else (arrived.event,):
                work.wait()
        arrived.followers.add(stream.stream_id)
        return True


class ParamAllGather:
    """The all-gather of one optimizer's parameters after its step.

    Buckets follow the order in which the model registered its parameters, which is mostly that of forward: the first
    layers compute while the last ones are in flight. A bucket is waited for when the first of its parameters is read.

    Args:
        overlap: Wait for a bucket when it is read; otherwise at once.
        granularity: What a bucket holds: ``size``, ``layer`` or ``module``.
        bucket_mb: Capacity of a bucket in MiB, for ``size``; with overlap, at most an eighth of the parameters.
        copy_engines: Whether the GPUs' copy engines gather, and reduce what is gathered: ``on``, ``off`` or ``auto``.
    """

    def __init__(self, *, overlap: bool, granularity: str, bucket_mb: float, copy_engines: str) -> None:
        self._overlap, self._granularity, self._capacity = overlap, granularity, bucket_mb * MIB
        self._copy_engines = copy_engines
        self._params: Sequence[ShardedParam] = []
        self._buckets: list[AllGatherBucket] = []
        self._dtypes: list[torch.dtype] = []
        self._places: list[int] = []  # addresses of the parameters
        self._lends = False  # whether shards of small parameters are updated where they are gathered from
        self._nbytes = 0
        self._copied: Iterable[tuple[dist.ProcessGroup, torch.device]] = ()  # where copy engines may gather

    def begin_update(self, params: Sequence[ShardedParam]) -> None:
        """Have this rank's shards of small parameters updated where they are gathered from.

        Not where parameters share memory (``a.data = b.data``): there each update has to see the one before.
        """
        lends = self._lends
        with torch._C.DisableTorchFunctionSubclass():
            dtypes, places = [one.param.dtype for one in params], [one.param.data_ptr() for one in params]
            if places != self._places or params != self._params:
                lends = not _overlap(places, [one.param.nbytes for one in params])
        if params != self._params or (dtypes, lends) != (self._dtypes, self._lends) or not self._buckets:
            self._lends = lends
            self._set_buckets(params)
            self._dtypes = dtypes
        self._places = places
        if lends:
            with outside_modes():
                for bucket in self._buckets:
                    bucket.begin_update()

    def keep_update(self) -> None:
        """Keep what this rank has updated in the parameters' own memory where no all-gather was started."""
        with outside_modes():
            for bucket in self._buckets:
                bucket.keep_update()

    def start_param_sync(self, params: Sequence[ShardedParam]) -> None:
        """Start the all-gather; all ranks do so for the same parameters."""
        if params != self._params or not self._buckets:
            self._set_buckets(params)
        if self._copied:
            self._choose_transport()
        with outside_modes():
            for bucket in self._buckets:
                bucket._start()
                COUNTERS.gathers_overlapped += self._overlap and bool(bucket._works)
        if self._copied:
            self._end_copies()
        COUNTERS.bytes_gathered += self._nbytes
        COUNTERS.gathers += len(self._buckets)
        if not self._overlap:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for the buckets that are still in flight."""
        for bucket in self._buckets:
            if bucket._works:
                bucket.finish_all_gather()

    @property
    def is_in_flight(self) -> bool:
        """Whether a bucket has not been waited for."""
        return any(bucket._works for bucket in self._buckets)

    def _choose_transport(self) -> None:
        """Choose what carries the all-gathers where copy engines may: all ranks together, once."""
        from ovpatch.overlap.copy_engine.selection import choose

        mode, directory = self._copy_engines, cache_dir()
        for group, device in self._copied:
            communicator = step_communicator(group, device)
            reason = choose(
                group, device, mode, feature="dist_optimizer", directory=directory, communicator=communicator
            )
            if reason and mode == "on":
                with note_failures("dist_optimizer", "the first step of an optimizer"):
                    refuse_option("dist_optimizer", OPTIONS, "copy_engines", mode, reason)

    def _end_copies(self) -> None:
        """Count what copy engines carry, and have the backend's watchdog see it."""
        from ovpatch.overlap.copy_engine.selection import attend, find_gatherer

        for group, device in self._copied:
            if find_gatherer(group, device) is not None:
                COUNTERS.gathers_copied += sum(b._group is group and b._device == device for b in self._buckets)
            attend(group, device, step_communicator(group, device))

    def _set_buckets(self, params: Sequence[ShardedParam]) -> None:
        self._params, self._buckets = params, []
        self._nbytes = sum(one.param.nbytes for one in params)
        # torch marks such parameters before it wraps them. Their DTensors share their memory, and DTensor's methods
        # read it without asking the parameter's class, so start() finds that they cannot be pending.
        if self._overlap and any(hasattr(one.param, "_st_info") for one in params):
            remark(_REMARK_MESH)
        places = dict.fromkeys((one.shards.group, one.param.device) for one in params)
        if self._copy_engines != "on":  # "auto" measures on CUDA only
            places = {place: None for place in places if self._copy_engines == "auto" and place[1].type == "cuda"}
        self._copied = tuple(places)
        divided: list[list[ShardedParam]] = []
        for alike in group_alike(params, self._kind):
            divided += split_by_size(alike, self._capacities_for(alike)) if self._granularity == "size" else [alike]
        self._buckets = [self._make_bucket(bucket) for bucket in divided]

    def _make_bucket(self, params: Sequence[ShardedParam]) -> AllGatherBucket:
        shards, first = params[0].shards, params[0]
        bucket = AllGatherBucket(
            [one.param for one in params],
            shards.group,
            name=shards.names[first.index],
            communicator=step_communicator(shards.group, first.param.device),
            before_wait=shards.finish_host_barrier,
        )
        lent = bucket.lend_shards() if self._lends else {}
        for one in params:
            one.set_memory(lent.get(id(one.param)))
        return bucket

    def _capacities_for(self, params: Sequence[ShardedParam]) -> Iterator[float]:
        if not self._overlap:
            return itertools.repeat(self._capacity)
        capacity = min(self._capacity, _SHARE * sum(one.param.nbytes for one in params))
        half, whole = (min(self._capacity, max(_MIN_BUCKET_BYTES, share * capacity)) for share in (0.5, 1.0))
        return itertools.chain(itertools.repeat(half, _HALF_BUCKETS), itertools.repeat(whole))

    def _kind(self, param: ShardedParam) -> tuple[Hashable, ...]:
        layer = get_layer(param.shards.names[param.index]) if self._granularity == "layer" else ""
        return layer, param.param.dtype


def _overlap(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether dense tensors, of sizes in bytes, have memory in common."""
    spans = sorted(zip(addresses, sizes, strict=True))
    return any(begin + size > following for (begin, size), (following, _) in itertools.pairwise(spans))


# All-gathers whose optimizer is gone. A parameter stays alive until its values have arrived, which its next reader or
# its optimizer's next step waits for. If a script drops model and optimizer right after a step, there is neither, so
# the next step of any other optimizer waits, or the end of the process group. Not the finaliser: it may run in a thread
# on which the collective itself depends, or while a CUDA graph is captured.
orphans: list[ParamAllGather] = []


def finish_when_dropped(optimizer: Optimizer, gather: ParamAllGather) -> weakref.finalize[..., Optimizer]:
    """Have the next step of any optimizer wait for an all-gather once its own optimizer is gone."""
    finalizer = weakref.finalize(optimizer, _keep_until_arrival, gather)
    finalizer.atexit = False
    return finalizer


def _keep_until_arrival(gather: ParamAllGather) -> None:
    if gather.is_in_flight:
        orphans.append(gather)


def finish_orphans() -> None:
    """Wait for what dropped optimizers have left in flight."""
    while orphans:
        with contextlib.suppress(RuntimeError):  # readers of these parameters get the error
            orphans.pop().finish_param_sync()

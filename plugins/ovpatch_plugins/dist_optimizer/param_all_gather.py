"""The all-gather of parameters after a step in which each rank has updated its shard.

It overlaps the next forward.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.hookspecs import cache_dir, note_failures, refuse_option
from ovpatch.overlap.comm.collectives import AllGather, Work, WorkWithEpilogue
from ovpatch.overlap.comm.hosts import spans_hosts
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.step_communicators import step_communicator
from ovpatch.overlap.comm.streams import (
    profiler_label,
    profiler_span,
    side_streams,
    unwatched_stream,
)
from ovpatch.overlap.data_parallel.bucket_assignment import get_layer
from ovpatch.overlap.data_parallel.grad_bucket import SMALL_NUMEL
from ovpatch.overlap.tensors.pending_param import mark_lost, mark_pending, mark_ready
from ovpatch.overlap.tensors.shard import shard_range, shard_view
from ovpatch_plugins.dist_optimizer.dist_optimizer_options import OPTIONS
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from ovpatch_plugins.dist_optimizer.param_sync import group_by_kind, split_by_size
from ovpatch_plugins.dist_optimizer.sharded_param import VERSION, ShardedParam

MIB: Final = 1024 * 1024

# A bucket holds at most this share of a model, so that computation hides the gathers of most
# buckets. Smaller buckets would cost the host more time.
_MAX_BUCKET_SHARE: Final = 1 / 8
# The number of first buckets of half that size, because the forward waits for them soon.
_NUM_HALF_BUCKETS: Final = 2
# No share makes a bucket smaller than this, in bytes.
_MIN_BUCKET_BYTES: Final = MIB

_REASON_FOREIGN_MEMORY: Final = "another library made its memory"

_ERROR_IN_FLIGHT: Final = (
    "ovpatch: an all-gather was started while the last one was in flight, so its results would mix "
    "with the new shards. Call finish_all_gather() before the step."
)


class FinishedGather(NamedTuple):
    """The gather that one stream has waited for, so that other streams can wait for it.

    Attributes:
        works: The collectives.
        event: Recorded after their results were copied out; None if nothing was copied.
        followers: Ids of the streams that have waited.
    """

    works: Sequence[Work]
    event: torch.cuda.Event | None
    followers: set[int]


class GatherBuffer(NamedTuple):
    """Memory for the shards of coalesced parameters, and views of it that stay between steps.

    Attributes:
        rows: The gathered tensor, ``[ranks, elements]``.
        shards: For each parameter, a view of this rank's row, ``[shard.numel]``.
        columns: For each parameter, a view of all rows, ``[ranks, size]``.
        pieces: The same shapes as ``columns``, contiguous and adjacent in other memory.
        full: Views of ``pieces`` without padding. They have the shapes of the parameters, or one
            dimension for parameters in ``reordered``.
        reordered: Indices of the parameters whose chunks along the first dimension are not the
            shards of the ranks.
    """

    rows: Tensor
    shards: Sequence[Tensor]
    columns: list[Tensor]
    pieces: list[Tensor]
    full: list[Tensor]
    reordered: Sequence[int]

    @classmethod
    def of(cls, params: Sequence[Tensor], world: int, rank: int) -> GatherBuffer:
        """Return the buffer of some parameters of one dtype and device."""
        # Shards have the same size on all ranks, rounded up.
        sizes = [-(-param.numel() // world) for param in params]
        with outside_modes():
            rows = torch.empty(world, sum(sizes), dtype=params[0].dtype, device=params[0].device)
            parts = torch.empty_like(rows).view(-1).split([world * size for size in sizes])
        reordered = [
            i
            for i, param in enumerate(params)
            if not param.is_contiguous()
            or param.dim() == 0
            or (param.dim() > 1 and len(param) % world)
        ]
        full = [
            part[: param.numel()].view(param.shape)
            for part, param in zip(parts, params, strict=True)
        ]
        for i in reordered:
            full[i] = full[i].view(-1)
        numels = [shard_range(param.numel(), world, rank).numel for param in params]
        own_parts = rows[rank].split(sizes)
        shards = [part[:numel] for part, numel in zip(own_parts, numels, strict=True)]
        columns = list(rows.split(sizes, dim=1))
        pieces = [part.view(world, -1) for part in parts]
        return cls(rows, shards, columns, pieces, full, reordered)

    def in_order(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors over the parameters whose chunks are the shards of the ranks.

        They are the parameters, or views of one dimension in memory order.
        """
        tensors = list(params)
        for i in self.reordered:
            tensors[i] = tensors[i].as_strided((tensors[i].numel(),), (1,))
        return tensors

    def resize(self, numel: int) -> None:
        """Allocate the memory, or release it with 0 elements.

        On the CPU the memory stays, because fresh memory is slow there.
        """
        if self.rows.is_cuda:
            for tensor in (self.rows, self.pieces[0]):
                tensor.untyped_storage().resize_(numel * tensor.element_size())


class AllGatherBucket:
    """The all-gather of a bucket of parameters, used again in every step.

    Large parameters are gathered in their own memory, small ones through a coalesced copy. Call
    :meth:`start_all_gather` after each step and :meth:`finish_all_gather` before the next one.
    Readers between them wait by themselves. A bucket is one collective, which all ranks start in
    the same order. But whether a parameter can be pending differs by rank. So if one parameter
    cannot, this rank waits for the entire bucket immediately.

    Args:
        params: Dense parameters of one dtype and device, sharded by
            :func:`ovpatch.overlap.tensors.shard.shard_range`.
        group: The process group of the model.
        name: The name of the bucket in profiles.
        communicator: A communicator over the ranks that have the shards, on which the backend
            gathers. Default: the group.
        before_wait: Called before a stream waits for the values. Default: nothing.
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
        self._params = tuple(params)
        self._before_wait = before_wait
        self._group = group
        holders = communicator or group
        self._world = holders.size()
        self._rank = holders.rank()
        self._device = params[0].device
        # A communicator of fewer ranks has the ranks of this host.
        self._all_gather = AllGather(
            group,
            self._device,
            communicator,
            spans_hosts=self._world == group.size() and spans_hosts(group),
        )
        self._labels = [
            profiler_label("dist_optimizer", phase, name) for phase in ("all_gather", "wait")
        ]

        # - The parameters
        # Small parameters, which are gathered through `_buffer`.
        self._coalesced = tuple([param for param in params if param.numel() < SMALL_NUMEL])
        # Large parameters, each of which is gathered in its own memory.
        self._separate = [param for param in params if param.numel() >= SMALL_NUMEL]
        self._buffer: GatherBuffer | None = None
        # Whether the buffer has shards that are not gathered yet.
        self._is_packed = False
        # torch cannot resize memory that another library made (from_numpy()), and that library may
        # read it. This is read only once: after a numpy() the memory of torch can never be resized
        # again. Such an array references the memory, so it is detected as long as it exists.
        self._has_foreign_memory = any(not param.untyped_storage().resizable() for param in params)
        # These nodes give a tensor the same number of owners with and without a graph. One more
        # owner is a scripted module, or a graph whose backward is still to run; they read memory
        # without a call that could wait.
        with outside_modes():
            self._nodes = [
                torch.autograd.graph.get_gradient_edge(param).node
                for param in params
                if param.requires_grad
            ]

        # - The gather in flight
        # Reentrant: a finalizer or a signal handler may read a parameter during this thread's wait.
        self._lock = threading.RLock()
        self._works: Sequence[Work] = []
        # The number of nested calls that wait for the works.
        self._depth = 0
        # The targets and sources of copies that follow the collectives.
        self._copies: list[tuple[Tensor, Tensor]] = []
        # The stream on which the gather was started.
        self._stream: torch.cuda.Stream | None = None
        self._finished: FinishedGather | None = None

    # ---------------------------------------------------------------- the update

    def make_input_views(self) -> dict[int, Tensor]:
        """Return memory for this rank's shards of coalesced parameters, by ``id()`` of these.

        Between :meth:`begin_update` and the start of the all-gather the shards, of
        ``[shard.numel]``, are in this memory and may be updated there.
        """
        if self._world == 1 or not self._coalesced:
            return {}
        with outside_modes():
            self._buffer = GatherBuffer.of(self._coalesced, self._world, self._rank)
        return dict(zip(map(id, self._coalesced), self._buffer.shards, strict=True))

    def begin_update(self) -> None:
        """Copy this rank's shards of coalesced parameters to the memory that is gathered.

        The shards of peers are copied as well: to copy all is one call, and the gather overwrites
        them.
        """
        buffer = self._buffer
        if buffer is not None:
            buffer.resize(buffer.rows.numel())
            params = buffer.in_order(self._coalesced)
            torch._chunk_cat(params, 0, self._world, out=buffer.rows)
            self._is_packed = True

    def keep_update(self) -> None:
        """Copy updated shards to the parameters if no all-gather was started."""
        if self._buffer is not None and self._is_packed:
            self._is_packed = False
            targets = []
            for param in self._coalesced:
                own = shard_range(param.numel(), self._world, self._rank)
                targets.append(shard_view(param.data, own))
            torch._foreach_copy_(targets, list(self._buffer.shards))

    # ---------------------------------------------------------------- the gather

    def start_all_gather(self) -> str:
        """Start the collective. All ranks of the group must call this in the same order.

        The collective reads this rank's shards after the work on the current stream so far.

        Returns:
            "" if the parameters are pending now. Otherwise the reason why they cannot be; then
            they are complete, in stream order.

        Raises:
            RuntimeError: The last all-gather is in flight, so its results would mix with the new
                shards.
        """
        with outside_modes():
            return self._start()

    def _start(self) -> str:
        if self._world == 1:
            return ""
        with self._lock:
            if self._works:
                raise RuntimeError(_ERROR_IN_FLIGHT)
            # The works of the last gather reference the memory of the parameters, which would count
            # as another reader below.
            if self._finished is not None:
                self._finished = None
                side_streams.remove_transfer(self, self._device.index)
            if self._has_foreign_memory:
                reason = _REASON_FOREIGN_MEMORY
            else:
                reason = mark_pending(self._params, self.finish_all_gather)
            try:
                self._launch()
            except BaseException:
                # Even after a KeyboardInterrupt: readers would wait for values that never arrive.
                mark_ready(self._params)
                raise
            if reason:
                self.finish_all_gather()
            return reason

    def _launch(self) -> None:
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        outputs = []
        inputs = []
        if self._buffer is None:
            self.make_input_views()
        if self._buffer is not None:
            if not self._is_packed:
                self.begin_update()
            outputs.append(self._buffer.rows.view(-1))
            inputs.append(self._buffer.rows[self._rank])
        for param in self._separate:
            data = param.data
            numel = data.numel()
            elements = data.as_strided((numel,), (1,))
            shard = shard_range(numel, self._world, self._rank)
            begin = self._rank * shard.size
            end = begin + shard.size
            if shard.size * self._world == numel:
                gathered = elements
            else:
                # The last shards have padding, for which the parameter has no memory.
                gathered = elements.new_empty(shard.size * self._world)
                own = elements[shard.begin : shard.end]
                gathered[begin : begin + shard.numel].copy_(own)
                self._copies.append((elements, gathered[:numel]))
            outputs.append(gathered)
            inputs.append(gathered[begin:end])
        with profiler_span(self._labels[0]):
            self._works = self._all_gather(outputs, inputs)
        self._is_packed = False

    def finish_all_gather(self) -> None:
        """Make streams wait for the values.

        These are the current stream, the stream of the start, and all streams that are current in
        some thread. This is no collective: any rank may call it, in any thread and any mode.
        """
        with self._lock:
            if not self._works:
                return
            self._depth += 1
            try:
                with outside_modes(), profiler_span(self._labels[1]):
                    if self._before_wait is not None:
                        self._before_wait()
                    # A signal handler may have read a parameter in `before_wait`.
                    if not self._works:
                        return
                    self._wait()
            except RuntimeError as error:
                # The collective has failed.
                mark_lost(self._params, self.finish_all_gather, error)
                raise
            finally:
                self._depth -= 1
            mark_ready(self._params)
            self._works = []
            self._copies.clear()
            # An outer call may still copy from the buffer.
            if self._buffer is not None and not self._depth:
                self._buffer.resize(0)

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
        # Epilogues of works run on the stream of the start, as copies do. Other streams must wait
        # for an event after them, and not only for the works.
        has_copies = self._buffer is not None or self._copies
        has_epilogue = has_copies or any(isinstance(work, WorkWithEpilogue) for work in self._works)
        event = self._stream.record_event() if has_epilogue else None
        self._finished = FinishedGather(self._works, event, {self._stream.stream_id})
        for stream in (reader, *side_streams.add_transfer(self, self._stream)):
            self.follow(stream)

    def _wait_and_copy_out(self) -> None:
        for work in self._works:
            work.wait()
        if self._buffer is not None and self._works:
            torch._foreach_copy_(self._buffer.pieces, self._buffer.columns)
            # The optimizer has already counted the writes of this step. The caller has left all
            # modes.
            versions = tuple(map(VERSION, self._coalesced))
            torch._foreach_copy_(self._buffer.in_order(self._coalesced), self._buffer.full)
            torch._C._autograd._unsafe_set_version_counter(self._coalesced, versions)
        if self._copies:
            targets, sources = zip(*self._copies, strict=True)
            torch._foreach_copy_(targets, sources)

    def follow(self, stream: torch.cuda.Stream) -> bool:
        """Make one more stream wait for the values; see [Note: streams that have not waited].

        The stream does not wait for other work on the stream of the start, unless values were
        copied there.

        Returns:
            Whether the stream has waited, now or earlier.
        """
        finished = self._finished
        if finished is None or stream.stream_id in finished.followers:
            return True
        with unwatched_stream(stream):
            # The capture has waited before it began, and must not record another wait.
            if torch.cuda.is_current_stream_capturing():
                return False
            for work in finished.works if finished.event is None else (finished.event,):
                work.wait()
        finished.followers.add(stream.stream_id)
        return True


class ParamAllGather:
    """The all-gather of one optimizer's parameters after its step.

    Buckets have the order in which the model registered its parameters, mostly the order of the
    forward: the first layers compute while the last ones are in flight. The first reader of one of
    its parameters waits for a bucket.

    Args:
        overlap: Whether readers wait for buckets; otherwise :meth:`start` does.
        granularity: The content of a bucket: ``size``, ``layer`` or ``module``.
        bucket_mb: The capacity of a bucket in MiB, for ``size``. With overlap, a bucket has at most
            an eighth of the parameters.
        copy_engines: Whether the copy engines of the GPUs gather parameters, and reduce the
            gradients of the same groups: ``on``, ``off`` or ``auto``.

    Attributes:
        copy_places: The groups and devices on which copy engines may gather the next parameters.
    """

    def __init__(
        self, *, overlap: bool, granularity: str, bucket_mb: float, copy_engines: str
    ) -> None:
        self._overlaps = overlap
        self._granularity = granularity
        # In bytes.
        self._capacity = bucket_mb * MIB
        self._copy_engines = copy_engines
        self._buckets: list[AllGatherBucket] = []

        # - The parameters of the buckets
        self._params: Sequence[ShardedParam] = []
        self._dtypes: list[torch.dtype] = []
        self._addresses: list[int] = []
        self._nbytes = 0

        # Whether shards of small parameters are updated in the memory that is gathered.
        self._updates_in_buffers = False
        self.copy_places: tuple[tuple[dist.ProcessGroup, torch.device], ...] = ()

    def find_copy_places(self, params: Sequence[ShardedParam]) -> None:
        """Set :attr:`copy_places` for the parameters of the next steps."""
        places = dict.fromkeys(
            (sharded.shards.group, sharded.param.device)
            for sharded in params
            # Copy engines serve all ranks of a group.
            if not sharded.shards.shards_by_host
        )
        # "auto" measures on CUDA only.
        if self._copy_engines != "on":
            is_auto = self._copy_engines == "auto"
            places = {place: None for place in places if is_auto and place[1].type == "cuda"}
        self.copy_places = tuple(places)

    def begin_update(self, params: Sequence[ShardedParam]) -> None:
        """Update this rank's shards of small parameters in the memory that is gathered.

        Parameters that share memory (``a.data = b.data``) are updated in place, because each update
        must see the one before.
        """
        in_buffers = self._updates_in_buffers
        # A pending parameter would wait for its values, which these questions do not need.
        with torch._C.DisableTorchFunctionSubclass():
            dtypes = [sharded.param.dtype for sharded in params]
            addresses = [sharded.param.data_ptr() for sharded in params]
            if addresses != self._addresses or params != self._params:
                in_buffers = not _overlap(addresses, [sharded.param.nbytes for sharded in params])
        is_changed = params != self._params or dtypes != self._dtypes
        if is_changed or in_buffers != self._updates_in_buffers or not self._buckets:
            self._updates_in_buffers = in_buffers
            self._set_buckets(params)
            self._dtypes = dtypes
        self._addresses = addresses
        if in_buffers:
            with outside_modes():
                for bucket in self._buckets:
                    bucket.begin_update()

    def keep_update(self) -> None:
        """Copy the update to the parameters' own memory if no all-gather was started."""
        with outside_modes():
            for bucket in self._buckets:
                bucket.keep_update()

    def start(self, params: Sequence[ShardedParam]) -> None:
        """Start the all-gather. All ranks call this for the same parameters."""
        if params != self._params or not self._buckets:
            self._set_buckets(params)
        with outside_modes():
            for bucket in self._buckets:
                bucket._start()
                COUNTERS.gathers_overlapped += self._overlaps and bool(bucket._works)
        if self.copy_places:
            self._attend_copies()
        COUNTERS.bytes_gathered += self._nbytes
        COUNTERS.gathers += len(self._buckets)
        if not self._overlaps:
            self.finish()

    def finish(self) -> None:
        """Wait for the buckets that are still in flight."""
        for bucket in self._buckets:
            if bucket._works:
                bucket.finish_all_gather()

    @property
    def is_in_flight(self) -> bool:
        """True if no stream has waited for a bucket yet."""
        return any(bucket._works for bucket in self._buckets)

    def choose_transport(self) -> None:
        """Choose between copy engines and the backend, once, together with all ranks.

        A step calls this before it launches anything. A kernel that runs for the first time is loaded,
        and the load waits for a collective of the script that is in flight. The peer may launch its part
        of that after its own step, in which it would wait here for this rank.
        """
        from ovpatch.overlap.kernels.copy_choice import choose

        mode = self._copy_engines
        directory = cache_dir()
        for group, device in self.copy_places:
            reason = choose(
                group,
                device,
                mode,
                feature="dist_optimizer",
                directory=directory,
                communicator=step_communicator(group, device),
            )
            if reason and mode == "on":
                with note_failures("dist_optimizer", "the first step of an optimizer"):
                    refuse_option("dist_optimizer", OPTIONS, "copy_engines", mode, reason)

    def _attend_copies(self) -> None:
        """Count the gathers of copy engines, and let the backend's watchdog observe them."""
        from ovpatch.overlap.kernels.copy_choice import attend, find_gatherer

        for group, device in self.copy_places:
            if find_gatherer(group, device) is not None:
                COUNTERS.gathers_copied += sum(
                    bucket._group is group and bucket._device == device for bucket in self._buckets
                )
            attend(group, device, step_communicator(group, device))

    # ---------------------------------------------------------------- buckets

    def _set_buckets(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        # If anything raises below, the next step must split again.
        self._buckets = []
        self._nbytes = sum(sharded.param.nbytes for sharded in params)
        splits: list[list[ShardedParam]] = []
        for same_kind in group_by_kind(params, self._kind):
            if self._granularity == "size":
                splits += split_by_size(same_kind, self._capacities_for(same_kind))
            else:
                splits.append(same_kind)
        self._buckets = [self._make_bucket(split) for split in splits]

    def _make_bucket(self, params: Sequence[ShardedParam]) -> AllGatherBucket:
        first = params[0]
        shards = first.shards
        bucket = AllGatherBucket(
            [sharded.param for sharded in params],
            shards.group,
            name=shards.names[first.index],
            communicator=shards.holders.step_communicator(first.param.device),
            before_wait=None if shards.step_barrier is None else shards.step_barrier.finish,
        )
        views = bucket.make_input_views() if self._updates_in_buffers else {}
        for sharded in params:
            sharded.set_memory(views.get(id(sharded.param)))
        return bucket

    def _capacities_for(self, params: Sequence[ShardedParam]) -> Iterator[float]:
        if not self._overlaps:
            return itertools.repeat(self._capacity)
        share = _MAX_BUCKET_SHARE * sum(sharded.param.nbytes for sharded in params)
        capacity = min(self._capacity, share)
        half, full = (
            min(self._capacity, max(_MIN_BUCKET_BYTES, factor * capacity)) for factor in (0.5, 1.0)
        )
        return itertools.chain(itertools.repeat(half, _NUM_HALF_BUCKETS), itertools.repeat(full))

    def _kind(self, sharded: ShardedParam) -> tuple[Hashable, ...]:
        name = sharded.shards.names[sharded.index]
        layer = get_layer(name) if self._granularity == "layer" else ""
        return layer, sharded.param.dtype


def _overlap(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether dense tensors, of sizes in bytes, have memory in common."""
    spans = sorted(zip(addresses, sizes, strict=True))
    return any(
        begin + size > next_begin for (begin, size), (next_begin, _) in itertools.pairwise(spans)
    )


# The all-gathers of freed optimizers. A parameter stays alive until its values have arrived, for
# which its next reader or its optimizer's next step waits. If a script drops model and optimizer
# right after a step, neither comes. So the next step of any other optimizer waits, or the end of
# the process group. The finalizer cannot wait: it may run in a thread on which the collective
# itself depends, or during the capture of a CUDA graph.
dropped_gathers: list[ParamAllGather] = []


def finish_when_dropped(
    optimizer: Optimizer, gather: ParamAllGather
) -> weakref.finalize[..., Optimizer]:
    """Let the next step of any optimizer wait for a gather once its own optimizer is freed."""
    finalizer = weakref.finalize(optimizer, _keep_in_flight, gather)
    finalizer.atexit = False
    return finalizer


def _keep_in_flight(gather: ParamAllGather) -> None:
    if gather.is_in_flight:
        dropped_gathers.append(gather)


def finish_dropped_gathers() -> None:
    """Wait for the gathers that freed optimizers have left in flight."""
    while dropped_gathers:
        # Readers of these parameters get the error.
        with contextlib.suppress(RuntimeError):
            dropped_gathers.pop().finish()

"""Asynchronous all-reduce, all-gather, broadcast and reduce-scatter, called on the process group.

The functions of ``torch.distributed`` check their arguments, which takes noticeable time in a
backward with many buckets. The stock reducer calls the process group as well.

Backends that launch each tensor separately, such as gloo, get their own collectives. A transport,
such as the copy engines of GPUs, may replace the backend for the all-gathers and reduce-scatters of
a group, see :func:`set_transports`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import (
    outside_modes,
)

# --- collectives in flight ---


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Make the current stream wait for the result; without streams, the host waits."""


#: Returns whether a collective is over, on backends whose collectives the host waits for.
IS_COMPLETED: Final[Callable[[Work], bool]] = operator.methodcaller("is_completed")


class WorkGroup:
    """Several collectives in flight, and the tensors that they read.

    The tensors stay alive until :meth:`wait`.
    """

    __slots__ = ("_inputs", "_works")

    def __init__(self, works: Sequence[Work], inputs: tuple[Tensor, ...] = ()) -> None:
        self._works = works
        self._inputs = inputs

    def wait(self) -> None:
        """Make the current stream wait for the results, and drop the inputs."""
        for work in self._works:
            work.wait()
        self._works = ()
        self._inputs = ()


def without_grad(function: Callable[..., object], *args: Any) -> None:
    """Call a function outside of autograd."""
    # The context manager torch.no_grad() takes seven calls.
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        function(*args)
    finally:
        torch._C._set_grad_enabled(enabled)


class WorkWithEpilogue:
    """Collectives in flight, and a function that copies their results to the outputs.

    Args:
        works: The collectives.
        unpack: Copies the results. A signal handler that waits may interrupt it, and then it runs
            twice.
    """

    def __init__(self, works: Sequence[Work], unpack: Callable[[], object]) -> None:
        self._works = works
        self._unpack = unpack

    def is_completed(self) -> bool:
        """Return whether the collectives are over; the outputs may not be written yet."""
        return all(map(IS_COMPLETED, self._works))

    def wait_for_results(self) -> None:
        """Wait for the collectives, but do not write the outputs yet."""
        for work in self._works:
            work.wait()

    def wait(self) -> None:
        """Wait for the collectives, and write the outputs."""
        self.wait_for_results()
        without_grad(self._unpack)
        # The script may change the outputs afterwards, so a second wait must not write them again.
        self._unpack = lambda: None


# --- gloo ---

# The idle tensors that each pool keeps.
_MAX_IDLE_TENSORS: Final = 16

# Below this size, a launch takes longer than the copies that save it. Above it, copies cost more
# than their time: the C library returns large memory to the system, and each new page then costs a
# page fault.
_LARGE_BYTES: Final = 1024 * 1024


class BufferPool:
    """Flat CPU tensors to reuse, because new memory is slow on the CPU. On GPUs, torch caches it.

    Sizes may change from step to step, so the pool keeps the tensors that were used last.
    """

    def __init__(self) -> None:
        self._idle: list[Tensor] = []

    def get(self, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor of ``numel`` elements, with undefined content."""
        for i, idle in enumerate(self._idle):
            if idle.numel() == numel and idle.dtype == like.dtype:
                return self._idle.pop(i)
        # The tensor outlives this call.
        with outside_modes():
            return like.new_empty(numel)

    def put(self, flat: Tensor) -> None:
        """Return a tensor to the pool, to which no other reference exists.

        A second call for the same tensor does nothing.
        """
        if flat.device.type == "cpu" and id(flat) not in map(id, self._idle):
            self._idle.append(flat)
            del self._idle[:-_MAX_IDLE_TENSORS]


class GlooAllReduce:
    """The implementation of :class:`AllReduce` for backends that launch each tensor separately.

    [Note: one tensor on gloo] Each launch costs gloo a fraction of a millisecond, so small tensors
    are sent in one flat copy. Gloo's coalesced collectives do the same, but must not be used. Two
    threads of gloo write the name of a completed collective into one string without a lock. Names
    of more than 15 letters, such as "ALLREDUCE_COALESCED", are on the heap. Sooner or later both
    threads free the same memory.

    Args:
        group: The process group.
        options: The options of each sum.
    """

    def __init__(self, group: dist.ProcessGroup, options: dist.AllreduceOptions) -> None:
        self._group = group
        self._options = options
        self._pool = BufferPool()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums of contiguous real tensors of one dtype, in place."""
        large, small = _partition_by_size(tensors)
        works: list[Work] = [self._group.allreduce([tensors[i]], self._options) for i in large]
        if small:
            works.append(self._coalesce([tensors[i] for i in small]))
        return works

    def _coalesce(self, tensors: list[Tensor]) -> Work:
        sizes = [tensor.numel() for tensor in tensors]
        flat = self._pool.get(sum(sizes), tensors[0])
        views = [
            view.view(tensor.shape) for view, tensor in zip(flat.split(sizes), tensors, strict=True)
        ]
        _copy(views, tensors)

        def unpack() -> None:
            _copy(tensors, views)
            self._pool.put(flat)

        return WorkWithEpilogue([self._group.allreduce([flat], self._options)], unpack)


class GlooAllGather:
    """The implementation of :class:`AllGather` for backends that launch each tensor separately.

    Within a host each rank broadcasts its shard, which is the fastest way on gloo. Over links, broadcasts
    use one direction of a link at a time and send more bytes, so ranks of several hosts form a ring.
    """

    def __init__(self, group: dist.ProcessGroup, *, spans_hosts: bool = False) -> None:
        self._group = group
        self._options = dist.distributed_c10d.AllgatherOptions()
        self._options.asyncOp = True
        self._spans_hosts = spans_hosts
        self._world = group.size()
        self._rank = group.rank()
        self._pool = BufferPool()
        self._broadcasts = [Broadcast(group, rank) for rank in range(self._world)]

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start gathering contiguous real tensors of one dtype."""
        rows_by_output = []
        own_rows = []
        shards = []
        for output, shard in zip(outputs, inputs, strict=True):
            rows = output.view(self._world, -1).unbind()
            rows_by_output.append(rows)
            # An input may be its own row of the output.
            if rows[self._rank].data_ptr() != shard.data_ptr():
                own_rows.append(rows[self._rank])
                shards.append(shard.view(-1))
        if own_rows:
            without_grad(torch._foreach_copy_, own_rows, shards)
        large, small = _partition_by_size(outputs)
        works: list[Work] = []
        for i in large:
            works += self._gather_rows(outputs[i].view(-1), rows_by_output[i])
        if small:
            works.append(self._coalesce([rows_by_output[i] for i in small]))
        return works

    def _gather_rows(self, output: Tensor, rows: Sequence[Tensor]) -> list[Work]:
        if self._spans_hosts:
            return [self._group._allgather_base(output, rows[self._rank], self._options)]
        return [broadcast(row) for broadcast, row in zip(self._broadcasts, rows, strict=True)]

    def _coalesce(self, rows_by_output: list[Sequence[Tensor]]) -> Work:
        sizes = [len(rows[0]) for rows in rows_by_output]
        flat = self._pool.get(self._world * sum(sizes), rows_by_output[0][0])
        flat_rows = flat.view(self._world, -1)
        # For each output, the rows of the flat copy that all ranks write.
        staged = list(zip(*(row.split(sizes) for row in flat_rows), strict=True))
        _copy([rows[self._rank] for rows in staged], [rows[self._rank] for rows in rows_by_output])

        def unpack() -> None:
            peers = [rank for rank in range(self._world) if rank != self._rank]
            targets = [rows[rank] for rows in rows_by_output for rank in peers]
            _copy(targets, [rows[rank] for rows in staged for rank in peers])
            self._pool.put(flat)

        return WorkWithEpilogue(self._gather_rows(flat, flat_rows.unbind()), unpack)


class GlooReduceScatter:
    """The implementation of :class:`ReduceScatter` for backends that launch each tensor separately.

    It can only sum. Two ranks exchange their shards by an all-to-all, and each rank adds its own. More ranks
    all-reduce, because sums of exchanged shards would round otherwise than those of stock PyTorch. In bf16 and fp16
    the difference would be visible.

    Args:
        group: The process group.
        device: The device of the tensors.
        exchanges: Whether more ranks exchange wider types as well, because that sends less over links between hosts.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, exchanges: bool = False
    ) -> None:
        self._group = group
        self._exchanges = exchanges
        self._world = group.size()
        self._pool = BufferPool()
        self._all_reduce = AllReduce(group, device)
        self._exchange_options = dist.AllToAllOptions()
        self._exchange_options.asyncOp = True

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start summing contiguous real tensors of one dtype into the shards of this rank."""
        shards = [shard.view(-1) for shard in outputs]
        # Row r of each input has the terms of the shard of rank r.
        rows_by_input = [full.view(self._world, -1) for full in inputs]
        # Two terms have the same sum in either order.
        if self._world == 2 or (self._exchanges and inputs[0].dtype.itemsize >= 4):
            large, small = _partition_by_size(inputs)
            exchanges = [self._exchange(rows_by_input[i], [shards[i]], ()) for i in large]
            if small:
                exchanges.append(
                    self._coalesce([shards[i] for i in small], [rows_by_input[i] for i in small])
                )
            return exchanges
        own_rows = [rows[self._group.rank()] for rows in rows_by_input]
        return [WorkWithEpilogue(self._all_reduce(inputs), lambda: _copy(shards, own_rows))]

    def _coalesce(self, shards: list[Tensor], rows_by_input: list[Tensor]) -> Work:
        sizes = [len(shard) for shard in shards]
        flat = self._pool.get(self._world * sum(sizes), rows_by_input[0])
        rows = flat.view(self._world, -1)
        _copy(rows.split(sizes, dim=1), rows_by_input)
        return self._exchange(rows, shards, [flat])

    def _exchange(self, rows: Tensor, shards: Sequence[Tensor], used: Iterable[Tensor]) -> Work:
        """Send row r to rank r, and write the sum of the received rows to the shards in order.

        Args:
            rows: The terms, of shape ``[world, size]``.
            shards: The outputs, of ``size`` elements in total.
            used: Tensors to return to the pool.
        """
        received = self._pool.get(rows.numel(), rows)
        work = self._group.alltoall_base(received, rows.reshape(-1), [], [], self._exchange_options)

        def unpack() -> None:
            is_single = len(shards) == 1
            total = shards[0] if is_single else self._pool.get(rows.shape[1], rows)
            # One call computes the sum, because a signal handler that waits here as well must not
            # find a partial sum.
            received_rows = received.view(self._world, -1)
            torch.sum(received_rows, 0, dtype=total.dtype, out=total)
            if not is_single:
                _copy(shards, total.split([len(shard) for shard in shards]))
                self._pool.put(total)
            for flat in (received, *used):
                self._pool.put(flat)

        return WorkWithEpilogue([work], unpack)


def _partition_by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the indices of tensors that are sent in place, and of those sent in a flat copy."""
    if len(tensors) == 1:
        return [0], []
    large: list[int] = []
    small: list[int] = []
    # There may be tens of thousands of tensors, so they are visited once.
    for i, tensor in enumerate(tensors):
        (small if tensor.nbytes < _LARGE_BYTES else large).append(i)
    # A flat copy of one tensor would save no launch.
    if len(small) == 1:
        return list(range(len(tensors))), []
    return large, small


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    without_grad(torch._foreach_copy_, list(targets), list(sources))


# --- transports ---


class Transport(Protocol):
    """The all-gathers and reduce-scatters of one group on one device, without its backend."""

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start all-gathers, see :meth:`AllGather.__call__`."""

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool
    ) -> Sequence[Work]:
        """Start reduce-scatters that sum at least in fp32, see :meth:`ReduceScatter.__call__`.

        Args:
            outputs: The shards of this rank. Their dtype may be wider than that of the inputs.
            inputs: The terms.
            average: Whether to average instead of sum.
        """

    def adds(self, dtype: torch.dtype) -> bool:
        """Return whether the transport can sum tensors of a dtype."""


Lookup = Callable[[dist.ProcessGroup, torch.device], "Transport | None"]


@dataclass(frozen=True)
class Transports:
    """The transports in use.

    Attributes:
        all_gather: Returns the transport for the all-gathers of a group on a device; None if the
            backend gathers.
        reduce_scatter: The same for reduce-scatters.
        add_watchdog_collective: Issues a collective of the backend after the work of a transport,
            so that the watchdog of the backend names a missing rank.
        abort: Ends the work in flight of a group without waiting for missing ranks.
    """

    all_gather: Lookup
    reduce_scatter: Lookup
    add_watchdog_collective: Callable[[dist.ProcessGroup, torch.device], None]
    abort: Callable[[dist.ProcessGroup], None]


_transports: Transports | None = None


def set_transports(transports: Transports | None) -> None:
    """Set the transports that collectives look up; with None, every group uses its backend."""
    global _transports
    _transports = transports


def reduce_scatter_transport(group: dist.ProcessGroup, device: torch.device) -> Transport | None:
    """Return the transport for the reduce-scatters of a group; None if its backend scatters."""
    return None if _transports is None else _transports.reduce_scatter(group, device)


def abort_transport(group: dist.ProcessGroup) -> None:
    """End the work of a transport in flight for a group that lacks a rank, and use it no longer.

    The collective of the backend that follows it cannot be aborted before, see
    :meth:`Collectives.end_reduction`.
    """
    if _transports is not None:
        _transports.abort(group)


# --- collectives ---


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that runs the group's collectives on ``device``."""
    return str(group._get_backend(device).name())


# Each call returns works. `wait()` makes the current stream wait; without streams, the host waits.


class AllReduce:
    """All-reduces of tensors in place, in as few launches as the backend allows.

    Args:
        group: The process group.
        device: The device of the tensors.
        average: Whether to average instead of sum, which not all backends can.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False
    ) -> None:
        self._group = group
        operation = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._single_options = dist.AllreduceOptions()
        self._coalesced_options = dist.AllreduceCoalescedOptions()
        for options in (self._single_options, self._coalesced_options):
            options.reduceOp = operation
            options.asyncOp = True
        self._ungrouped: GlooAllReduce | None = None
        if not _has_grouped_launches(group, device):
            self._ungrouped = GlooAllReduce(group, self._single_options)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums.

        Args:
            tensors: Contiguous tensors of one dtype, with the same sizes on all ranks. Complex
                numbers are summed as pairs of reals. A single tensor may be sparse if the backend
                sums sparse tensors.
        """
        given = _view_as_reals(tensors)
        # A single tensor may be sparse, and coalesced collectives take dense tensors only.
        if len(given) < 2:
            return [self._group.allreduce([tensor], self._single_options) for tensor in given]
        if self._ungrouped is not None:
            return self._ungrouped(given)
        return [self._group.allreduce_coalesced(given, self._coalesced_options)]


class AllGather:
    """All-gathers of the shards of all ranks, in as few launches as the backend allows.

    Args:
        group: The process group.
        device: The device of the tensors.
        communicator: A communicator over all or some of these ranks, on which the backend gathers.
            Default: the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        communicator: dist.ProcessGroup | None = None,
        *,
        spans_hosts: bool = False,
    ) -> None:
        # Transports belong to the group, not to the communicator, and serve all of its ranks.
        self._transport_group = group
        self._can_use_transport = communicator is None or communicator.size() == group.size()
        self._device = device
        self._group = communicator or group
        self._options, self._blocking_options = (
            dist.distributed_c10d.AllgatherOptions() for _ in range(2)
        )
        self._options.asyncOp = True
        self._blocking_options.asyncOp = False
        self._ungrouped: GlooAllGather | None = None
        if not _has_grouped_launches(group, device):
            self._ungrouped = GlooAllGather(self._group, spans_hosts=spans_hosts)

    def run(self, output: Tensor, part: Tensor) -> None:
        """Gather one tensor, and make the current stream wait for the result.

        NCCL gathers on the current stream, without the events of a call and a wait.
        """
        if _transports is not None or self._ungrouped is not None or part.is_complex():
            _wait_for(self([output], [part], self._blocking_options))
            return
        # The lists of a call for several tensors take host time in every layer.
        _wait_for((self._group._allgather_base(output, part, self._blocking_options),))

    def __call__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Sequence[Work]:
        """Start the all-gathers.

        Args:
            outputs: Contiguous tensors of one dtype, each ``world`` times as long as its input.
                Complex numbers are sent as pairs of reals.
            inputs: The contiguous shards of this rank. If a shard is its own place in the output,
                NCCL gathers in place.
            options: The options of the backend. Default: asynchronous.
        """
        options = options or self._options
        targets = _view_as_reals(outputs)
        shards = _view_as_reals(inputs)
        transport = None
        if _transports is not None and self._can_use_transport:
            transport = _transports.all_gather(self._transport_group, self._device)
        if transport is not None:
            return transport.gather(targets, shards)
        if self._ungrouped is not None:
            return self._ungrouped(targets, shards)
        if len(targets) < 2:
            pairs = zip(targets, shards, strict=True)
            return [self._group._allgather_base(*pair, options) for pair in pairs]
        return [self._group.allgather_into_tensor_coalesced(targets, shards, options)]


class Broadcast:
    """Broadcasts of tensors of one rank to all ranks of a group.

    Args:
        group: The process group.
        root: The group rank whose tensors are sent.
    """

    def __init__(self, group: dist.ProcessGroup, root: int) -> None:
        self._group = group
        self._options = dist.BroadcastOptions()
        self._options.rootRank = root
        self._options.rootTensor = 0
        self._options.asyncOp = True

    def __call__(self, tensor: Tensor) -> Work:
        """Start a broadcast.

        Args:
            tensor: A contiguous tensor of the same size on all ranks, which all ranks but ``root``
                write.
        """
        return self._group.broadcast([tensor], self._options)


class ReduceScatter:
    """Reduce-scatters of tensors: each rank gets its shards of the sums over all ranks.

    Args:
        group: The process group.
        device: The device of the tensors.
        average: Whether to average instead of sum, which not all backends can.
        exchanges: See :class:`GlooReduceScatter`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        average: bool = False,
        exchanges: bool = False,
    ) -> None:
        self._group = group
        self._device = device
        self._average = average
        self._options = dist.ReduceScatterOptions()
        self._blocking_options = dist.ReduceScatterOptions()
        for options in (self._options, self._blocking_options):
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._options.asyncOp = True
        self._blocking_options.asyncOp = False
        self._ungrouped: GlooReduceScatter | None = None
        if not _has_grouped_launches(group, device):
            self._ungrouped = GlooReduceScatter(group, device, exchanges=exchanges)

    def run(self, output: Tensor, terms: Tensor) -> None:
        """Sum one tensor, and make the current stream wait for the result.

        NCCL sums on the current stream, without the events of a call and a wait.
        """
        if _transports is not None or self._ungrouped is not None or terms.is_complex():
            _wait_for(self([output], [terms], self._blocking_options))
            return
        _wait_for((self._group._reduce_scatter_base(output, terms, self._blocking_options),))

    def __call__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Sequence[Work]:
        """Start the reduce-scatters.

        Args:
            outputs: The contiguous shards of this rank, of shape ``[size]``.
            inputs: Contiguous tensors of one dtype, of shape ``[world * size]``. Their content is
                undefined afterwards.
            options: The options of the backend. Default: asynchronous.
        """
        options = options or self._options
        shards = _view_as_reals(outputs)
        terms = _view_as_reals(inputs)
        transport = None
        if _transports is not None:
            transport = _transports.reduce_scatter(self._group, self._device)
        if transport is not None and transport.adds(terms[0].dtype):
            return transport.scatter(shards, terms, average=self._average)
        if self._ungrouped is not None:
            return self._ungrouped(shards, terms)
        if len(shards) < 2:
            pairs = zip(shards, terms, strict=True)
            return [self._group._reduce_scatter_base(*pair, options) for pair in pairs]
        return [self._group.reduce_scatter_tensor_coalesced(shards, terms, options)]


class Collectives:
    """The collectives that reduce gradients on one device.

    Args:
        group: The process group.
        device: The device of the gradients.
        average: Whether to average instead of sum, which not all backends can.
        exchanges: See :class:`GlooReduceScatter`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        average: bool = False,
        exchanges: bool = False,
    ) -> None:
        self._group = group
        self._device = device
        self.all_reduce = AllReduce(group, device, average=average)
        self.reduce_scatter = ReduceScatter(group, device, average=average, exchanges=exchanges)

    def reduce_scatter_fp32(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Work]:
        """Average bf16 or fp16 tensors in fp32, which only a transport can.

        See :meth:`ReduceScatter.__call__`.

        Raises:
            RuntimeError: The transport of the group was aborted during this backward.
        """
        transport = reduce_scatter_transport(self._group, self._device)
        if transport is None:
            raise RuntimeError(_ERROR_ABORTED)
        return transport.scatter(outputs, inputs, average=True)

    def end_reduction(self) -> None:
        """Let the watchdog of the backend observe the work of a transport.

        All ranks call this after the last reduction of a backward.
        """
        if _transports is not None:
            _transports.add_watchdog_collective(self._group, self._device)


_ERROR_ABORTED: Final = (
    "ovpatch: copies between ranks were aborted during a backward that peers continue. Restart all "
    "ranks. If it happens again, set OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off."
)


def _has_grouped_launches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend launches the collectives of several tensors as one."""
    return backend_name(group, device) == "nccl"


def _wait_for(works: Sequence[Work | None]) -> None:
    for work in works:
        # NCCL returns None if the current stream computes the result.
        if work is not None:
            work.wait()


def _view_as_reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    # All tensors have one dtype.
    if tensors and tensors[0].is_complex():
        return [torch.view_as_real(tensor) for tensor in tensors]
    return list(tensors)

"""Asynchronous all-reduce, all-gather, broadcast and reduce-scatter, as methods of the process group.

The checks of ``torch.distributed.all_reduce`` cost a backward with many buckets noticeable time. Stock DDP, too, calls
the process group itself.

Backends that launch each tensor separately, such as gloo, get collectives of their own. A transport, such as the GPUs'
copy engines, may carry a group's all-gathers and reduce-scatters instead of its backend: :func:`set_transports`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.lifetimes import (
    drop_values,
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    outside_modes,
)


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Make the current stream (the host, without streams) wait for the result."""


class WorkGroup:
    """Several collectives in flight; it keeps the tensors that they read until :meth:`wait`."""

    __slots__ = ("_inputs", "_works")

    def __init__(self, works: Sequence[Work], inputs: tuple[Tensor, ...] = ()) -> None:
        self._works, self._inputs = works, inputs

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for the results, and drop the inputs."""
        for work in self._works:
            work.wait()
        self._works = self._inputs = ()


def without_grad(function: Callable[..., object], *args: Any) -> None:
    """Call a function outside of autograd, without the seven calls of ``torch.no_grad()``."""
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        function(*args)
    finally:
        torch._C._set_grad_enabled(enabled)


class WorkWithEpilogue:
    """Collectives in flight, and a function that copies their results to the outputs.

    ``unpack`` is called again if a signal handler waits while it runs.
    """

    def __init__(self, works: Sequence[Work], unpack: Callable[[], object]) -> None:
        self._works, self._unpack = works, unpack

    def wait_for_results(self) -> None:
        """Wait for the collectives only; the outputs are not written yet."""
        for work in self._works:
            work.wait()

    def wait(self) -> None:
        """Wait for the collectives and write the outputs, once: later content of the outputs is not ours."""
        self.wait_for_results()
        without_grad(self._unpack)
        self._unpack = lambda: None


_POOL_SIZE = 16  # idle tensors for one collective of one group

# Bytes. Below, a launch takes longer than the copies that it saves. From there on, the copies would cost more than
# their time: the C library returns large memory to the system when it is freed, and each new page costs a fault.
_LARGE = 1024 * 1024


class BufferPool:
    """Flat CPU tensors that are reused, since fresh memory is slow there. Elsewhere torch caches memory.

    The last used ones are kept, since sizes may change from step to step.
    """

    def __init__(self) -> None:
        self._idle: list[Tensor] = []

    def get(self, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor of ``numel`` elements with undefined content."""
        for i, idle in enumerate(self._idle):
            if idle.numel() == numel and idle.dtype == like.dtype:
                return self._idle.pop(i)
        with outside_modes():
            return like.new_empty(numel)

    def put(self, flat: Tensor) -> None:
        """Return a tensor that is not referenced elsewhere any more. A second call for it does nothing."""
        if flat.device.type == "cpu" and id(flat) not in map(id, self._idle):
            self._idle.append(flat)
            del self._idle[:-_POOL_SIZE]


class GlooAllReduce:
    """See :class:`ovpatch.overlap.comm.collectives.AllReduce`.

    [Note: one tensor on gloo] Each launch costs gloo a fraction of a millisecond, so small tensors travel in one flat
    copy. Gloo's coalesced collectives do the same, but must not be used: gloo's two threads write the name of a
    completed collective into one string without a lock, and names of more than 15 letters, such as
    "ALLREDUCE_COALESCED", live on the heap. Sooner or later both threads free the same memory.

    ``options`` are those of each sum.
    """

    def __init__(self, group: dist.ProcessGroup, options: dist.AllreduceOptions) -> None:
        self._group, self._options = group, options
        self._pool = BufferPool()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums of contiguous real tensors of one dtype, in place."""
        alone, small = _by_size(tensors)
        works: list[Work] = [self._group.allreduce([tensors[i]], self._options) for i in alone]
        if small:
            works.append(self._coalesced([tensors[i] for i in small]))
        return works

    def _coalesced(self, tensors: list[Tensor]) -> Work:
        flat = self._pool.get(sum(tensor.numel() for tensor in tensors), tensors[0])
        views = [
            view.view(tensor.shape)
            for view, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
        ]
        _copy(views, tensors)

        def unpack() -> None:
            _copy(tensors, views)
            self._pool.put(flat)

        return WorkWithEpilogue([self._group.allreduce([flat], self._options)], unpack)


class GlooAllGather:
    """See :class:`ovpatch.overlap.comm.collectives.AllGather`. Each rank broadcasts its shard, gloo's fastest way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._world, self._rank = group.size(), group.rank()
        self._pool = BufferPool()
        self._broadcasts = [Broadcast(group, rank) for rank in range(self._world)]

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start gathering contiguous real tensors of one dtype."""
        rows, places, shards = [], [], []
        for output, shard in zip(outputs, inputs, strict=True):
            parts = output.view(self._world, -1).unbind()
            rows.append(parts)
            if parts[self._rank].data_ptr() != shard.data_ptr():
                places.append(parts[self._rank])
                shards.append(shard.view(-1))
        if places:
            without_grad(torch._foreach_copy_, places, shards)
        alone, small = _by_size(outputs)
        works: list[Work] = []
        for i in alone:
            works += self._broadcast(rows[i])
        if small:
            works.append(self._coalesced([rows[i] for i in small]))
        return works

    def _broadcast(self, rows: Sequence[Tensor]) -> list[Work]:
        return [broadcast(row) for broadcast, row in zip(self._broadcasts, rows, strict=True)]

    def _coalesced(self, full: list[Sequence[Tensor]]) -> Work:
        sizes = [len(rows[0]) for rows in full]
        flat = self._pool.get(self._world * sum(sizes), full[0][0])
        places = list(zip(*(row.split(sizes) for row in flat.view(self._world, -1)), strict=True))
        _copy([place[self._rank] for place in places], [rows[self._rank] for rows in full])

        def unpack() -> None:
            others = [rank for rank in range(self._world) if rank != self._rank]
            targets = [rows[rank] for rows in full for rank in others]
            _copy(targets, [place[rank] for place in places for rank in others])
            self._pool.put(flat)

        return WorkWithEpilogue(self._broadcast(flat.view(self._world, -1).unbind()), unpack)


class GlooReduceScatter:
    """See :class:`ovpatch.overlap.comm.collectives.ReduceScatter`; sums only.

    Two ranks exchange shards and add them. More ranks all-reduce: sums of exchanged shards would round otherwise than
    stock's, in half precision visibly so.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._world, self._rank = group.size(), group.rank()
        options = dist.AllreduceOptions()
        options.asyncOp = True
        self._exchange = Exchange(group) if self._world == 2 else None
        self._all_reduce = GlooAllReduce(group, options)

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start summing contiguous real tensors of one dtype; each output gets this rank's shard."""
        shards, rows = [shard.view(-1) for shard in outputs], [full.view(self._world, -1) for full in inputs]
        if self._exchange is not None:
            return self._exchange(shards, rows)
        works = self._all_reduce(inputs)
        return [WorkWithEpilogue(works, lambda: _copy(shards, [row[self._rank] for row in rows]))]


class Exchange:
    """Reduce-scatter by all-to-all: each rank adds up its own shard."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._world = group, group.size()
        self._pool = BufferPool()
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True

    def __call__(self, shards: Sequence[Tensor], full: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums, ``[size]`` each, of terms ``[world, size]`` each, whose row r is sent to rank r."""
        alone, small = _by_size(full)
        works = []
        for i in alone:
            works.append(self._sum_rows(full[i], [shards[i]], ()))
        if small:
            works.append(self._coalesced([shards[i] for i in small], [full[i] for i in small]))
        return works

    def _coalesced(self, shards: list[Tensor], full: list[Tensor]) -> Work:
        sizes = [len(shard) for shard in shards]
        flat = self._pool.get(self._world * sum(sizes), full[0])
        rows = flat.view(self._world, -1)
        _copy(rows.split(sizes, dim=1), full)
        return self._sum_rows(rows, shards, [flat])

    def _sum_rows(self, rows: Tensor, shards: Sequence[Tensor], used: Iterable[Tensor]) -> Work:
        """Send row r to rank r; write the sum of the received rows to the shards, one after the other."""
        received = self._pool.get(rows.numel(), rows)
        work = self._group.alltoall_base(received, rows.reshape(-1), [], [], self._options)

        def unpack() -> None:
            total = shards[0] if len(shards) == 1 else self._pool.get(rows.shape[1], rows)
            # In one call: a signal handler that waits here, too, must not find half a sum.
            torch.sum(received.view(self._world, -1), 0, dtype=total.dtype, out=total)
            if len(shards) > 1:
                _copy(shards, total.split([len(shard) for shard in shards]))
                self._pool.put(total)
            for flat in (received, *used):
                self._pool.put(flat)

        return WorkWithEpilogue([work], unpack)


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the indices of tensors that travel in place, and of those that travel in a flat copy."""
    if len(tensors) == 1:
        return [0], []
    alone: list[int] = []
    small: list[int] = []
    for i, tensor in enumerate(tensors):  # once: there may be tens of thousands
        (small if tensor.nbytes < _LARGE else alone).append(i)
    if len(small) == 1:
        return list(range(len(tensors))), []
    return alone, small


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    without_grad(torch._foreach_copy_, list(targets), list(sources))


class Transport(Protocol):
    """Carries the all-gathers and reduce-scatters of one group on one device."""

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start all-gathers; as :meth:`AllGather.__call__`."""

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool) -> Sequence[Work]:
        """Start reduce-scatters, summed in fp32 at least; as :meth:`ReduceScatter.__call__`.

        The outputs' dtype may be wider than that of the inputs; the average divides by the number of ranks.
        """

    def adds(self, dtype: torch.dtype) -> bool:
        """Return whether it sums tensors of a dtype."""


Lookup = Callable[[dist.ProcessGroup, torch.device], "Transport | None"]


@dataclass(frozen=True)
class Transports:
    """Which transports have been chosen."""

    all_gather: Lookup  # returns what carries the all-gathers of a group on a device now; None for the group's backend
    reduce_scatter: Lookup  # the same of reduce-scatters
    # Issues a collective of the backend behind what a transport carries, so that the backend's watchdog names a rank
    # that is missing.
    add_watchdog_collective: Callable[[dist.ProcessGroup, torch.device], None]
    abort: Callable[[dist.ProcessGroup], None]  # ends what is in flight in a group without ranks that are missing


_transports: Transports | None = None


def set_transports(transports: Transports | None) -> None:
    """Have collectives ask for transports from now on; with None, every group uses its backend."""
    global _transports
    _transports = transports


def reduce_scatter_transport(group: dist.ProcessGroup, device: torch.device) -> Transport | None:
    """Return what carries a group's reduce-scatters now; None for its backend."""
    return None if _transports is None else _transports.reduce_scatter(group, device)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that runs the group's collectives on ``device``."""
    return str(group._get_backend(device).name())


class AllReduce:
    """All-reduces tensors over the ranks of a group, in place, in as few launches as the backend allows.

    ``average`` divides by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group = group
        operation = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._one, self._many = dist.AllreduceOptions(), dist.AllreduceCoalescedOptions()
        for options in (self._one, self._many):
            options.reduceOp, options.asyncOp = operation, True
        self._ungrouped = None if _groups(group, device) else GlooAllReduce(group, self._one)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums; ``wait()`` makes the current stream (the host, without streams) wait for the results.

        Tensors are contiguous, of one dtype, of the same sizes on all ranks. Complex numbers are summed as pairs of
        reals. One tensor alone may be sparse, if the backend sums sparse tensors.
        """
        given = _as_reals(tensors)
        if len(given) < 2:
            return [self._group.allreduce([tensor], self._one) for tensor in given]
        if self._ungrouped is not None:
            return self._ungrouped(given)
        return [self._group.allreduce_coalesced(given, self._many)]


class AllGather:
    """All-gathers every rank's parts, in as few launches as the backend allows.

    The backend gathers on a communicator over the same ranks; by default on the group itself.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, communicator: dist.ProcessGroup | None = None
    ) -> None:
        self._copied, self._device = group, device
        self._group = communicator or group
        self._options, self._blocking = (dist.distributed_c10d.AllgatherOptions() for _ in range(2))
        self._options.asyncOp, self._blocking.asyncOp = True, False
        self._ungrouped = None if _groups(group, device) else GlooAllGather(self._group)

    def run(self, output: Tensor, part: Tensor) -> None:
        """Gather one tensor, as a call and a wait do; NCCL does so on the current stream, without events."""
        _wait_for(self([output], [part], self._blocking))

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Sequence[Work]:
        """Start the gathering; ``wait()`` makes the current stream (the host, without streams) wait for the results.

        Outputs are contiguous, of one dtype, each ``world`` times as long as its input; complex numbers travel as pairs
        of reals. Inputs are this rank's parts, contiguous. A part may be the very place in its output where it will be:
        NCCL gathers in place then. ``options`` are those of the backend's collective, if not the usual ones.
        """
        options = options or self._options
        to, of = _as_reals(outputs), _as_reals(inputs)
        transport = None if _transports is None else _transports.all_gather(self._copied, self._device)
        if transport is not None:
            return transport.gather(to, of)
        if self._ungrouped is not None:
            return self._ungrouped(to, of)
        if len(to) < 2:
            return [self._group._allgather_base(*pair, options) for pair in zip(to, of, strict=True)]
        return [self._group.allgather_into_tensor_coalesced(to, of, options)]


class Broadcast:
    """Broadcasts the tensor of the rank ``root`` to all ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, root: int) -> None:
        self._group = group
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor, self._options.asyncOp = root, 0, True

    def __call__(self, tensor: Tensor) -> Work:
        """Start to copy a contiguous tensor of the same size on all ranks; on the others than ``root`` it is written.

        ``wait()`` makes the current stream (the host, without streams) wait for the result.
        """
        return self._group.broadcast([tensor], self._options)


class ReduceScatter:
    """Reduce-scatters tensors: each rank of a group gets its own part of the sums over the ranks.

    ``average`` divides by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group, self._device, self._average = group, device, average
        self._options, self._blocking = dist.ReduceScatterOptions(), dist.ReduceScatterOptions()
        for options in (self._options, self._blocking):
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._options.asyncOp, self._blocking.asyncOp = True, False
        self._ungrouped = None if _groups(group, device) else GlooReduceScatter(group)

    def run(self, output: Tensor, terms: Tensor) -> None:
        """Sum one tensor, as a call and a wait do; NCCL does so on the current stream, without events."""
        _wait_for(self([output], [terms], self._blocking))

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Sequence[Work]:
        """Start the sums; ``wait()`` makes the current stream (the host, without streams) wait for the results.

        Outputs are this rank's parts, ``[size]`` each, contiguous. Inputs are contiguous, ``[world * size]`` each, of
        one dtype; their content is undefined afterwards. ``options`` are as those of :meth:`AllGather.__call__`.
        """
        options = options or self._options
        to, of = _as_reals(outputs), _as_reals(inputs)
        transport = None if _transports is None else _transports.reduce_scatter(self._group, self._device)
        if transport is not None and transport.adds(of[0].dtype):
            return transport.scatter(to, of, average=self._average)
        if self._ungrouped is not None:
            return self._ungrouped(to, of)
        if len(to) < 2:
            return [self._group._reduce_scatter_base(*pair, options) for pair in zip(to, of, strict=True)]
        return [self._group.reduce_scatter_tensor_coalesced(to, of, options)]


class Collectives:
    """The collectives that reduce gradients on one device; ``average`` divides, for backends that can."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group, self._device = group, device
        self.all_reduce = AllReduce(group, device, average=average)
        self.reduce_scatter = ReduceScatter(group, device, average=average)

    def reduce_scatter_fp32(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Average tensors of half precision in fp32, as :meth:`ReduceScatter.__call__`; only a transport can.

        RuntimeError if the group's transport has been given up meanwhile.
        """
        transport = reduce_scatter_transport(self._group, self._device)
        if transport is None:
            raise RuntimeError(_GONE)
        return transport.scatter(outputs, inputs, average=True)

    def end_reduction(self) -> None:
        """Have the backend's watchdog see what a transport carries; all ranks call this behind the last reduction."""
        if _transports is not None:
            _transports.add_watchdog_collective(self._group, self._device)


_GONE = (
    "ovpatch: copies between ranks ended during a backward that others go on with. Restart all ranks; or set "
    "OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, if it happens again."
)


def _groups(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend launches the collectives of several tensors as one."""
    return backend_name(group, device) == "nccl"


def _wait_for(works: Sequence[Work | None]) -> None:
    for work in works:
        if work is not None:  # NCCL has none where the current stream computes the result
            work.wait()


def _as_reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    if tensors and tensors[0].is_complex():  # as are all, which are of one dtype
        return [torch.view_as_real(tensor) for tensor in tensors]
    return list(tensors)


#: The first part of the keys by which groups keep what uses their step communicators, and goes with these.
STEP_VOTES: Final = "step votes"

_TUNED = ("cga_cluster_size", "min_ctas", "max_ctas")  # fields of NCCL's configuration that users set


def step_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the communicator of a model's group for collectives in steps; made once.

    Every rank of the group makes the first call at the same place, which connects them. For a backend that is neither
    gloo nor NCCL it is the group itself; a script must then issue no collectives on it beside a step.

    [Note: beside the script's collectives] A communicator pairs collectives in the order in which hosts issue them.
    Where stock issues none, a script's thread may issue one on the model's process group, before ours on one rank and
    after it on another: a hang, or wrong numbers. So ours have a communicator of their own; those of a backward stay
    on the group, where stock issues them, too. Torch does not register it: a registered group would change the names
    of later groups, which have to be the same on ranks that are no members.
    """
    made = group_state(group).values.get(_Communicators)
    if made is None or device.type not in made:
        made = group_state(group).get_or_create(_Communicators, _Communicators)
        made[device.type] = _make_communicator(group, device)
    found = made[device.type]
    return group if found is None else found


def close_step_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Shut down the communicators of one model's group, or all, after their collectives. All ranks call this.

    Collectives in which a rank is known to be missing are aborted (:func:`abort_step_communicators`).
    Does nothing if an exception ends this process: collectives in flight may wait for peers that are gone.
    """
    if is_exiting_by_error():
        return
    for _, made in group_values(_Communicators, group):
        for device, communicator in made.items():
            if communicator is not None:
                # Gloo cannot abort, and has no collective that waits on a device.
                (communicator.abort if made.is_abandoned and device == "cuda" else communicator.shutdown)()
        made.clear()
    drop_values(STEP_VOTES, group)


def abort_step_communicators(group: dist.ProcessGroup) -> None:
    """Have a group's communicators closed without a wait for collectives, as a rank of the group joins one no more."""
    made = group_state(group).values.get(_Communicators)
    if made is not None:
        made.is_abandoned = True


def abort_transport(group: dist.ProcessGroup) -> None:
    """End what a transport has in flight in a group that lacks a rank; the transport is not used again.

    The backend's collective behind it (:meth:`Collectives.end_reduction`) cannot be aborted before.
    """
    if _transports is not None:
        _transports.abort(group)


class _Communicators(dict[str, "dist.ProcessGroup | None"]):
    """The communicators of one group, by type of device; None where the group itself is used."""

    is_abandoned = False


def _make_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    backend: Any = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # wrapped under TORCH_DISTRIBUTED_DEBUG=DETAIL
    # Backends of other classes may need more than a store.
    is_nccl = type(backend) is getattr(dist, "ProcessGroupNCCL", None)
    is_known = is_nccl or type(backend) is getattr(dist, "ProcessGroupGloo", None)
    store = group_store(group)
    if group.size() == 1 or not is_known or store is None:
        return None
    # Ranks may use the communicators of two devices for the first time in orders that differ.
    topic = f"communicator of {device.type}"
    name = f"ovpatch/communicator/{agree_on_name(group, topic, timeout_s=group_timeout_s(group))}"
    own_store = dist.PrefixStore(name, store)
    rank, size = group.rank(), group.size()
    if is_nccl:
        kind = dist.ProcessGroup.BackendType.NCCL
        made: Any = dist.ProcessGroupNCCL(own_store, rank, size, _nccl_options(group, backend.options, name))
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        made = dist.ProcessGroupGloo(own_store, rank, size, timeout=timedelta(seconds=group_timeout_s(group)))
    found = dist.ProcessGroup(own_store, rank, size)
    found._set_default_backend(kind)
    found._register_backend(torch.device(device.type), kind, made)
    return found


def _nccl_options(group: dist.ProcessGroup, script_options: Any, name: str) -> Any:
    """Return the options of the script's communicator. NCCL connects at the first collective."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = script_options._timeout
    options.is_high_priority_stream = script_options.is_high_priority_stream
    for tuned in _TUNED:
        setattr(options.config, tuned, getattr(script_options.config, tuned))
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = name
    return options

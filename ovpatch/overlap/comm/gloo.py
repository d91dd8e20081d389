"""Collectives of several tensors on backends that launch each one separately, such as gloo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.work import Work, WorkWithEpilogue, without_grad

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
        with torch.inference_mode(False):
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
        self._group, self._world, self._rank = group, group.size(), group.rank()
        self._pool = BufferPool()
        self._options = []
        for rank in range(self._world):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = rank, 0, True
            self._options.append(options)

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
        works: list[Work] = []
        for row, options in zip(rows, self._options, strict=True):
            works.append(self._group.broadcast([row], options))
        return works

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
        """Start the sums.

        Args:
            shards: This rank's sums, ``[size]`` each.
            full: This rank's terms, ``[world, size]`` each; row r is sent to rank r.
        """
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

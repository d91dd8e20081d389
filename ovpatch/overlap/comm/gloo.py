"""Collectives of many tensors on backends that launch each alone, as gloo.

[Note: one tensor on gloo] Every launch costs gloo some 0.3 ms. So small tensors travel through one flat copy, as gloo's
coalesced collectives would have it. Those must not be used: gloo's two threads write the name of what they have
completed into one string without a lock, and names of more than 15 letters, as "ALLREDUCE_COALESCED" is one, live on
the heap. Sooner or later both free the same memory. (_ALLREDUCE_SPARSE is another one; there stock does the same.)

[Note: large tensors alone] Large tensors travel where they are. The copy would cost more than its time: the C library
gives large memory back to the system when it is freed, and then every page of the next large tensor costs a fault.
40 MiB are concatenated in 28 ms, or in 6 where the memory has been used before. So what flat tensors there are is used
again.

[Note: what gloo is quick at] For 40 MiB of gradients and 2 ranks, gloo takes 36 ms to all-reduce, 54 to all-gather, and
36 to reduce-scatter (it all-reduces); but 15 ms to broadcast both parts, and 18 to exchange them. So parts are gathered
by broadcasts, and two ranks exchange parts and add them up. More ranks all-reduce: adding up what was exchanged would
round otherwise than stock, in half precision visibly so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.work import Work, WorkWithEpilogue

_KEPT = 16  # idle tensors for one collective of one group

_ALONE = 1024 * 1024  # bytes; below it, a launch takes longer than the copies that it saves


class BufferPool:
    """Flat tensors on the CPU that are used again; see [Note: large tensors alone]. Elsewhere torch keeps memory.

    Those that were used last are kept, since sizes may change from step to step.
    """

    def __init__(self) -> None:
        self._idle: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor of ``numel`` elements, whatever is in them."""
        for i, idle in enumerate(self._idle):
            if idle.numel() == numel and idle.dtype == like.dtype:
                return self._idle.pop(i)
        with torch.inference_mode(False):
            return like.new_empty(numel)

    def give_back(self, flat: Tensor) -> None:
        """Keep a tensor of which nobody else knows any more. A second time does nothing."""
        if flat.device.type == "cpu" and not any(idle is flat for idle in self._idle):
            self._idle.append(flat)
            del self._idle[:-_KEPT]


class GlooAllReduce:
    """See :class:`ovpatch.overlap.comm.collectives.AllReduce`.

    Args:
        group: The process group.
        options: For each sum.
    """

    def __init__(self, group: dist.ProcessGroup, options: dist.AllreduceOptions) -> None:
        self._group, self._options = group, options
        self._spare = BufferPool()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums of contiguous real tensors of one dtype, in place."""
        alone, small = _by_size(tensors)
        works: list[Work] = [self._group.allreduce([tensors[i]], self._options) for i in alone]
        if small:
            works.append(self._through_one([tensors[i] for i in small]))
        return works

    def _through_one(self, tensors: list[Tensor]) -> Work:
        flat = self._spare.take(sum(tensor.numel() for tensor in tensors), tensors[0])
        pieces = [
            piece.view(tensor.shape)
            for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
        ]
        _copy(pieces, tensors)

        def unpack() -> None:
            _copy(tensors, pieces)
            self._spare.give_back(flat)

        return WorkWithEpilogue([self._group.allreduce([flat], self._options)], unpack)


class GlooAllGather:
    """See :class:`ovpatch.overlap.comm.collectives.AllGather`.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._world, self._rank = group, group.size(), group.rank()
        self._spare = BufferPool()
        self._options = []
        for rank in range(self._world):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = rank, 0, True
            self._options.append(options)

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start gathering contiguous real tensors of one dtype."""
        rows = [output.view(self._world, -1) for output in outputs]
        own = [(row[self._rank], part.view(-1)) for row, part in zip(rows, inputs, strict=True)]
        elsewhere = [(place, part) for place, part in own if place.data_ptr() != part.data_ptr()]
        if elsewhere:
            _copy(*zip(*elsewhere, strict=True))
        alone, small = _by_size(outputs)
        works = [work for i in alone for work in self._from_everybody(rows[i])]
        if small:
            works.append(self._through_one([rows[i] for i in small]))
        return works

    def _from_everybody(self, rows: Tensor) -> list[Work]:
        return [self._group.broadcast([row], options) for row, options in zip(rows, self._options, strict=True)]

    def _through_one(self, wholes: list[Tensor]) -> Work:
        sizes = [rows.shape[1] for rows in wholes]
        flat = self._spare.take(self._world * sum(sizes), wholes[0])
        places = list(zip(*(row.split(sizes) for row in flat.view(self._world, -1)), strict=True))
        _copy([place[self._rank] for place in places], [rows[self._rank] for rows in wholes])

        def unpack() -> None:
            others = [rank for rank in range(self._world) if rank != self._rank]
            targets = [rows[rank] for rows in wholes for rank in others]
            _copy(targets, [place[rank] for place in places for rank in others])
            self._spare.give_back(flat)

        return WorkWithEpilogue(self._from_everybody(flat.view(self._world, -1)), unpack)


class GlooReduceScatter:
    """See :class:`ovpatch.overlap.comm.collectives.ReduceScatter`; sums only.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._world, self._rank = group.size(), group.rank()
        options = dist.AllreduceOptions()
        options.asyncOp = True
        self._exchange = Exchange(group) if self._world == 2 else None
        self._all_reduce = GlooAllReduce(group, options)

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start summing contiguous real tensors of one dtype; each output gets this rank's part."""
        parts, rows = [part.view(-1) for part in outputs], [given.view(self._world, -1) for given in inputs]
        if self._exchange is not None:
            return self._exchange(parts, rows)
        works = self._all_reduce(inputs)
        return [WorkWithEpilogue(works, lambda: _copy(parts, [row[self._rank] for row in rows]))]


class Exchange:
    """Sums of which each rank adds up its own part.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._world = group, group.size()
        self._spare = BufferPool()
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True

    def __call__(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Sequence[Work]:
        """Start summing: of each whole, ``[world, size]``, row r goes to rank r; a part ``[size]`` gets its sum."""
        alone, small = _by_size(wholes)
        works = [self._summed(wholes[i], [parts[i]], ()) for i in alone]
        if small:
            works.append(self._through_one([parts[i] for i in small], [wholes[i] for i in small]))
        return works

    def _through_one(self, parts: list[Tensor], wholes: list[Tensor]) -> Work:
        sizes = [len(part) for part in parts]
        flat = self._spare.take(self._world * sum(sizes), wholes[0])
        rows = flat.view(self._world, -1)
        _copy(rows.split(sizes, dim=1), wholes)
        return self._summed(rows, parts, [flat])

    def _summed(self, rows: Tensor, parts: Sequence[Tensor], used: Iterable[Tensor]) -> Work:
        """Send row r to rank r; the parts are, one behind the other, the sum of what comes."""
        received = self._spare.take(rows.numel(), rows)
        work = self._group.alltoall_base(received, rows.reshape(-1), [], [], self._options)

        def unpack() -> None:
            total = parts[0] if len(parts) == 1 else self._spare.take(rows.shape[1], rows)
            # In one call: a signal handler that waits here as well must not find half a sum.
            torch.sum(received.view(self._world, -1), 0, dtype=total.dtype, out=total)
            if len(parts) > 1:
                _copy(parts, total.split([len(part) for part in parts]))
                self._spare.give_back(total)
            for flat in (received, *used):
                self._spare.give_back(flat)

        return WorkWithEpilogue([work], unpack)


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return which tensors travel where they are, and which through a flat one."""
    alone: list[int] = []
    small: list[int] = []
    for i, tensor in enumerate(tensors):  # once: there may be tens of thousands
        (small if tensor.nbytes < _ALONE else alone).append(i)
    if len(small) == 1:
        return list(range(len(tensors))), []
    return alone, small


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))

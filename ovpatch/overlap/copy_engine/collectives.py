"""Gathers and reduce-scatters of one group on one device; see the notes of the package."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.work import Work
from ovpatch.overlap.copy_engine.driver import Addend, Batch, Span
from ovpatch.overlap.copy_engine.window import (
    SLOT_BYTES,
    Allocate,
    Lanes,
    NoStreams,
    Piece,
    Streams,
    Window,
    allocate,
    rounds,
)

# Sums of what several ranks gave.


def add_up(slots: Sequence[Span | None], addends: Sequence[Addend], scale: float, stream: int) -> None:
    """Write ``scale`` times sums, whose terms are added in the order of ranks in float32, and rounded once.

    Args:
        slots: What other ranks sent, by rank, of one dtype; None for this rank. Terms of float64 are added in float64.
        addends: What this rank adds, of the same dtype, and where the sums go, of one dtype.
        scale: Factor.
        stream: On which CUDA stream, by its handle; 0 without CUDA.
    """
    if addends[0].out.memory.is_cuda:
        from ovpatch.overlap.copy_engine import sum_kernel

        sum_kernel.add_up(slots, addends, scale, stream)
        return
    for own, out, at in addends:
        terms = [own.tensor() if slot is None else slot.tensor().narrow(0, at, own.numel) for slot in slots]
        total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32))
        for term in terms[1:]:
            total = total + term
        out.tensor().copy_(total * scale)


_GRAIN: Final = 128  # bytes, at whose multiples pieces begin
_SUMMED: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Engine:
    """What moves tensors between the ranks of a group, without the group's backend.

    It does not keep the group alive.

    Args:
        group: The ranks, all on one host.
        device: Where their tensors are.
        allocate: Makes the memory; all ranks call it together.
        slot_bytes: How much a rank lays out, or gets, in a round.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        allocate: Allocate = allocate,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._world, self._rank = group.size(), group.rank()
        self._others = [(self._rank + i) % self._world for i in range(1, self._world)]
        self._slot, self._device = slot_bytes, device
        self._window: Window = allocate(2 * slot_bytes, group, device)
        self._addresses = [memory.data_ptr() for memory in self._window.ranks]
        self._lanes: Lanes = Streams(device) if device.type == "cuda" else NoStreams()
        self._views: dict[torch.dtype, Tensor] = {}
        self._half = 0
        self._lock, self._within = threading.RLock(), False

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start to gather; as :class:`ovpatch.overlap.comm.collectives.AllGather`."""
        sizes = tuple(part.nbytes for part in inputs)
        wholes, parts = _addresses(outputs, sizes, self._world), _addresses(inputs, sizes)
        places = [whole + self._rank * size for whole, size in zip(wholes, sizes, strict=True)]
        elsewhere = [i for i, place in enumerate(places) if place != parts[i] and sizes[i]]

        def lay_out(half: int, pieces: Sequence[Piece]) -> Batch:
            slot = self._addresses[self._rank] + half
            return Batch(
                [slot + p.at for p in pieces], [parts[p.tensor] + p.begin for p in pieces], [*map(_length, pieces)]
            )

        def take(half: int, pieces: Sequence[Piece], stream: int) -> None:
            lengths, batch = [*map(_length, pieces)], Batch([], [], [])
            for rank in self._others:
                slot = self._addresses[rank] + half
                batch.to.extend([wholes[p.tensor] + rank * sizes[p.tensor] + p.begin for p in pieces])
                batch.of.extend([slot + p.at for p in pieces])
                batch.sizes.extend(lengths)
            self._window.copy(batch, stream)

        with self._whole():
            launched = self._lanes.begin()
            if elsewhere:
                own = Batch(
                    [places[i] for i in elsewhere], [parts[i] for i in elsewhere], [sizes[i] for i in elsewhere]
                )
                self._window.copy(own, self._lanes.take())
            self._run(rounds(sizes, self._slot, _GRAIN), lay_out, take)
            return [self._lanes.end(launched, [*outputs, *inputs])]

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool) -> Sequence[Work]:
        """Start to add up; as :class:`ovpatch.overlap.comm.collectives.ReduceScatter`.

        Sums are added in float32 (float64 in float64) in the order of ranks, and rounded once. Outputs may have another
        dtype than inputs.
        """
        dtype = inputs[0].dtype
        item, sizes = dtype.itemsize, tuple(output.numel() for output in outputs)
        sums, wholes = _addresses(outputs), _addresses(inputs, [item * size for size in sizes], self._world)
        slot = self._slot // (self._world - 1) // _GRAIN * _GRAIN
        scale = 1 / self._world if average else 1.0

        def lay_out(half: int, pieces: Sequence[Piece]) -> Batch:
            lengths, batch = [_length(p) * item for p in pieces], Batch([], [], [])
            for rank in self._others:
                place = self._addresses[rank] + half + self._slot_of(self._rank, rank) * slot
                batch.to.extend([place + p.at * item for p in pieces])
                batch.of.extend([wholes[p.tensor] + (rank * sizes[p.tensor] + p.begin) * item for p in pieces])
                batch.sizes.extend(lengths)
            return batch

        def take(half: int, pieces: Sequence[Piece], stream: int) -> None:
            base, memory = self._addresses[self._rank], self._own(dtype)
            slots: list[Span | None] = [None] * self._world
            for rank in self._others:
                place = half + self._slot_of(rank, self._rank) * slot
                slots[rank] = Span(memory, place // item, slot // item, base + place)
            addends = []
            for tensor, begin, end, at in pieces:
                first, out = self._rank * sizes[tensor] + begin, outputs[tensor]
                own = Span(inputs[tensor], first, end - begin, wholes[tensor] + first * item)
                to = Span(out, begin, end - begin, sums[tensor] + begin * out.itemsize)
                addends.append(Addend(own, to, at))
            add_up(slots, addends, scale, stream)

        with self._whole():
            launched = self._lanes.begin()
            self._run(rounds(sizes, slot // item, _GRAIN // item), lay_out, take)
            return [self._lanes.end(launched, [*outputs, *inputs])]

    @functools.cached_property
    def number(self) -> Tensor:
        """What the collective behind copies is called with; see :mod:`.attendance`."""
        return torch.zeros(1, dtype=torch.int32, device=self._device)

    def behind(self) -> AbstractContextManager[None]:
        """Run the block behind all that has been started."""
        return self._lanes.behind()

    def unheard(self) -> list[int]:
        """Return the ranks whose memory cannot be used, by trial; called once all ranks have engines."""
        return self._window.unheard()

    @staticmethod
    def adds(dtype: torch.dtype) -> bool:
        """Tell whether :meth:`scatter` takes a dtype."""
        return dtype in _SUMMED

    def drain(self, timeout_s: float) -> bool:
        """Have the host wait for all that is under way; return whether it has ended in time."""
        return self._lanes.drain(timeout_s)

    def failed_everywhere(self) -> None:
        """Note that if a call has failed, it has done so in the same round on all ranks."""
        self._within = False

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Refuse calls after one that was not issued as a whole; see [Note: all rounds]."""
        with self._lock, self._lanes.on_device():
            if self._within:
                raise RuntimeError(_INTERRUPTED)
            self._within = True
            yield
            self._within = False

    def _run(
        self,
        cut: Sequence[Sequence[Piece]],
        lay_out: Callable[[int, Sequence[Piece]], Batch],
        take: Callable[[int, Sequence[Piece], int], None],
    ) -> None:
        for pieces in cut:
            half, self._half = self._half * self._slot, 1 - self._half
            self._window.copy(lay_out(half, pieces), self._lanes.lay_out())
            stream = self._lanes.take()
            self._window.meet(stream)
            self._lanes.met()
            take(half, pieces, stream)

    def _slot_of(self, sender: int, owner: int) -> int:
        """Return which slot of its owner's a rank sends to."""
        return (sender - owner - 1) % self._world

    def _own(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's memory."""
        if dtype not in self._views:
            self._views[dtype] = self._window.ranks[self._rank].view(dtype)
        return self._views[dtype]


def _length(piece: Piece) -> int:
    return piece.end - piece.begin


def _addresses(tensors: Sequence[Tensor], sizes: Sequence[int] = (), times: int = 1) -> list[int]:
    """Return where tensors lie, whose elements lie one behind the other, so many times as many bytes as given."""
    fit = not sizes or all(tensor.nbytes == times * size for tensor, size in zip(tensors, sizes, strict=True))
    if not fit or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("ovpatch: copies between ranks take contiguous tensors whose sizes fit together")
    return [tensor.data_ptr() for tensor in tensors]


_INTERRUPTED: Final = (
    "ovpatch: copies between ranks were interrupted in the middle of a call, by Ctrl-C or by an error before this one, "
    "and what comes next would be taken for the rest of it. Restart all ranks; or set "
    "OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, if it happens again."
)

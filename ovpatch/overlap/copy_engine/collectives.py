"""All-gathers and reduce-scatters of one group on one device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.copy_engine.window import (
    SLOT_BYTES,
    Addend,
    AllocateWindow,
    Batch,
    CopyStreams,
    Piece,
    Span,
    Window,
    allocate_window,
    rounds,
)

# --- sums ---


def add_slots(slots: Sequence[Span | None], addends: Sequence[Addend], scale: float, stream: int) -> None:
    """Write scaled sums. Terms are added in float32 (float64 in float64) in the order of ranks, and rounded once.

    ``slots`` are the other ranks' terms by rank, of one dtype, None for this rank, whose terms are in ``addends`` with
    the outputs. ``stream`` is the handle of a CUDA stream, 0 without CUDA.
    """
    if addends[0].out.memory.is_cuda:
        from ovpatch.overlap.copy_engine import sum_kernel

        sum_kernel.launch_sum(slots, addends, scale, stream)
        return
    for own, out, at in addends:
        terms = [own.tensor() if slot is None else slot.tensor().narrow(0, at, own.numel) for slot in slots]
        total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32))
        for term in terms[1:]:
            total = total + term
        out.tensor().copy_(total * scale)


_GRAIN: Final = 128  # bytes; pieces begin at multiples
_SUM_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Engine:
    """Moves tensors between the ranks of a group, all on one host, without the group's backend or keeping it alive.

    ``allocate`` makes the memory; all ranks call it together. ``slot_bytes`` are the bytes that a rank stages in a
    round.

    [Note: two halves] The staging window is double-buffered: round i uses half i % 2. A rank overwrites a half only
    after the stream barrier of round i - 1, which every rank enters only after it has read round i - 2. A call is
    several rounds. If an exception ends it between two of them on one rank, its peers would take that rank's next
    rounds for the rest of the call. So later calls are refused.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        allocate: AllocateWindow = allocate_window,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._world, self._rank = group.size(), group.rank()
        self._others = [(self._rank + i) % self._world for i in range(1, self._world)]
        self._slot, self._device = slot_bytes, device
        self._window: Window = allocate(2 * slot_bytes, group, device)
        self._addresses = [memory.data_ptr() for memory in self._window.ranks]
        self._streams = CopyStreams(device)
        self._half = 0
        self._lock, self._within = threading.RLock(), False

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start an all-gather; as :class:`ovpatch.overlap.comm.collectives.AllGather`."""
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
            launched = self._streams.begin()
            if elsewhere:
                own = Batch(
                    [places[i] for i in elsewhere], [parts[i] for i in elsewhere], [sizes[i] for i in elsewhere]
                )
                self._window.copy(own, self._streams.take())
            self._run(rounds(sizes, self._slot, _GRAIN), lay_out, take)
            return [self._streams.end(launched, [*outputs, *inputs])]

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool) -> Sequence[Work]:
        """Start a reduce-scatter; as :class:`ovpatch.overlap.comm.collectives.ReduceScatter`.

        Terms are added in float32 (float64 in float64) in the order of ranks, and rounded once. Outputs may have
        another dtype than inputs.
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
            base, memory = self._addresses[self._rank], self._window.ranks[self._rank].view(dtype)
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
            add_slots(slots, addends, scale, stream)

        with self._whole():
            launched = self._streams.begin()
            self._run(rounds(sizes, slot // item, _GRAIN // item), lay_out, take)
            return [self._streams.end(launched, [*outputs, *inputs])]

    @functools.cached_property
    def number(self) -> Tensor:
        """The tensor of the collective behind copies; see :func:`.selection.attend`."""
        with outside_modes():
            return torch.zeros(1, dtype=torch.int32, device=self._device)

    def behind(self) -> AbstractContextManager[None]:
        """Run the block's work behind all copies that have been started."""
        return self._streams.behind()

    def unheard(self) -> list[int]:
        """Return the ranks whose memory fails a trial; called once all ranks have engines."""
        return self._window.unheard()

    @staticmethod
    def adds(dtype: torch.dtype) -> bool:
        """Return whether :meth:`scatter` takes a dtype."""
        return dtype in _SUM_DTYPES

    def drain(self, timeout_s: float) -> bool:
        """Make the host wait for all copies in flight; return whether they completed in time."""
        return self._streams.drain(timeout_s)

    def abort(self, timeout_s: float) -> bool:
        """End copies in flight without ranks that are missing; return whether they completed in time.

        Their outputs are undefined, and later calls are refused.
        """
        self._within = True
        with self._streams.on_device():
            return self._streams.drain(timeout_s, self._window.abort)

    def failed_everywhere(self) -> None:
        """Accept calls again after one that failed in the same round on all ranks."""
        self._within = False

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Refuse calls after one that was not issued completely; see [Note: two halves]."""
        with self._lock, self._streams.on_device():
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
            self._window.copy(lay_out(half, pieces), self._streams.lay_out())
            stream = self._streams.take()
            self._window.meet(stream)
            self._streams.met()
            take(half, pieces, stream)

    def _slot_of(self, sender: int, owner: int) -> int:
        """Return the index of the slot of ``owner`` that ``sender`` writes to."""
        return (sender - owner - 1) % self._world


def _length(piece: Piece) -> int:
    return piece.end - piece.begin


def _addresses(tensors: Sequence[Tensor], sizes: Sequence[int] = (), times: int = 1) -> list[int]:
    """Return the addresses of contiguous tensors; check that they have ``times`` the given sizes in bytes."""
    fit = not sizes or all(tensor.nbytes == times * size for tensor, size in zip(tensors, sizes, strict=True))
    if not fit or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            "ovpatch: copies between ranks got tensors that are not contiguous, or whose sizes do not fit together. "
            "Give contiguous tensors, with as many bytes as peers expect."
        )
    return [tensor.data_ptr() for tensor in tensors]


_INTERRUPTED: Final = (
    "ovpatch: copies between ranks were interrupted in the middle of a call, by Ctrl-C or by an error before this one, "
    "and what comes next would be taken for the rest of it. Restart all ranks; or set "
    "OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, if it happens again."
)

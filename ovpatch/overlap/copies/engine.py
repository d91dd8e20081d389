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

from ovpatch.overlap.copies.driver import Pair
from ovpatch.overlap.copies.lanes import Lanes, NoStreams, Streams
from ovpatch.overlap.copies.rounds import Piece, rounds
from ovpatch.overlap.copies.sums import add_up
from ovpatch.overlap.copies.window import SLOT_BYTES, Allocate, Window, allocate
from ovpatch.overlap.works import Work

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
        self._slot, self._device = slot_bytes, device
        self._window: Window = allocate(2 * slot_bytes, group, device)
        self._lanes: Lanes = Streams(device) if device.type == "cuda" else NoStreams()
        self._half = 0
        self._lock, self._within = threading.RLock(), False

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start to gather; as :class:`ovpatch.overlap.collectives.AllGather`."""
        wholes = [output.view(torch.uint8).view(self._world, -1).unbind() for output in outputs]
        parts = [part.view(torch.uint8).view(-1) for part in inputs]
        elsewhere = [i for i, part in enumerate(parts) if part.data_ptr() != wholes[i][self._rank].data_ptr()]
        others = [(self._rank + i) % self._world for i in range(1, self._world)]

        def lay_out(half: int, pieces: Sequence[Piece]) -> list[Pair]:
            return [(self._at(self._rank, half, piece), _cut(parts[piece.tensor], piece)) for piece in pieces]

        def take(half: int, pieces: Sequence[Piece]) -> None:
            self._window.copy(
                [(_cut(wholes[p.tensor][rank], p), self._at(rank, half, p)) for rank in others for p in pieces]
            )

        with self._whole():
            self._lanes.begin()
            with self._lanes.taking():
                if elsewhere:
                    self._window.copy([(wholes[i][self._rank], parts[i]) for i in elsewhere])
            self._run([len(part) for part in parts], self._slot, _GRAIN, lay_out, take)
            return [self._lanes.end([*outputs, *inputs])]

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool) -> Sequence[Work]:
        """Start to add up; as :class:`ovpatch.overlap.collectives.ReduceScatter`.

        Sums are added in float32 (float64 in float64) in the order of ranks, and rounded once.
        """
        dtype, outputs = outputs[0].dtype, [output.view(-1) for output in outputs]  # complex numbers come as pairs
        wholes = [given.view(self._world, -1).unbind() for given in inputs]
        others = [(self._rank + i) % self._world for i in range(1, self._world)]
        grain = _GRAIN // dtype.itemsize
        slot = self._slot // (self._world - 1) // _GRAIN * _GRAIN
        scale = 1 / self._world if average else 1.0

        def lay_out(half: int, pieces: Sequence[Piece]) -> list[Pair]:
            places = {rank: half + self._slot_of(self._rank, rank) * slot for rank in others}
            return [
                (self._typed(rank, places[rank], dtype, piece), _cut(wholes[piece.tensor][rank], piece))
                for rank in others
                for piece in pieces
            ]

        def take(half: int, pieces: Sequence[Piece]) -> None:
            places = {rank: half + self._slot_of(rank, self._rank) * slot for rank in others}
            for piece in pieces:
                given = {rank: self._typed(self._rank, place, dtype, piece) for rank, place in places.items()}
                given[self._rank] = _cut(wholes[piece.tensor][self._rank], piece)
                add_up(_cut(outputs[piece.tensor], piece), [given[rank] for rank in range(self._world)], scale)

        with self._whole():
            self._lanes.begin()
            self._run([len(output) for output in outputs], slot // dtype.itemsize, grain, lay_out, take)
            return [self._lanes.end([*outputs, *inputs])]

    @functools.cached_property
    def number(self) -> Tensor:
        """What the collective behind copies is called with; see :mod:`.attendance`."""
        return torch.zeros(1, dtype=torch.int32, device=self._device)

    def behind(self) -> AbstractContextManager[None]:
        """Run the block behind all that has been started."""
        return self._lanes.taking()

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
        with self._lock:
            if self._within:
                raise RuntimeError(_INTERRUPTED)
            self._within = True
            yield
            self._within = False

    def _run(
        self,
        sizes: Sequence[int],
        room: int,
        grain: int,
        lay_out: Callable[[int, Sequence[Piece]], list[Pair]],
        take: Callable[[int, Sequence[Piece]], None],
    ) -> None:
        for pieces in rounds(sizes, room, grain):
            half, self._half = self._half * self._slot, 1 - self._half
            with self._lanes.laying_out():
                self._window.copy(lay_out(half, pieces))
            with self._lanes.taking():
                self._window.meet()
                self._lanes.met()
                take(half, pieces)

    def _slot_of(self, sender: int, owner: int) -> int:
        """Return which slot of its owner's a rank sends to."""
        return (sender - owner - 1) % self._world

    def _at(self, rank: int, half: int, piece: Piece) -> Tensor:
        return self._window.ranks[rank].narrow(0, half + piece.at, piece.end - piece.begin)

    def _typed(self, rank: int, slot: int, dtype: torch.dtype, piece: Piece) -> Tensor:
        size, numel = dtype.itemsize, piece.end - piece.begin
        return self._window.ranks[rank].narrow(0, slot + piece.at * size, numel * size).view(dtype)


_INTERRUPTED: Final = (
    "ovpatch: copies between ranks were interrupted in the middle of a call, by Ctrl-C or by an error before this one, "
    "and what comes next would be taken for the rest of it. Restart all ranks; or set "
    "OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, if it happens again."
)


def _cut(part: Tensor, piece: Piece) -> Tensor:
    return part if piece.end - piece.begin == len(part) else part[piece.begin : piece.end]

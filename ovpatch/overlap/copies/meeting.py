"""Meetings of all ranks in stream order, without a kernel.

[Note: no kernel] A kernel that waits needs room on a multiprocessor, and finds none for a tenth of a millisecond while
products fill the GPU. So streams write numbers to each other's memory, and the driver has them wait for numbers that
come. Numbers only grow, and nobody resets what others read. From CUDA 13.1 on drivers do not support such writes to
another GPU's memory (https://github.com/NVIDIA/nccl/issues/2052). There a number is written at home and copied, which
took longer on two H200: a step of 210 ms without communication took 227 with writes, one of 212 took 237 with copies.

[Note: tried out] Hosts may offer access to other GPUs' memory through which nothing arrives, or something else, as with
some IOMMUs. A stream that waits for a number from there would wait for ever, so ranks try it out before they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ovpatch.overlap.copies.driver import Driver
from ovpatch.overlap.copies.spans import Batch

BYTES: Final = 4096  # of signals in a window; zeros at first
_APART: Final = 128  # bytes between the signals of two ranks
_NUMBER: Final = 4  # bytes
_MINE: Final = BYTES // _APART - 1  # the place of the number that others get
_TRIED: Final = 1


class Meeting:
    """Makes a stream wait until those of all ranks are here.

    Args:
        driver: Of the device.
        signals: All ranks' signals, :data:`BYTES` each, by group rank; at most ten.
        rank: This rank.
    """

    def __init__(self, driver: Driver, signals: Sequence[Tensor], rank: int) -> None:
        self._driver, self._number, self._rank, self._world = driver, 0, rank, len(signals)
        self._signals = signals
        others = [other for other in range(len(signals)) if other != rank]
        self._mine = self._place(rank, _MINE)
        self._told = [self._place(other, rank) for other in others]
        self._awaited = [self._place(rank, other) for other in others]

    def try_out(self, stream: int) -> None:
        """Send a number to everybody, and wait for what this rank sent to itself: no rank waits for another.

        Raises:
            RuntimeError: The driver refuses.
        """
        world, rank = self._world, self._rank
        self._tell([self._place(other, world + rank) for other in range(world)], _TRIED, stream)
        self._driver.write(self._mine, _TRIED, stream)  # for :meth:`unheard`
        self._driver.wait(self._place(rank, world + rank), _TRIED, stream)

    def unheard(self, stream: int) -> list[int]:
        """Return the ranks with which numbers cannot be exchanged. The host waits; all have tried out before.

        Args:
            stream: The current stream.
        """
        world, own = self._world, self._signals[self._rank].view(torch.int32).view(-1, _APART // _NUMBER)[:, 0]
        asked = [self._place(self._rank, 2 * world + other) for other in range(world)]
        theirs = [self._place(other, _MINE) for other in range(world)]
        self._driver.copy(Batch(asked, theirs, [_NUMBER] * world), stream)
        found = own[world : 3 * world].view(2, world).tolist()
        return [rank for rank in range(world) if any(numbers[rank] != _TRIED for numbers in found)]

    def __call__(self, stream: int) -> None:
        """Meet; see the class."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._tell(self._told, self._number, stream)
        for address in self._awaited:
            self._driver.wait(address, self._number, stream)

    def _place(self, rank: int, index: int) -> int:
        """Return the address of a number."""
        return self._signals[rank].data_ptr() + index * _APART

    def _tell(self, places: list[int], number: int, stream: int) -> None:
        """Bring a number to places in all ranks' memory."""
        if self._driver.writes_to_peers:
            for place in places:
                self._driver.write(place, number, stream)
        else:
            self._driver.write(self._mine, number, stream)
            self._driver.copy(Batch(places, [self._mine] * len(places), [_NUMBER] * len(places)), stream)

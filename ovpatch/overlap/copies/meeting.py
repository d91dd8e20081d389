"""Meetings of all ranks in stream order, without a kernel.

[Note: no kernel] A kernel that waits needs room on a multiprocessor, and finds none for a tenth of a millisecond while
products fill the GPU. So streams write numbers to each other's memory, and wait for them, by the driver. Numbers only
grow, and nobody resets what others read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ovpatch.overlap.copies.driver import Driver

BYTES: Final = 4096  # of signals in a window; zeros at first
_APART: Final = 128  # bytes between the signals of two ranks


class Meeting:
    """Makes the current stream wait until those of all ranks are here.

    Args:
        driver: Of the device.
        signals: Addresses of all ranks' signals, by group rank.
        rank: This rank.
    """

    def __init__(self, driver: Driver, signals: Sequence[int], rank: int) -> None:
        self._driver, self._number = driver, 0
        others = [other for other in range(len(signals)) if other != rank]
        self._theirs = [signals[other] + rank * _APART for other in others]
        self._ours = [signals[rank] + other * _APART for other in others]
        self._spare = [address + BYTES - _APART + rank * 4 for address in signals]
        self._own = self._spare[rank]

    def try_out(self) -> None:
        """Write to everybody, and wait for what this rank wrote to itself: no rank waits for another.

        Raises:
            RuntimeError: The driver refuses.
        """
        for address in self._spare:
            self._driver.write(address, 1)
        self._driver.wait(self._own, 1)

    def __call__(self) -> None:
        """Meet; see the class."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        for address in self._theirs:
            self._driver.write(address, self._number)
        for address in self._ours:
            self._driver.wait(address, self._number)

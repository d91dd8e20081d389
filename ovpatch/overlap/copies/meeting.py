"""Meetings of all ranks in stream order, without a kernel.

[Note: by the driver] A kernel that waits needs room on a multiprocessor, and finds none for a tenth of a millisecond
while products fill the GPU. The driver can have a stream write a number to memory, a peer's too, and wait for one.
Torch does not offer the latter, so the driver is called. Numbers only grow, so nobody resets what others read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import torch

BYTES: Final = 4096  # of signals in a window; zeros at first
_APART: Final = 128  # bytes between the signals of two ranks
_AT_LEAST: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ, which takes differences, so that numbers may wrap


class Meeting:
    """Makes the current stream of a device wait until those of all ranks are here.

    Args:
        signals: Addresses of all ranks' signals, by group rank.
        rank: This rank.
        device: The device.
    """

    def __init__(self, signals: Sequence[int], rank: int, device: torch.device) -> None:
        self._device, self._number = device, 0
        library = ctypes.CDLL("libcuda.so.1")
        self._write = _function(library, "cuStreamWriteValue32_v2")
        self._wait = _function(library, "cuStreamWaitValue32_v2")
        others = [other for other in range(len(signals)) if other != rank]
        self._theirs = [signals[other] + rank * _APART for other in others]
        self._ours = [signals[rank] + other * _APART for other in others]

        self._spare = [address + BYTES - _APART + rank * 4 for address in signals]
        self._own = self._spare[rank]

    def try_out(self) -> None:
        """Write to everybody, and wait for what this rank wrote to itself; no rank waits for another.

        Raises:
            RuntimeError: The driver refuses.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._spare:
            _check(self._write(stream, address, 1, 0))
        _check(self._wait(stream, self._own, 1, _AT_LEAST))
        torch.cuda.synchronize(self._device)

    def __call__(self) -> None:
        """Meet; see the class.

        Raises:
            RuntimeError: The driver refuses.
        """
        self._number = (self._number + 1) & 0xFFFFFFFF
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._theirs:
            _check(self._write(stream, address, self._number, 0))
        for address in self._ours:
            _check(self._wait(stream, address, self._number, _AT_LEAST))


def _function(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = library[name]
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused a stream's memory operation (CUresult {status})")

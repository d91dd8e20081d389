"""Copies to the host that no other thread's copy can hold up.

[Note: pinned] CUDA copies to pageable memory through buffers of its own, behind one lock per device. A thread that
copies so while its stream waits for a collective, as ``loss.tolist()`` does, keeps every other thread's copy waiting;
and the rank that is missing in that collective may be waiting for just such a copy. So what peers ask for goes through
pinned memory, on a stream that nothing else uses. Both are made before questions come, for making them may take that
lock too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from ovpatch.overlap.side_streams import quietly_on
from ovpatch.overlap.slices import flat

_BYTES: Final = 32 * 1024 * 1024


class Staging:
    """Pinned memory and a stream, for the copies of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._stream = torch.cuda.Stream(device)
        self._pinned = torch.empty(
            _BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
        )  # whatever the default device

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the block's work on the stream for copies, one thread at a time; whatever it needs has to be there."""
        with self._lock, quietly_on(self._stream):
            yield

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a dense tensor on the CPU, once it is complete."""
        copied = torch.empty_like(tensor, device="cpu")
        source, target = flat(tensor).view(torch.uint8), flat(copied).view(torch.uint8)
        with self.beside():
            for begin in range(0, len(source), _BYTES):
                piece = source[begin : begin + _BYTES]
                staged = self._pinned[: len(piece)]
                staged.copy_(piece, non_blocking=True)
                self._stream.synchronize()
                target[begin : begin + _BYTES].copy_(staged)
        return copied


def prepare(device: torch.device) -> Staging:
    """Return what copies from a device, made at the first call."""
    if device not in _stagings:
        _stagings[device] = Staging(device)
    return _stagings[device]


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a dense tensor on the CPU, from any thread; from CUDA only after :func:`prepare`."""
    return _stagings[tensor.device].to_host(tensor) if tensor.is_cuda else tensor.to("cpu", copy=True)


_stagings: dict[torch.device, Staging] = {}

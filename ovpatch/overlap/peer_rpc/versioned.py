"""Tensors that are changed in place, read by other threads without a torn edge.

Every change makes a new edition. Ranks make the same changes in the same order, so a number names the same edition on
all of them, and a peer can ask for the edition that it has itself.

[Note: optimistic reading] A reader copies first and looks afterwards whether a change had begun meanwhile; a lock
around the copy would hold back the training step. On CUDA the host runs ahead of the device: what counts there is not
whether the host has launched a change, but whether the device had come to it before the copy was done.

[Note: copy when it is there] A reader waits for the device on the host, and only then starts to copy. The device may
have to wait for a rank that cannot go on before another question is answered, whose copy must not be behind this one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, TypeVar

import torch
from torch import Tensor

from ovpatch.overlap.comm.side_streams import quietly_on
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.tensors.shard import flat_view

# Copies to the host that no other thread's copy can hold up.
#
# [Note: pinned] CUDA copies to pageable memory through buffers of its own, behind one lock per device. A thread that
# copies so while its stream waits for a collective, as ``loss.tolist()`` does, keeps every other thread's copy
# waiting; and the rank that is missing in that collective may be waiting for just such a copy. So what peers ask for
# goes through pinned memory, on a stream that nothing else uses. Both are made before questions come, for making them
# may take that lock too.

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
        source, target = flat_view(tensor).view(torch.uint8), flat_view(copied).view(torch.uint8)
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


_T = TypeVar("_T")

_PAUSE_S = 0.0005  # between two looks at the device

_KEPT = 64  # events of so many editions; a host that is further ahead of its device than that has other troubles


class TornReadError(RuntimeError):
    """The edition that was asked for is not, or no longer, there."""


class VersionedTensors:
    """The editions of some tensors on one device.

    Args:
        device: Where the tensors are.

    Attributes:
        device: Where the tensors are.
        number: The newest edition that is complete.
        asynchronous: Whether the host runs ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.number = 0
        self.asynchronous = device.type == "cuda"
        self._begun = 0
        self.device = device
        self._changed = threading.Condition()
        self._starts: dict[int, torch.cuda.Event] = {}  # of the change after an edition
        self._ends: dict[int, torch.cuda.Event] = {}
        self._staging: Staging | None = None  # made before the first edition, which peers may ask for

    def begin(self, number: int | None = None) -> None:
        """Say that a change begins with what the current stream does next.

        Args:
            number: Of the edition that it makes, above all before; the next one by default.
        """
        if self.asynchronous and self._staging is None:
            self._staging = prepare(self.device)
        with self._changed:
            self._record(self._starts, self._begun)
            self._begun = self._begun + 1 if number is None else number

    def end(self) -> None:
        """Say that the change is complete with what the current stream has been given so far."""
        with self._changed:
            self.number = self._begun
            self._record(self._ends, self.number)
            self._changed.notify_all()

    def wait_for(self, number: int, timeout_s: float) -> None:
        """Wait until the host has come to the end of edition ``number``; its device may be behind.

        Raises:
            TornReadError: The edition does not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.number >= number, timeout_s):
                raise TornReadError(f"edition {number} did not come within {timeout_s:g} s; {self.number} is there")

    def read(self, number: int, copy: Callable[[], _T], timeout_s: float, *, kept: bool = False) -> _T:
        """Return what ``copy`` returns, taken from edition ``number``; may be called from any thread.

        Args:
            number: The edition. One that is still to come is waited for.
            copy: Returns what is read, complete, on the CPU (:func:`to_host`); on CUDA it is
                called on a stream for such copies.
            timeout_s: How long to wait, in seconds.
            kept: Whether ``copy`` reads tensors of that edition that nobody changes any more.

        Raises:
            TornReadError: The edition does not come, or has been changed.
        """
        deadline = time.monotonic() + timeout_s
        self.wait_for(number, timeout_s)
        with self._changed:
            end = self._ends.get(number)
        while end is not None and not end.query():
            if time.monotonic() > deadline:
                raise TornReadError(f"the device did not come to edition {number} within {timeout_s:g} s")
            time.sleep(_PAUSE_S)
        with self._staging.beside() if self._staging is not None else nullcontext():
            copied = copy()
        if not kept and self._overwritten(number):
            raise TornReadError(f"edition {number} has been overwritten by edition {self._begun}")
        return copied

    def _overwritten(self, number: int) -> bool:
        with self._changed:
            if not self.asynchronous:
                return self._begun > number
            start = self._starts.get(number)
        return start.query() if start is not None else self._begun > number

    def _record(self, events: dict[int, torch.cuda.Event], number: int) -> None:
        if self.asynchronous and not is_capturing(self.device):  # nobody could query an event of a capture
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            events[number] = event
            if len(events) > _KEPT:
                events.pop(next(iter(events)))

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
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

from ovpatch.overlap import staging
from ovpatch.overlap.cuda_graphs import capturing

_T = TypeVar("_T")

_PAUSE_S = 0.0005  # between two looks at the device

_KEPT = 64  # events of so many editions; a host that is further ahead of its device than that has other troubles


class TornReadError(RuntimeError):
    """The edition that was asked for is not, or no longer, there."""


class Editions:
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
        self._staging: staging.Staging | None = None  # made before the first edition, which peers may ask for

    def begin(self, number: int | None = None) -> None:
        """Say that a change begins with what the current stream does next.

        Args:
            number: Of the edition that it makes, above all before; the next one by default.
        """
        if self.asynchronous and self._staging is None:
            self._staging = staging.prepare(self.device)
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
            copy: Returns what is read, complete, on the CPU (:func:`ovpatch.overlap.staging.to_host`); on CUDA it is
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
        if self.asynchronous and not capturing(self.device):  # nobody could query an event of a capture
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            events[number] = event
            if len(events) > _KEPT:
                events.pop(next(iter(events)))

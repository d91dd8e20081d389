"""Streams on which copies run beside what computes; without streams, where there are none."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

import torch
from torch import Tensor

from ovpatch.overlap.works import Pending, Work

_PAUSE_S: Final = 0.001


class Lanes(Protocol):
    """Two lanes: what a rank lays out, and what it takes once all have met."""

    def begin(self) -> None:
        """Start behind what the current stream has."""

    def laying_out(self) -> AbstractContextManager[None]:
        """Run the block behind the last meeting."""

    def taking(self) -> AbstractContextManager[None]:
        """Run the block behind what was laid out last."""

    def met(self) -> None:
        """Note that a meeting has been issued in the lane for taking."""

    def end(self, tensors: Sequence[Tensor]) -> Work:
        """Return what waits for all of it, and keeps tensors until then."""

    def drain(self, timeout_s: float) -> bool:
        """Have the host wait for both lanes; return whether they came to their ends in time."""


class Streams:
    """Lanes of a GPU.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of high priority: sums are to find room beside products.
        self._out, self._in = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
        self._met, self._laid = torch.cuda.Event(), torch.cuda.Event()

    def begin(self) -> None:
        """See :class:`Lanes`."""
        current = torch.cuda.current_stream(self._device)
        self._out.wait_stream(current)
        self._in.wait_stream(current)

    @contextmanager
    def laying_out(self) -> Iterator[None]:
        """See :class:`Lanes`."""
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._met)
            yield
            self._laid.record(self._out)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """See :class:`Lanes`."""
        with torch.cuda.stream(self._in):
            self._in.wait_event(self._laid)
            yield

    def met(self) -> None:
        """See :class:`Lanes`."""
        self._met.record(self._in)

    def end(self, tensors: Sequence[Tensor]) -> Work:
        """See :class:`Lanes`."""
        done = torch.cuda.Event()
        done.record(self._in)
        return _Copying(self._device, done, tensors)

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Lanes`."""
        if torch.cuda._is_in_bad_fork():  # what is under way is the parent's
            return True
        deadline = time.monotonic() + timeout_s
        while not (self._out.query() and self._in.query()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


class _Copying:
    """Copies until an event.

    If nobody ever waits, the stream that launched them does when this is let go of: the allocator gives memory that
    was a tensor's to whatever runs there next.
    """

    def __init__(self, device: torch.device, done: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self._device, self._done, self._tensors = device, done, tensors
        launched = torch.cuda.current_stream(device)
        self._launched = launched
        self._late = weakref.finalize(self, launched.wait_event, done)
        self._late.atexit = False

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._done)
        if current == self._launched:
            self._late.detach()
            self._tensors = ()


class NoStreams:
    """Lanes of a device without streams: all is done when it is called."""

    def begin(self) -> None:
        """See :class:`Lanes`."""

    def laying_out(self) -> AbstractContextManager[None]:
        """See :class:`Lanes`."""
        return nullcontext()

    def taking(self) -> AbstractContextManager[None]:
        """See :class:`Lanes`."""
        return nullcontext()

    def met(self) -> None:
        """See :class:`Lanes`."""

    def end(self, tensors: Sequence[Tensor]) -> Work:
        """See :class:`Lanes`."""
        del tensors
        return Pending(())

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Lanes`."""
        del timeout_s
        return True

"""Streams on which copies run beside what computes; without streams, where there are none."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ovpatch.overlap.side_streams import quietly_on
from ovpatch.overlap.works import Pending, Work

_PAUSE_S: Final = 0.001


class Lanes(Protocol):
    """Two lanes: what a rank lays out, and what it takes once all have met. Streams are named by their handles."""

    def begin(self) -> Any:
        """Start behind what the current stream has, and return that stream."""

    def lay_out(self) -> int:
        """Return the stream to lay something out in, behind the last meeting."""

    def take(self) -> int:
        """Return the stream to take something in, behind what was laid out last."""

    def met(self) -> None:
        """Note that a meeting has been issued in the lane for taking."""

    def end(self, launched: Any, tensors: Sequence[Tensor]) -> Work:
        """Return what waits for all of it, and keeps tensors until then; ``launched`` is what has launched it."""

    def behind(self) -> AbstractContextManager[None]:
        """Run the block behind all of it."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Run the block with the lanes' device as the current one, as the driver's functions want it."""

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
        self._begun, self._met, self._laid = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self._handles: Final = self._out.cuda_stream, self._in.cuda_stream

    def begin(self) -> Any:
        """See :class:`Lanes`."""
        launched = torch.cuda.current_stream(self._device)
        self._begun.record(launched)
        self._out.wait_event(self._begun)
        self._in.wait_event(self._begun)
        return launched

    def lay_out(self) -> int:
        """See :class:`Lanes`."""
        self._out.wait_event(self._met)
        return self._handles[0]

    def take(self) -> int:
        """See :class:`Lanes`."""
        self._laid.record(self._out)
        self._in.wait_event(self._laid)
        return self._handles[1]

    def met(self) -> None:
        """See :class:`Lanes`."""
        self._met.record(self._in)

    def end(self, launched: Any, tensors: Sequence[Tensor]) -> Work:
        """See :class:`Lanes`."""
        done = torch.cuda.Event()
        done.record(self._in)
        return _Copying(self._device, launched, done, tensors)

    def behind(self) -> AbstractContextManager[None]:
        """See :class:`Lanes`."""
        return quietly_on(self._in)

    def on_device(self) -> AbstractContextManager[Any]:
        """See :class:`Lanes`."""
        return torch.cuda.device(self._device)

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

    def __init__(
        self, device: torch.device, launched: torch.cuda.Stream, done: torch.cuda.Event, tensors: Sequence[Tensor]
    ) -> None:
        self._device, self._launched, self._done, self._tensors = device, launched, done, tensors
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

    def lay_out(self) -> int:
        """See :class:`Lanes`."""
        return 0

    def take(self) -> int:
        """See :class:`Lanes`."""
        return 0

    def met(self) -> None:
        """See :class:`Lanes`."""

    def end(self, launched: None, tensors: Sequence[Tensor]) -> Work:
        """See :class:`Lanes`."""
        del launched, tensors
        return Pending(())

    def behind(self) -> AbstractContextManager[None]:
        """See :class:`Lanes`."""
        return nullcontext()

    def on_device(self) -> AbstractContextManager[Any]:
        """See :class:`Lanes`."""
        return nullcontext()

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Lanes`."""
        del timeout_s
        return True

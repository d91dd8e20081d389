"""Tensors that are updated in place and read by other threads without torn reads; and their copies to the host.

Every update makes a new version. Ranks make the same updates in the same order, so a version names the same content on
all of them, and a peer can ask for the version that it has itself.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, TypeVar

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import reset_after_fork
from ovpatch.overlap.comm.streams import is_capturing, unwatched_stream

_BYTES: Final = 32 * 1024 * 1024


class PinnedStaging:
    """Pinned memory and a stream, for copies from one CUDA device that no other thread's copy can hold up.

    CUDA copies to pageable memory through buffers of its own, behind one lock per device. A thread that copies so while
    its stream waits for a collective, as ``loss.tolist()`` does, holds up every other thread's copy; and the rank that
    is missing in the collective may be waiting for one of those. Memory and stream are made before calls arrive, since
    making them may take that lock, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        # Torch has a pool of 32 streams for each priority, and the 33rd is the first again: at the usual priorities it
        # may be a communicator's, which waits for the rank that waits for this copy. No one else asks for this one.
        self._stream = torch.cuda.Stream(device, priority=-2)
        self._pinned = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the block's work on the stream for copies, one thread at a time. Its inputs have to be complete."""
        with self._lock, unwatched_stream(self._stream):
            yield

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a dense tensor on the CPU, once it is complete."""
        copied = torch.empty_like(tensor, device="cpu")
        source, target = (one.as_strided((one.numel(),), (1,)).view(torch.uint8) for one in (tensor, copied))
        with self.on_stream():
            for begin in range(0, len(source), _BYTES):
                piece = source[begin : begin + _BYTES]
                staged = self._pinned[: len(piece)]
                staged.copy_(piece, non_blocking=True)
                self._stream.synchronize()
                target[begin : begin + _BYTES].copy_(staged)
        return copied


get_staging: Final = functools.cache(PinnedStaging)  # of a CUDA device, made at the first call


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a dense tensor on the CPU, from any thread; from CUDA only after :data:`get_staging`."""
    return get_staging(tensor.device).copy_to_host(tensor) if tensor.is_cuda else tensor.to("cpu", copy=True)


_T = TypeVar("_T")

_PAUSE_S = 0.0005  # between two queries of the device
_MAX_EVENTS = 64  # a host that is further ahead of its device than that many versions loses the oldest


class TornReadError(RuntimeError):
    """The requested version is not there yet, or not any more."""


class SequenceLock:
    """The versions of some tensors on one device, by a sequence lock.

    [Note: sequence lock] A reader copies first and then checks that no update had begun meanwhile; a lock around the
    copy would hold back the training step. On CUDA the check asks the device, which runs behind the host: whether it
    had reached the update before the copy was done. A reader waits for its version on the host before it enqueues the
    copy: the device may have to wait for a rank that waits for another reply, whose copy must not queue behind.
    """

    def __init__(self, device: torch.device) -> None:
        self.version = 0  # the newest complete version
        self.is_asynchronous = device.type == "cuda"  # whether the host runs ahead of the device
        self.device = device  # where the tensors are
        self._begun = 0
        self._changed = threading.Condition()
        reset_after_fork(self, "_changed", threading.Condition)
        self._starts: dict[int, torch.cuda.Event] = {}  # of the update after a version
        self._ends: dict[int, torch.cuda.Event] = {}
        self._staging: PinnedStaging | None = None  # made before the first version, which peers may ask for

    def begin_update(self, version: int | None = None) -> None:
        """Mark that an update begins with the current stream's next work.

        It makes ``version``, which is higher than all before; by default the next one.
        """
        if self.is_asynchronous and self._staging is None:
            self._staging = get_staging(self.device)
        with self._changed:
            self._record_event(self._starts, self._begun)
            self._begun = self._begun + 1 if version is None else version

    def end_update(self) -> None:
        """Mark that the update is complete with the current stream's work so far."""
        with self._changed:
            self.version = self._begun
            self._record_event(self._ends, self.version)
            self._changed.notify_all()

    def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Wait until the host has completed ``version``, or raise TornReadError; its device may be behind."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.version >= version, timeout_s):
                raise TornReadError(f"version {version} did not come within {timeout_s:g} s; {self.version} is there")

    def read_version(self, version: int, copy: Callable[[], _T], timeout_s: float, *, is_retained: bool = False) -> _T:
        """Return what ``copy`` returns, read from ``version``; may be called from any thread.

        A future version is waited for. ``copy`` returns complete copies on the CPU (:func:`copy_to_host`); on CUDA it
        is called on a stream for such copies. With ``is_retained`` it reads tensors that are no longer updated
        TornReadError if the version is not complete in time, or has been overwritten.
        """
        deadline = time.monotonic() + timeout_s
        self.wait_for_version(version, timeout_s)
        with self._changed:
            end = self._ends.get(version)
        while end is not None and not end.query():
            if time.monotonic() > deadline:
                raise TornReadError(f"the device did not come to version {version} within {timeout_s:g} s")
            time.sleep(_PAUSE_S)
        with self._staging.on_stream() if self._staging is not None else nullcontext():
            copied = copy()
        if not is_retained and self._is_overwritten(version):
            raise TornReadError(f"version {version} has been overwritten by version {self._begun}")
        return copied

    def _is_overwritten(self, version: int) -> bool:
        with self._changed:
            if not self.is_asynchronous:
                return self._begun > version
            start = self._starts.get(version)
        return start.query() if start is not None else self._begun > version

    def _record_event(self, events: dict[int, torch.cuda.Event], version: int) -> None:
        if self.is_asynchronous and not is_capturing(self.device):  # an event of a capture cannot be queried
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            events[version] = event
            if len(events) > _MAX_EVENTS:
                events.pop(next(iter(events)))

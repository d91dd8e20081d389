"""Tensors that one thread updates in place while other threads read them, and copies to the host.

Each update makes a new version. All ranks make the same updates in the same order, so a version
number has the same content on all of them. A rank calls its peers for the version that it has.
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

from ovpatch.overlap.comm.lifetimes import outside_modes, reset_after_fork
from ovpatch.overlap.comm.streams import is_capturing, unwatched_stream

_STAGING_BYTES: Final = 32 * 1024 * 1024
# The priority of the stream for copies. Torch has a pool of 32 streams for each priority, and the
# 33rd is the first one again. At the usual priorities, the stream may therefore belong to a
# communicator, which waits for the rank that waits for the copy. No other code uses this priority.
_STREAM_PRIORITY: Final = -2


class PinnedStaging:
    """Pinned memory and a stream for copies from one CUDA device, which other copies cannot block.

    CUDA copies to pageable memory through its own buffers, under one lock per device. A thread
    whose stream waits for a collective holds the lock while it copies, as in ``loss.tolist()``. It
    blocks the copies of all other threads, and the rank that is missing in the collective may be
    waiting for one of them.

    Args:
        device: The CUDA device.
    """

    # Memory and stream are created before calls arrive, because that may take the lock as well.

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._stream = torch.cuda.Stream(device, priority=_STREAM_PRIORITY)
        with outside_modes():
            self._pinned = torch.empty(
                _STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run a block on the stream for copies, one thread at a time.

        The stream waits for no other stream, so the inputs of the block must be complete.
        """
        with self._lock, unwatched_stream(self._stream):
            yield

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Return a complete copy of a dense tensor on the CPU."""
        copied = torch.empty_like(tensor, device="cpu")
        # A dense tensor may have any order of dimensions, so its memory is copied, not its rows.
        source = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        target = copied.as_strided((copied.numel(),), (1,)).view(torch.uint8)
        with self.on_stream():
            for begin in range(0, len(source), _STAGING_BYTES):
                chunk = source[begin : begin + _STAGING_BYTES]
                staged = self._pinned[: len(chunk)]
                staged.copy_(chunk, non_blocking=True)
                self._stream.synchronize()
                target[begin : begin + _STAGING_BYTES].copy_(staged)
        return copied


#: Return the staging of a CUDA device, created by the first call.
get_staging: Final = functools.cache(PinnedStaging)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a dense tensor on the CPU, from any thread.

    For a CUDA tensor, :data:`get_staging` must have been called before.
    """
    if tensor.is_cuda:
        return get_staging(tensor.device).copy_to_host(tensor)
    return tensor.to("cpu", copy=True)


_T = TypeVar("_T")

# The pause between two queries of the device.
_QUERY_PAUSE_S: Final = 0.0005
# A host that is more versions ahead of its device loses the oldest ones.
_MAX_EVENTS: Final = 64


class TornReadError(RuntimeError):
    """The requested version was not made in time, or it was overwritten."""


class SequenceLock:
    """A sequence lock, which detects updates of some tensors on one device during a read.

    [Note: sequence lock] A reader copies the tensors first. Then it checks that no update had
    begun. A lock around the copy would hold up the training step. On CUDA the device runs after
    the host, so the check queries whether the device had reached the update before it finished the
    copy. The reader waits for its version on the host before it enqueues the copy. Otherwise the
    device might wait for a rank that waits for another reply, whose copy would follow in the queue.

    Args:
        device: The device of the tensors.

    Attributes:
        device: The device of the tensors.
        is_asynchronous: Whether the host runs ahead of the device.
        version: The newest version that the host has completed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_asynchronous = device.type == "cuda"
        self.version = 0
        # The version that the newest update makes; it differs from `version` during the update.
        self._begun_version = 0
        # Guards the versions and events. Readers wait here for the host.
        self._changed = threading.Condition()
        reset_after_fork(self, "_changed", threading.Condition)
        # The start of the update that overwrote a version, and the end of the update that made it.
        self._starts: dict[int, torch.cuda.Event] = {}
        self._ends: dict[int, torch.cuda.Event] = {}
        # Created before the first version, because peers read only after it.
        self._staging: PinnedStaging | None = None

    def begin_update(self, version: int | None = None) -> None:
        """Mark that an update begins with the next work of the current stream.

        Args:
            version: The number of the version that the update makes, higher than all before.
                Default: the next number.
        """
        if self.is_asynchronous and self._staging is None:
            self._staging = get_staging(self.device)
        with self._changed:
            if self.is_asynchronous:
                self._record_event(self._starts, self._begun_version)
            self._begun_version = self._begun_version + 1 if version is None else version

    def end_update(self) -> None:
        """Mark that the update is complete with the work so far of the current stream."""
        with self._changed:
            self.version = self._begun_version
            if self.is_asynchronous:
                self._record_event(self._ends, self.version)
            self._changed.notify_all()

    def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Wait until the host has completed ``version``, which its device may not have reached.

        Raises:
            TornReadError: The host has not completed the version after ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.version >= version, timeout_s):
                raise TornReadError(
                    f"version {version} was not made within {timeout_s:g} s. The newest version is "
                    f"{self.version}"
                )

    def read_version(
        self, version: int, copy: Callable[[], _T], timeout_s: float, *, is_retained: bool = False
    ) -> _T:
        """Return the result of ``copy``, read from ``version``, on any thread.

        Args:
            version: The version to read. The call waits for a future version.
            copy: Returns complete copies on the CPU, see :func:`copy_to_host`. On CUDA it runs on
                the stream for copies.
            timeout_s: The time to wait for the version.
            is_retained: Whether ``copy`` reads tensors of the version that are no longer updated.
                Default: False.

        Raises:
            TornReadError: The version was not complete in time, or it was overwritten.
        """
        deadline = time.monotonic() + timeout_s
        self.wait_for_version(version, timeout_s)
        with self._changed:
            end = self._ends.get(version)
        # The host must wait, not the stream: see the note.
        while end is not None and not end.query():
            if time.monotonic() > deadline:
                raise TornReadError(
                    f"the device did not reach version {version} within {timeout_s:g} s"
                )
            time.sleep(_QUERY_PAUSE_S)
        with self._staging.on_stream() if self._staging is not None else nullcontext():
            copied = copy()
        if not is_retained and self._is_overwritten(version):
            raise TornReadError(
                f"version {version} has been overwritten by version {self._begun_version}"
            )
        return copied

    def _is_overwritten(self, version: int) -> bool:
        with self._changed:
            if not self.is_asynchronous:
                return self._begun_version > version
            start = self._starts.get(version)
        # Without an event the update was captured, or is too old, or has not begun.
        return start.query() if start is not None else self._begun_version > version

    def _record_event(self, events: dict[int, torch.cuda.Event], version: int) -> None:
        # The host cannot query an event that was recorded in a capture.
        if not is_capturing(self.device):
            events[version] = torch.cuda.current_stream(self.device).record_event()
            if len(events) > _MAX_EVENTS:
                events.pop(next(iter(events)))

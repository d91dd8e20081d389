"""Work in a thread of its own, without the caller's modes; see [Note: a thread of its own]."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch

T = TypeVar("T")

INTERRUPTED_S: Final = 10.0  # for work to end that its caller does not wait for any more; others may be gone


def apart(work: Callable[[], T], device: torch.device) -> T:
    """Return what a function returns in a new thread, on the device's default stream; gradients are off there.

    The device is idle when it begins and when it is over, and no more of its memory is reserved than before.

    A caller who is interrupted waits some seconds more for the function to end; a second Ctrl-C ends that, too.

    Args:
        work: The function.
        device: The current one there, if it is a GPU.
    """
    reserved = _settled(device)
    task = _Task(work, device)
    thread = threading.Thread(target=task, name="ovpatch-measuring", daemon=True)
    try:
        thread.start()
        task.ended.wait()  # and not join(), after whose interruption Python 3.11 takes the thread for ended
    except BaseException:  # Ctrl-C, or a signal's handler: its collectives must not meet those of what comes next
        if thread.is_alive():
            task.ended.wait(INTERRUPTED_S)
        raise
    thread.join()
    if _settled(device) > reserved:
        torch.cuda.empty_cache()
    return task.result()


class _Task(Generic[T]):
    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        self._work, self._device = work, device
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.ended = threading.Event()

    def __call__(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.no_grad():
                self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001  # raised where the caller waits
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> T:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._results[0]


def _settled(device: torch.device) -> int:
    """Wait for a GPU; return how many bytes of its memory this process has reserved."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_reserved(device)

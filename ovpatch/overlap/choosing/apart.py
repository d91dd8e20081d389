"""Work in a thread of its own, without the caller's modes; see [Note: a thread of its own]."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


def apart(work: Callable[[], T], device: torch.device) -> T:
    """Return what a function returns in a new thread, on the device's default stream; gradients are off there.

    The device is idle when it begins and when it is over, and no more of its memory is reserved than before.

    Args:
        work: The function.
        device: The current one there, if it is a GPU.
    """
    reserved = _settled(device)
    task = _Task(work, device)
    thread = threading.Thread(target=task, name="ovpatch-measuring", daemon=True)
    thread.start()
    thread.join()
    if _settled(device) > reserved:
        torch.cuda.empty_cache()
    return task.result()


class _Task(Generic[T]):
    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        self._work, self._device = work, device
        self._results: list[T] = []
        self._error: BaseException | None = None

    def __call__(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.no_grad():
                self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001  # raised where the caller waits
            self._error = error

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

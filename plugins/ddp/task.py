"""Whether the backward that a step belongs to is still running.

[Note: dead callback] The engine runs its callbacks only if the backward succeeds, and drops them with the graph task
otherwise. A callback that has neither run nor died belongs to a backward that goes on: in another thread, or around a
forward that a checkpoint recomputes. Such a step must not be taken for one that an exception cut short.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable

# A device's thread may let go of the graph task a moment after the caller of backward() has the exception.
_PATIENCE_S = 0.2


class BackwardTask:
    """The graph task at whose end a step ends."""

    def __init__(self) -> None:
        self._callback: weakref.ref[_Callback] | None = None

    def queue(self, method: Callable[[], None]) -> None:
        """Have ``method`` called at the end of the running backward, once :meth:`running` is false."""
        callback = _Callback(self, method)
        Variable._execution_engine.queue_callback(callback)
        self._callback = weakref.ref(callback)

    def over(self) -> None:
        """The callback runs; nothing of the backward comes after it."""
        self._callback = None

    def running(self) -> bool:
        """Tell whether the backward goes on; see [Note: dead callback]."""
        inside = torch._C._current_graph_task_id() != -1
        deadline = time.monotonic() + (0 if inside else _PATIENCE_S)
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._alive()

    def _alive(self) -> bool:
        return self._callback is not None and self._callback() is not None


class _Callback:
    # Held by the engine alone: no frame that an exception's traceback may keep has it as a local variable.
    __slots__ = ("__weakref__", "_method", "_task")

    def __init__(self, task: BackwardTask, method: Callable[[], None]) -> None:
        self._task = task
        self._method = method

    def __call__(self) -> None:
        self._task.over()
        self._method()

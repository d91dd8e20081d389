"""Whether the backward that a step belongs to is still running.

[Note: dead callback] The engine runs its callbacks only if the backward succeeds, and drops them with the graph task
otherwise. A callback that has neither run nor died belongs to a backward that goes on: in another thread, or around a
forward that a checkpoint recomputes. Such a step must not be taken for one that an exception cut short.

[Note: interrupted backward] The engine's callback does not run when the backward raises. Peers may already wait for
buckets that this rank has not launched. The next synchronised forward on this rank therefore first completes the step's
collectives with zeros and casts a ballot, by which peers whose backward went well learn that their gradients lack a
part. If all ranks failed alike, all of them complete alike and training goes on.

[Note: several graph tasks] A reentrant checkpoint runs a backward inside the backward, with an end-of-backward callback
of its own. The step ends with the task that reached the forward's output, which is around all others. Where none did, a
callback that finds gradients missing leaves the step open for the hooks that follow, each of which makes sure that the
graph task it belongs to has a callback.
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
    """The graph task at whose end a step ends.

    Attributes:
        queued: Whether a callback was queued that has not run. It stays so if the backward dies.
    """

    def __init__(self) -> None:
        self.queued = False
        self._callback: weakref.ref[_Callback] | None = None

    def queue(self, ended: Callable[[], None], died: Callable[[], None]) -> None:
        """Have a method called at the end of the running backward, if that is not so already.

        Args:
            ended: Called if the backward succeeds; by then :meth:`running` and :attr:`queued` are false.
            died: Called when the engine lets go of a backward that an exception ended.
        """
        if self.queued and self.alive():
            return
        callback = _Callback(self, ended, died)
        Variable._execution_engine.queue_callback(callback)
        self._callback = weakref.ref(callback)
        self.queued = True

    def over(self) -> None:
        """The callback runs; nothing of the backward comes after it."""
        self._callback = None
        self.queued = False

    def running(self) -> bool:
        """Tell whether the backward goes on; see [Note: dead callback]."""
        inside = torch._C._current_graph_task_id() != -1
        deadline = time.monotonic() + (0 if inside else _PATIENCE_S)
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.alive()

    def alive(self) -> bool:
        """Tell whether the callback is still to come, as far as the engine has let go of dead backwards."""
        callback = self._callback  # once: another thread's backward may end in between
        return callback is not None and callback() is not None


class _Callback:
    # Held by the engine alone: no frame that an exception's traceback may keep has it as a local variable.
    __slots__ = ("__weakref__", "_died", "_ended", "_task")

    def __init__(self, task: BackwardTask, ended: Callable[[], None], died: Callable[[], None]) -> None:
        self._task: BackwardTask | None = task
        self._ended = ended
        self._died = died

    def __call__(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.over()
            self._ended()

    def __del__(self) -> None:
        if self._task is not None:
            self._died()

"""The base of gradient reducers: the life of one backward.

A backward's states are armed, reducing, reduced or failed.
"""

from __future__ import annotations

import abc
import enum
import threading
from collections.abc import Sequence

from torch import Tensor

from ovpatch.overlap.data_parallel.grad_sync import HOOK, GradSync
from ovpatch.overlap.data_parallel.graph_tasks import GraphTask

# --- the life of a backward ---


class ReducerState(enum.Enum):
    """Where a reducer stands."""

    IDLE = enum.auto()
    """The next backward is not reduced."""
    ARMED = enum.auto()
    """A forward has run, and its backward will be reduced."""
    REDUCING = enum.auto()
    """That backward is running, and its gradients are being reduced."""
    FAILED = enum.auto()
    """An exception ended that backward. :meth:`BackwardReducer.recover` completes its collectives."""


class BackwardReducer(abc.ABC):
    """Reduces the gradients of one backward after another.

    The methods stand in the order of a backward's life. Methods that the engine calls may run on its threads.

    [Note: interrupted backward] The engine's callback does not run when the backward raises. Peers may already wait for
    buckets that this rank has not started. So :meth:`recover`, called before the next forward that is reduced,
    completes the collectives with zeros; peers whose backward went well learn by a flag that their gradients lack a
    part. If all ranks failed alike, all of them complete alike and training goes on.

    [Note: several graph tasks] A reentrant checkpoint runs a backward inside the backward, with an end-of-backward
    callback of its own. The grad sync ends with the task that reached the forward's output, which encloses all others.
    Where no task did, a callback that finds gradients missing leaves the grad sync open for the hooks that follow, each
    of which makes sure that its graph task has a callback.

    Attributes:
        state: Where the reducer stands.
        quiet: Whether hooks are to tell of no gradient; see :class:`GradListener`.
    """

    _sync: GradSync

    def __init__(self) -> None:
        self.state, self.quiet = ReducerState.IDLE, False
        self._task = GraphTask()
        self._lock = threading.RLock()

    @property
    def armed(self) -> bool:
        """Whether the next backward, or the one that runs, is reduced."""
        return self.state is not ReducerState.IDLE

    # ---------------------------------------------------------------- after a forward

    def _arm(self, expected: Sequence[int] | None = None) -> None:
        """Reduce the backward that follows.

        Args:
            expected: As for :meth:`.grad_sync.GradSync.start_backward`.
        """
        self.state, self.quiet = ReducerState.ARMED, False
        self._sync.start_backward(expected)

    # ---------------------------------------------------------------- in a backward

    def _join_backward(self) -> bool:
        """Reduce the running backward, if the reducer is armed; return whether it is reduced."""
        if self.state is ReducerState.IDLE and not self._arm_late():
            return False
        if self.state is ReducerState.ARMED:
            self._task.queue_callback(self._backward_ended, self._backward_died)
            self.state = ReducerState.REDUCING
            self._on_backward_start()
        elif not self._task.queued and self.state is ReducerState.REDUCING:
            self._task.queue_callback(self._backward_ended, self._backward_died)
        return True

    def _arm_late(self) -> bool:
        """Arm the reducer for a backward that no forward has armed; return whether that was done."""
        return False

    def _on_backward_start(self) -> None:  # noqa: B027
        """Called when a backward begins that is reduced; no gradient is complete."""

    def on_grad_accumulated(self, index: int, node_grad: Tensor | None) -> None:
        """The gradient ``node_grad`` has been added to ``grad`` of parameter ``index``."""
        with self._lock:
            is_joined = self.state is ReducerState.REDUCING and self._task.queued
            if (is_joined or self._join_backward()) and self._sync.count_grad(index, adds=node_grad is not None):
                self._grad_complete(index, node_grad)

    def expect_contributions(self, index: int, count: int) -> None:
        """Parameter ``index`` gets ``count`` contributions that are marked; see :func:`.grad_sync.expect_gradients`."""
        with self._lock:
            self._join_backward()
            self._sync.expect_marks(index, count)

    def mark_contribution(self, index: int, key: str) -> None:
        """The contribution ``key`` has been added to ``grad`` of parameter ``index``."""
        assert key is not HOOK
        with self._lock:
            if self._sync.count_grad(index, key):
                self._grad_complete(index, None)

    @abc.abstractmethod
    def _grad_complete(self, index: int, node_grad: Tensor | None) -> None:
        """A gradient has all its contributions.

        Args:
            index: The parameter.
            node_grad: The gradient that the running AccumulateGrad node was given, if this is called from its hook.
        """

    # ---------------------------------------------------------------- at its end

    def _backward_ended(self) -> None:
        with self._lock:
            if self.state is ReducerState.REDUCING and self._is_complete():
                self._finish()

    def _is_complete(self) -> bool:
        """Return whether the graph task that has ended encloses all others; see [Note: several graph tasks]."""
        return True

    def _finish(self) -> None:
        self.state = ReducerState.FAILED  # until done: an exception from here on leaves a backward to recover
        self._reduce_rest()
        self._go_idle()

    @abc.abstractmethod
    def _reduce_rest(self) -> None:
        """Start all other collectives, wait for all of them and make each ``p.grad`` the reduced gradient."""

    def _go_idle(self) -> None:
        self._sync.end_backward()
        self._task.queued = False
        self.state = ReducerState.IDLE

    # ---------------------------------------------------------------- if it fails

    def _backward_died(self) -> None:
        with self._lock:
            if self.state is ReducerState.REDUCING:
                self.state = ReducerState.FAILED
                self._sync.detach_grads()

    def recover(self) -> None:
        """Complete the collectives of a backward that an exception cut short; see [Note: interrupted backward]."""
        if self.state is ReducerState.REDUCING:
            self.in_backward()  # waits until the engine has dropped a backward that is dead
        if self.state is not ReducerState.FAILED:
            return
        with self._lock:
            if self.state is ReducerState.FAILED:  # still: another thread may have recovered meanwhile
                self._sync.detach_grads()
                self._complete_failed()
                self._go_idle()

    @abc.abstractmethod
    def _complete_failed(self) -> None:
        """Start the collectives of a failed backward that are left, with zeros."""

    def in_backward(self) -> bool:
        """Return whether gradients are being reduced by a backward that will still end, here or in another thread."""
        return self.state is ReducerState.REDUCING and self._task.queued and self._task.is_running()

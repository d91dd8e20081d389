"""Graph tasks: the running backward of autograd, and gradients that we hand to autograd."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

#: Leaves, and a function that returns a gradient for each.
DeferredGrads: TypeAlias = "tuple[Sequence[Tensor], Callable[[], Sequence[Tensor | None]]]"


def will_execute(node: Any) -> bool:
    """Return whether the running backward will execute a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() returns this very gradient
        return True


def find_executed(nodes: Sequence[Node]) -> list[bool]:
    """Return for each AccumulateGrad node whether the running backward will execute it. Only valid inside a backward.

    Nodes inside reentrant checkpoints belong to a backward of their own and count as not executed.
    """
    return [torch._C._will_engine_execute_node(node) for node in nodes]


def will_accumulate(nodes: Iterable[Node]) -> bool:
    """Return whether the running backward adds to any parameter's ``grad``; ``torch.autograd.grad`` does not.

    Only valid inside a backward.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False  # torch refuses to answer for a parameter whose gradient is asked for


def is_compiled_autograd_on() -> bool:
    """Return whether this backward is compiled: its hooks are traced, and collectives among them are not."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and bool(compiled_autograd.in_compiled_autograd_region)


def accumulate_grads(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Give gradients to leaves, or to what is computed of them, through the engine, with all hooks.

    Not by ``torch.autograd.backward``: what watches that function would take the tensors for losses.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(tensors), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


class DeferredGradNode(torch.autograd.Function):
    """A node whose backward computes gradients of leaves."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *leaves: Tensor) -> Tensor:
        """Return an output without elements, and keep the function."""
        ctx.compute = compute
        return torch.empty(0, dtype=torch.float32, device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        """Return the gradients that the function computes."""
        compute, ctx.compute = ctx.compute, None
        return None, *compute()


def accumulate_deferred(due: list[DeferredGrads]) -> None:
    """Give leaves the gradients that functions return, as :func:`accumulate_grads` does, but not copies of them.

    Each function is called when the leaves before have their gradients. They share one call of the engine:
    each call hands over to one of its threads, which on a GPU takes the host longer than to launch a product.

    Args:
        due: Leaves on one device each, with their functions. The list is emptied, so that what a function keeps is
            freed when it was called.
    """
    roots = []
    with torch.enable_grad():
        while due:  # from the end, as the engine begins with the newest node
            leaves, compute = due.pop()
            roots.append(apply_function(DeferredGradNode, compute, *leaves))
            del compute
    if roots:
        accumulate_grads(roots, [root.detach() for root in roots])


def apply_function(function: Any, *args: Any) -> Any:
    """Apply a ``torch.autograd.Function``, whose own ``apply`` has no types.

    Args:
        function: The class.
        *args: The arguments of its ``forward`` after the context.
    """
    return function.apply(*args)


# A device's thread may let go of the graph task a moment after the caller of backward() has the exception.
_PATIENCE_S = 0.2


class GraphTask:
    """The graph task with which the grad sync ends.

    The engine runs its callbacks only if the backward succeeds, and drops them with the graph
    task otherwise. A callback that has neither run nor died belongs to a backward that goes on: in another thread, or
    around a forward that a checkpoint recomputes.

    Attributes:
        queued: Whether a callback was queued that has not run. It stays so if the backward dies.
        callback: That callback; the engine alone holds it.
    """

    def __init__(self) -> None:
        self.queued = False
        self.callback: weakref.ref[TaskCallback] | None = None

    def queue_callback(self, ended: Callable[[], None], died: Callable[[], None]) -> None:
        """Have a method called at the end of the running backward; a second call for it does nothing.

        Args:
            ended: Called if the backward succeeds; by then :meth:`is_running` and :attr:`queued` are false.
            died: Called when the engine drops a backward that an exception ended.
        """
        if self.queued and self.is_alive():
            return
        callback = TaskCallback(self, ended, died)
        Variable._execution_engine.queue_callback(callback)
        self.callback = weakref.ref(callback)
        self.queued = True

    def is_running(self) -> bool:
        """Return whether the backward goes on."""
        inside = torch._C._current_graph_task_id() != -1
        deadline = time.monotonic() + (0 if inside else _PATIENCE_S)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the callback is still to run, as far as the engine has dropped dead backwards."""
        callback = self.callback  # once: another thread's backward may end in between
        return callback is not None and callback() is not None


class TaskCallback:
    """The callback that reports the end of a graph task, or the death of a task that an exception ended."""

    # Held by the engine alone: no frame that an exception's traceback may keep has it as a local variable.
    __slots__ = ("__weakref__", "_died", "_ended", "_task")

    def __init__(self, task: GraphTask, ended: Callable[[], None], died: Callable[[], None]) -> None:
        self._task: GraphTask | None = task
        self._ended = ended
        self._died = died

    def __call__(self) -> None:
        """Report the end of the graph task."""
        task, self._task = self._task, None
        if task is not None:
            task.queued, task.callback = False, None
            self._ended()

    def __del__(self) -> None:
        if self._task is not None:
            self._died()

"""Graph tasks: the running backward of autograd, and gradients that we hand to autograd."""

from __future__ import annotations

import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

#: Leaves, and a function that returns a gradient for each.
DeferredGrads: TypeAlias = "tuple[Sequence[Tensor], Callable[[], Sequence[Tensor | None]]]"

# A thread of a device may drop the graph task a moment after the caller of `backward()` has the
# exception.
_DROP_TIMEOUT_S: Final = 0.2


def is_in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def find_local_param(dtensor: Any) -> Any:
    """Return the parameter of which ``DTensor.from_local()`` has made a DTensor; None if there is none."""
    node = dtensor.grad_fn
    if type(node).__name__ != "_FromTorchTensorBackward":
        return None
    # Only the node of a parameter, AccumulateGrad, has a variable.
    return getattr(node.next_functions[0][0], "variable", None)


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether autograd computes gradients of a tensor's dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def add_hook(param: Tensor, table: str, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Add a hook as torch's methods do, which refuse a parameter that is frozen or quantized now.

    The script may thaw it later.

    Args:
        param: The parameter.
        table: The hooks to which to add it: ``_backward_hooks`` for ``register_hook``, or
            ``_post_accumulate_grad_hooks``.
        hook: The hook.
    """
    if getattr(param, table) is None:
        setattr(param, table, OrderedDict())
    hooks = getattr(param, table)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def will_execute(node: Any) -> bool:
    """Return whether the running backward will execute a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # `torch.autograd.grad` returns this very gradient.
        return True


def find_executed(nodes: Sequence[Node]) -> list[bool]:
    """Return for each AccumulateGrad node whether the running backward will execute it.

    Only valid inside a backward. Nodes inside reentrant checkpoints belong to another backward and
    count as not executed.
    """
    return [torch._C._will_engine_execute_node(node) for node in nodes]


def will_accumulate(nodes: Iterable[Node]) -> bool:
    """Return whether the running backward adds to any parameter's ``grad``.

    ``torch.autograd.grad`` adds to none. Only valid inside a backward.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError as error:
        # torch raises for a parameter whose gradient `torch.autograd.grad` returns.
        if "autograd.grad()" not in str(error):
            raise
        return False


def is_compiled_autograd_on() -> bool:
    """Return whether this backward is compiled.

    A compiled backward traces its hooks, and cannot trace the collectives among them.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and bool(compiled_autograd.in_compiled_autograd_region)


def accumulate_grads(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Give gradients to leaves, or to tensors computed from leaves, through all hooks."""
    engine = torch.autograd.Variable._execution_engine
    # This bypasses `torch.autograd.backward`, because code that wraps that function would mistake
    # the tensors for losses.
    engine.run_backward(
        tuple(tensors),
        tuple(grads),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


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
    """Give leaves the gradients that functions return, without copies of these.

    Each function is called when the leaves before it have their gradients. All functions share one
    call of the engine, because each call hands over to one of the engine's threads. On a GPU that
    takes the host longer than the launch of a GEMM.

    Args:
        due: Leaves on one device each, with their functions. The list is emptied, so that the
            tensors of a function are freed after its call.
    """
    roots = []
    with torch.enable_grad():
        # The engine begins with the newest node, so the last function gets the oldest one.
        while due:
            leaves, compute = due.pop()
            roots.append(apply_function(DeferredGradNode, compute, *leaves))
            # The node alone holds the function from here on.
            del compute
    if roots:
        accumulate_grads(roots, [root.detach() for root in roots])


def apply_function(function: Any, *args: Any) -> Any:
    """Apply a ``torch.autograd.Function``, whose ``apply`` has no types.

    Args:
        function: The class.
        *args: The arguments of its ``forward`` after the context.
    """
    return function.apply(*args)


class GraphTask:
    """The graph task with whose end a backward is over.

    The engine runs its callbacks only if the backward succeeds; otherwise it drops them with the
    graph task. A callback that has neither run nor died belongs to a backward that is still
    running: on another thread, or around a forward that a checkpoint recomputes.

    Attributes:
        queued: Whether a callback was queued that has not run. It stays true if the backward dies.
        callback: That callback, which the engine alone holds.
    """

    def __init__(self) -> None:
        self.queued = False
        self.callback: weakref.ref[TaskCallback] | None = None

    def queue_callback(self, ended: Callable[[], None], died: Callable[[], None]) -> None:
        """Call a method at the end of the running backward; a second call for it does nothing.

        Args:
            ended: Called if the backward succeeds; by then :meth:`is_running` and :attr:`queued`
                are false.
            died: Called when the engine drops a backward that an exception ended.
        """
        if self.queued and self.is_alive():
            return
        callback = TaskCallback(self, ended, died)
        Variable._execution_engine.queue_callback(callback)
        self.callback = weakref.ref(callback)
        self.queued = True

    def is_running(self) -> bool:
        """Return whether the backward will continue."""
        # A caller inside of a backward would wait for itself.
        deadline = time.monotonic() + (0 if is_in_backward() else _DROP_TIMEOUT_S)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the callback must still run, or the engine has not yet dropped it."""
        # Read once, because another thread's backward may end between two reads.
        callback = self.callback
        return callback is not None and callback() is not None


class TaskCallback:
    """The callback that reports that a graph task ended, or that an exception ended it."""

    # The engine alone holds the callback. A frame that an exception's traceback keeps must not
    # have it as a local variable, or the callback would outlive a dead backward.
    __slots__ = ("__weakref__", "_died", "_ended", "_task")

    def __init__(
        self, task: GraphTask, ended: Callable[[], None], died: Callable[[], None]
    ) -> None:
        # None once the callback has run.
        self._task: GraphTask | None = task
        self._ended = ended
        self._died = died

    def __call__(self) -> None:
        """Report the end of the graph task."""
        task, self._task = self._task, None
        if task is not None:
            task.queued = False
            task.callback = None
            self._ended()

    def __del__(self) -> None:
        if self._task is not None:
            self._died()

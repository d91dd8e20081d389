"""The base of gradient reducers: hooks by which it hears of gradients, and the life of one backward.

The hooks are on the parameters' AccumulateGrad nodes. A backward's states are armed, reducing, reduced or failed.
"""

from __future__ import annotations

import abc
import enum
import functools
import itertools
import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules import module as nn_module
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.streams import hide_frames
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.fp32_accumulation import HALVES
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
from ovpatch.overlap.data_parallel.grad_sync import HOOK, GradSync

#: Leaves, and a function that returns a gradient for each.
Due: TypeAlias = "tuple[Sequence[Tensor], Callable[[], Sequence[Tensor | None]]]"


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


class _Products(torch.autograd.Function):
    """A node whose backward computes gradients of leaves."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *leaves: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.empty(0, dtype=torch.float32, device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        compute, ctx.compute = ctx.compute, None
        return None, *compute()


def accumulate_products(due: list[Due]) -> None:
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
            roots.append(apply_function(_Products, compute, *leaves))
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


_DTYPE = operator.attrgetter("dtype")


class GradListener(Protocol):
    """Receives accumulated gradients.

    Attributes:
        quiet: Whether hooks skip the call for now, as in the rest of a microbatch under ``no_sync`` after its first
            gradient.
    """

    quiet: bool

    def on_grad_accumulated(self, index: int, node_grad: Tensor | None) -> None:
        """The gradient ``node_grad`` has been added to ``grad`` of parameter ``index``."""


class GradHooks:
    """One hook per parameter, on its AccumulateGrad node.

    [Note: node hook] Stock DDP's reducer is a post-hook of the node. Hooks that users put on the parameter
    (``register_hook``, ``register_post_accumulate_grad_hook``) have all run before it, and what they wrote into the
    gradient is what gets reduced. The nodes are kept alive here: a parameter holds its node weakly, and a hook is lost
    with it. The nodes hold the listener weakly, because the garbage collector does not see cycles that pass through
    them.

    Args:
        params: The parameters.
        listener: Receives every accumulated gradient.
        sums_in_fp32: Add gradients of half precision up in fp32, see :mod:`.fp32_accumulation`.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], listener: GradListener, *, sums_in_fp32: bool = False
    ) -> None:
        _hide_hooks()
        self._params = params
        self._kinds = self._current_kinds()
        self.nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        self._before: list[RemovableHandle] = []
        reference = weakref.ref(listener)
        for index, param in enumerate(params):
            node = _accumulate_node(param)
            self.nodes.append(node)
            if sums_in_fp32 and param.dtype in HALVES:
                before, after = fp32_accumulation.make_sum_hooks(param)
                self._handles += [node.register_prehook(before), node.register_hook(after)]
            self._handles.append(node.register_hook(_hook(reference, index)))
        # A node may outlive the listener; the hooks of the next one would take these for foreign ones.
        weakref.finalize(listener, _remove, self._handles, self._before).atexit = False
        self._tables = self._own_tables()

    def are_lost(self) -> bool:
        """Return whether a parameter was cast or moved, which gives it a new node without our hook."""
        return self._current_kinds() != self._kinds

    def _current_kinds(self) -> tuple[list[torch.dtype], list[int]]:
        # Called before every forward; map() is faster than a comprehension.
        with torch._C.DisableTorchFunctionSubclass():  # a pending parameter is one
            return list(map(_DTYPE, self._params)), list(map(Tensor.get_device, self._params))

    def set_prehooks(self, indices: Iterable[int], sharder: GradSharder) -> None:
        """Have a sharder called before the engine adds to the gradients of some parameters, and of no others.

        Args:
            indices: The parameters.
            sharder: Its ``before_accumulate`` is called while it may have left lazy gradients. Held weakly.
        """
        _remove(self._before)
        reference = weakref.ref(sharder)
        self._before += [self.nodes[index].register_prehook(_prehook(reference, index)) for index in indices]
        self._tables = self._own_tables()

    def has_foreign(self) -> bool:
        """Return whether the nodes have hooks besides ours."""
        return sum(map(len, self._tables)) > len(self._handles) + len(self._before)

    def _own_tables(self) -> list[Any]:
        """Return the nodes' hook tables, which have our hooks."""
        tables = (handle.hooks_dict_ref() for handle in (*self._handles, *self._before))
        return list({id(table): table for table in tables}.values())

    def remove(self) -> None:
        """Remove the hooks."""
        if fp32_accumulation.sums:
            fp32_accumulation.drop_sums(param.grad for param in self._params)
        _remove(self._handles, self._before)
        self.nodes.clear()
        self._tables.clear()


def _remove(*handles: list[RemovableHandle]) -> None:
    for ones in handles:
        for handle in ones:
            handle.remove()
        ones.clear()


def _accumulate_node(param: torch.nn.Parameter) -> Node:
    wanted = param.requires_grad
    # A subclass of Tensor would put nodes of its own between the alias and the parameter.
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad(), torch.inference_mode(False):
        # A parameter frozen since the wrap has a node, too, and gets gradients again once it is thawed.
        alias = param.requires_grad_().view_as(param)
        param.requires_grad_(wanted)
        assert alias.grad_fn is not None
        node: Any = alias.grad_fn.next_functions[0][0]
        assert node.variable is param
    return cast(Node, node)


def _hook(reference: weakref.ref[GradListener], index: int) -> Any:
    def fire(_nothing: Any, node_grads: tuple[Tensor | None]) -> None:
        listener = reference()
        if listener is not None and not listener.quiet:
            listener.on_grad_accumulated(index, node_grads[0])

    return fire


def _prehook(reference: weakref.ref[GradSharder], index: int) -> Any:
    def fire(_node_grads: tuple[Tensor | None]) -> None:
        sharder = reference()
        if sharder is not None and sharder.has_lazy_grads:
            sharder.before_accumulate(index)

    return fire


@functools.cache
def _hide_hooks() -> None:
    """Hide what the engine calls from Dynamo; Dynamo is imported for that."""
    hide_frames(_hook, _prehook, watch_outputs, fp32_accumulation.make_sum_hooks)
    hide_frames(_Callback.__call__, _Callback.__del__, _Products.backward)


def watch_outputs(output: Any, reached: Callable[[], None]) -> None:
    """Have a bound method, held weakly, called when a backward reaches one of the tensors in ``output``.

    The hooks are on the nodes. The tensors stay unchanged, so they can be pickled.
    """
    method = weakref.WeakMethod(reached)

    def fire(_gradients: Any) -> None:
        target = method()
        if target is not None:
            target()

    nodes = {id(tensor.grad_fn): tensor.grad_fn for tensor in _find_tensors(output)}
    for node in nodes.values():
        if node is not None:
            node.register_prehook(fire)


# --- the script's hooks ---


_TENSOR_HOOKS = operator.attrgetter("_backward_hooks")
_ACCUMULATION_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_MODULES = operator.attrgetter("_modules")
# A scripted module has a table of children that is no dictionary.
_VALUES = operator.methodcaller("values")


class ForeignHooks:
    """Hooks of the script on one model.

    [Note: foreign hooks] What hooks of the script or a second wrapper around the same parameters do to ``p.grad`` while
    backward runs must not reach a reduction. So with any of them, each gradient is copied in its own hook, as under
    stock. The hook that torch puts on parameters below DTensors, for ``device_mesh=``, is not foreign: it only waits
    for a gradient. Hooks on the parameters' AccumulateGrad nodes are found by ``GradHooks.has_foreign``.

    Modules come and go. Each backward compares the model's modules with those of the last walk. torch's global hook on
    registrations would save that, but Dynamo guards on it and on all that it reads: models that make modules in their
    forward, as those of Transformers do, would be compiled again in every step.

    Args:
        params: The model's parameters.

    Attributes:
        shared: Whether another reducer reads gradients of these parameters.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.shared = False
        self._params = params
        self._model: weakref.ref[torch.nn.Module] | None = None
        # What the last walk found: modules with children, all children in their order, tables of children of the other
        # modules, which must stay empty, and tables of backward hooks.
        self._parents: list[torch.nn.Module] = []
        self._children: list[torch.nn.Module | None] = []
        self._leaves: list[Any] = []
        self._tables = _global_tables()

    def watch(self, model: torch.nn.Module) -> None:
        """Include the backward hooks of ``model`` and of all modules in it, now or later."""
        self._model = weakref.ref(model)

    def has_any(self) -> bool:
        """Return whether there are any hooks now. Called once per backward."""
        model = self._model() if self._model is not None else None
        if model is not None and (any(self._leaves) or self._list_children(model) != self._children):
            self._walk(model)
        if self.shared or any(self._tables):
            return True
        with torch._C.DisableTorchFunctionSubclass():  # as a pending parameter is
            hooked = [hooks for hooks in map(_TENSOR_HOOKS, self._params) if hooks]
            return any(map(_ACCUMULATION_HOOKS, self._params)) or not all(map(_only_wait, hooked))

    def _list_children(self, model: torch.nn.Module) -> list[torch.nn.Module | None]:
        # Half a millisecond is what a walk takes in a model of 400 modules; map() compares them in 20 microseconds.
        return [*itertools.chain.from_iterable(map(_VALUES, map(_MODULES, (model, *self._parents))))]

    def _walk(self, model: torch.nn.Module) -> None:
        """Remember the model's modules and their tables of backward hooks."""
        # The wrapper owns the reducer. A reference to it would keep both alive until the next garbage collection.
        inner = [module for module in model.modules() if module is not model]
        self._parents = [module for module in inner if module._modules]
        self._leaves = [module._modules for module in inner if not module._modules]
        self._children = self._list_children(model)
        own = [table for module in (model, *inner) for table in (module._backward_hooks, module._backward_pre_hooks)]
        self._tables = [*_global_tables(), *own]


def _only_wait(hooks: Mapping[int, Any]) -> bool:
    utilities = sys.modules.get("torch.distributed.tensor.parallel._data_parallel_utils")
    waits = getattr(utilities, "sync_grad_hook", None)
    return waits is not None and all(getattr(hook, "func", None) is waits for hook in hooks.values())


def _global_tables() -> list[Any]:
    return [nn_module._global_backward_hooks, nn_module._global_backward_pre_hooks]


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
        self._task = BackwardTask()
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


# A device's thread may let go of the graph task a moment after the caller of backward() has the exception.
_PATIENCE_S = 0.2


class BackwardTask:
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
        self.callback: weakref.ref[_Callback] | None = None

    def queue_callback(self, ended: Callable[[], None], died: Callable[[], None]) -> None:
        """Have a method called at the end of the running backward; a second call for it does nothing.

        Args:
            ended: Called if the backward succeeds; by then :meth:`is_running` and :attr:`queued` are false.
            died: Called when the engine drops a backward that an exception ended.
        """
        if self.queued and self.is_alive():
            return
        callback = _Callback(self, ended, died)
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
            task.queued, task.callback = False, None
            self._ended()

    def __del__(self) -> None:
        if self._task is not None:
            self._died()

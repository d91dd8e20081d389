"""The autograd hooks that report gradients to a reducer, and the search for the script's hooks."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.modules import module as nn_module
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.streams import hide_frames
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.fp32_accumulation import HALVES
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
from ovpatch.overlap.data_parallel.graph_tasks import DeferredGradNode, TaskCallback

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
    hide_frames(TaskCallback.__call__, TaskCallback.__del__, DeferredGradNode.backward)


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

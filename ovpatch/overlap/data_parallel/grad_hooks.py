"""The autograd hooks that report gradients to a reducer, and the search for the script's hooks."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module, Parameter
from torch.nn.modules import module as nn_module
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.autograd import DeferredGradNode, TaskCallback, is_differentiable
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import hide_frames
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.fp32_accumulation import LOW_PRECISION_DTYPES
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder

if TYPE_CHECKING:
    from ovpatch.overlap.data_parallel.grad_reducer import GradReducer

_DTYPE = operator.attrgetter("dtype")
_MODULES = operator.attrgetter("_modules")
# By a call, since the table of children of a scripted module is no dictionary.
_VALUES = operator.methodcaller("values")
_TENSOR_HOOKS = operator.attrgetter("_backward_hooks")
_ACCUMULATION_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class GradHooks:
    """One hook per parameter, on its AccumulateGrad node, and the search for hooks of the script.

    [Note: node hook] The stock reducer is a post-hook of the node. Hooks that users put on the
    parameter (``register_hook``, ``register_post_accumulate_grad_hook``) have all run before it,
    and the reducer reduces what they wrote into the gradient. The nodes are kept alive here,
    because a parameter holds its node weakly, and a hook is lost with its node. The nodes hold the
    reducer weakly, because the garbage collector does not see cycles that pass through them.

    [Note: foreign hooks] Hooks of the script, or a second wrapper around the same parameters, may
    read and change ``p.grad`` while backward runs. That must not reach a reduction. So with any of
    them, each gradient is copied in its own hook, as in stock PyTorch. The hook that torch puts on
    parameters below DTensors, for ``device_mesh=``, does not count, because it only waits for a
    gradient. Modules come and go: each backward compares the model's modules with those of the last
    walk. torch's global hook on registrations would save that, but Dynamo guards on it and on all
    that it reads. Models that create modules in their forward, such as those of Transformers, would
    be compiled again in every step.

    Args:
        params: The parameters.
        reducer: The reducer that receives every accumulated gradient.
        sums_in_fp32: Whether low-precision gradients are added up in fp32, see
            :mod:`.fp32_accumulation`.

    Attributes:
        nodes: The AccumulateGrad nodes of the parameters.
        attachments: How often hooks were attached.
        reentrant: Parameters whose gradients a backward inside the backward has computed. No search
            of the outer graph task finds them.
        is_shared: Whether another reducer reads gradients of these parameters.
    """

    def __init__(
        self, params: Sequence[Parameter], reducer: GradReducer, *, sums_in_fp32: bool = False
    ) -> None:
        _hide_hooks()
        self.nodes: list[Node] = []
        self.attachments = 0
        self.reentrant: set[int] = set()
        self.is_shared = False
        self._params = params
        self._reducer = weakref.ref(reducer)
        self._sums_in_fp32 = sums_in_fp32
        # Dtypes and devices of the parameters for which hooks were attached.
        self._kinds: tuple[list[torch.dtype], list[int]] = ([], [])
        # - Our hooks
        self._handles: list[RemovableHandle] = []
        self._prehook_handles: list[RemovableHandle] = []
        # The nodes' tables of hooks, which hold ours and perhaps others.
        self._node_tables: list[Any] = []
        # - The script's hooks on modules, as the last walk over the model found them
        self._model: weakref.ref[Module] | None = None
        # Modules with children, and all children in order.
        self._parents: list[Module] = []
        self._children: list[Module | None] = []
        # The tables of children of the other modules, which must stay empty.
        self._leaf_tables: list[Any] = []
        # The tables of backward hooks, global ones included.
        self._module_tables = _list_global_tables()
        # A node may outlive the reducer. The next reducer of these parameters would take hooks that
        # remain for hooks of the script.
        weakref.finalize(reducer, _remove, self._handles, self._prehook_handles).atexit = False
        self.attach()

    # ---------------------------------------------------------------- our hooks

    def attach(self) -> None:
        """Put the hooks on the parameters' present nodes, and remove earlier ones."""
        self.remove()
        self.reentrant.clear()
        self.attachments += 1
        self._kinds = self._list_kinds()
        self.nodes += _find_accumulate_nodes(self._params)
        for index, (param, node) in enumerate(zip(self._params, self.nodes, strict=True)):
            if self._sums_in_fp32 and param.dtype in LOW_PRECISION_DTYPES:
                before, after = fp32_accumulation.make_sum_hooks(param)
                self._handles.append(node.register_prehook(before))
                self._handles.append(node.register_hook(after))
            self._handles.append(node.register_hook(_make_hook(self._reducer, index)))
        self._node_tables = self._list_node_tables()

    def have_moved(self) -> bool:
        """Return whether a parameter was cast or moved, which gives it a node without our hook."""
        return self._list_kinds() != self._kinds

    def _list_kinds(self) -> tuple[list[torch.dtype], list[int]]:
        # Each forward calls this; map() is faster than a comprehension. The class of a pending
        # parameter would reply to each read in Python.
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_DTYPE, self._params)), list(map(Tensor.get_device, self._params))

    def set_prehooks(self, indices: Iterable[int], sharder: GradSharder) -> None:
        """Call a sharder before the engine adds to the gradients of some parameters, and no others.

        Args:
            indices: The parameters.
            sharder: Its ``before_accumulate`` is called while it may have lazy gradients. Held
                weakly.
        """
        _remove(self._prehook_handles)
        reference = weakref.ref(sharder)
        for index in indices:
            prehook = _make_prehook(reference, index)
            self._prehook_handles.append(self.nodes[index].register_prehook(prehook))
        self._node_tables = self._list_node_tables()

    def _list_node_tables(self) -> list[Any]:
        handles = (*self._handles, *self._prehook_handles)
        tables = (handle.hooks_dict_ref() for handle in handles)
        return list({id(table): table for table in tables}.values())

    def remove(self) -> None:
        """Remove the hooks."""
        if fp32_accumulation.sums:
            fp32_accumulation.drop_sums(param.grad for param in self._params)
        _remove(self._handles, self._prehook_handles)
        self.nodes.clear()
        self._node_tables.clear()

    # ---------------------------------------------------------------- hooks of the script

    def watch_modules(self, model: Module) -> None:
        """Include the backward hooks of all modules in ``model``, now or later."""
        self._model = weakref.ref(model)

    def find_user_hooks(self) -> bool:
        """Return whether hooks of the script may read or change gradients."""
        model = self._model() if self._model is not None else None
        if model is not None and (
            any(self._leaf_tables) or self._list_children(model) != self._children
        ):
            self._walk(model)
        if self.is_shared or any(self._module_tables):
            return True
        if sum(map(len, self._node_tables)) > len(self._handles) + len(self._prehook_handles):
            return True
        # The class of a pending parameter would reply to each read in Python.
        with torch._C.DisableTorchFunctionSubclass():
            hooked = [hooks for hooks in map(_TENSOR_HOOKS, self._params) if hooks]
            return any(map(_ACCUMULATION_HOOKS, self._params)) or not all(map(_only_wait, hooked))

    def _list_children(self, model: Module) -> list[Module | None]:
        # A walk over a model of 400 modules takes half a millisecond; this takes 20 microseconds.
        tables = map(_MODULES, (model, *self._parents))
        return [*itertools.chain.from_iterable(map(_VALUES, tables))]

    def _walk(self, model: Module) -> None:
        """Remember the model's modules and their tables of backward hooks."""
        # The wrapper owns the reducer. A reference to the wrapper would keep both alive until the
        # next garbage collection.
        inner = [module for module in model.modules() if module is not model]
        self._parents = [module for module in inner if module._modules]
        self._leaf_tables = [module._modules for module in inner if not module._modules]
        self._children = self._list_children(model)
        self._module_tables = _list_global_tables()
        for module in (model, *inner):
            self._module_tables += [module._backward_hooks, module._backward_pre_hooks]


def _only_wait(hooks: Mapping[int, Any]) -> bool:
    utilities = sys.modules.get("torch.distributed.tensor.parallel._data_parallel_utils")
    waits = getattr(utilities, "sync_grad_hook", None)
    if waits is None:
        return False
    return all(getattr(hook, "func", None) is waits for hook in hooks.values())


def _list_global_tables() -> list[Any]:
    return [nn_module._global_backward_hooks, nn_module._global_backward_pre_hooks]


def _remove(*lists: list[RemovableHandle]) -> None:
    for handles in lists:
        for handle in handles:
            handle.remove()
        handles.clear()


@contextmanager
def all_trained(params: Iterable[Parameter]) -> Iterator[None]:
    """Let autograd train all parameters, the ones that the script has frozen since the wrap included.

    The script may also have quantized a frozen parameter, or written it in inference mode. Autograd
    refuses these, so they have other data in the context. It has their shape, which a node
    remembers, and if possible their dtype, since another dtype gives a parameter another node.
    """
    with outside_modes():
        frozen = [param for param in params if not param.requires_grad]
        datas = [(param, param.data) for param in frozen if _is_refused(param)]
    try:
        with outside_modes():
            for param, data in datas:
                dtype = data.dtype if is_differentiable(data) else torch.float32
                param.data = torch.empty_like(data, dtype=dtype)
            for param in frozen:
                # torch.func refuses requires_grad_().
                param.requires_grad = True
        yield
    finally:
        # The script's data must return after an interrupt, too.
        try:
            for param in frozen:
                param.requires_grad = False
        finally:
            with outside_modes():
                for param, data in datas:
                    param.data = data


def _is_refused(param: Parameter) -> bool:
    return param.is_inference() or not is_differentiable(param)


def _find_accumulate_nodes(params: Sequence[Parameter]) -> list[Node]:
    nodes = []
    # A subclass of Tensor would put its own nodes between the alias and the parameter.
    with outside_modes(), torch.enable_grad():
        for param in params:
            # A frozen parameter gets gradients again once it is thawed. Only one at a time
            # has other data, because that takes memory.
            with nullcontext() if param.requires_grad else all_trained((param,)):
                nodes.append(cast(Any, param.view_as(param).grad_fn).next_functions[0][0])
    assert all(node.variable is param for node, param in zip(nodes, params, strict=True))
    return nodes


def _make_hook(reference: weakref.ref[GradReducer], index: int) -> Any:
    def fire(_nothing: Any, node_grads: tuple[Tensor | None]) -> None:
        reducer = reference()
        if reducer is not None and not reducer.is_muted:
            reducer.on_grad_accumulated(index, node_grads[0])

    return fire


def _make_prehook(reference: weakref.ref[GradSharder], index: int) -> Any:
    def fire(_node_grads: tuple[Tensor | None]) -> None:
        sharder = reference()
        if sharder is not None and sharder.has_lazy_grads:
            sharder.before_accumulate(index)

    return fire


@functools.cache
def _hide_hooks() -> None:
    """Hide from Dynamo the functions that the engine calls; this imports Dynamo."""
    hide_frames(_make_hook, _make_prehook, watch_outputs, fp32_accumulation.make_sum_hooks)
    hide_frames(TaskCallback.__call__, TaskCallback.__del__, DeferredGradNode.backward)


def watch_outputs(output: Any, reducer: GradReducer) -> None:
    """Call ``reducer.on_output_reached()`` when a backward reaches a tensor in ``output``.

    The hooks are on the nodes, so the tensors stay unchanged and can be pickled. They hold the
    reducer weakly.
    """
    reference = weakref.ref(reducer)

    def fire(_gradients: Any) -> None:
        reached = reference()
        if reached is not None:
            reached.on_output_reached()

    nodes = {id(tensor.grad_fn): tensor.grad_fn for tensor in _find_tensors(output)}
    for node in nodes.values():
        if node is not None:
            node.register_prehook(fire)

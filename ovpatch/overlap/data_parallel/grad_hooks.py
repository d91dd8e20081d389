"""Hooks on the AccumulateGrad nodes of parameters, and questions to the autograd engine."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.fp32_accumulation import HALVES
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder

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
        return torch.empty(0, device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        compute, ctx.compute = ctx.compute, None
        return None, *compute()


def accumulate_products(due: list[Due]) -> None:
    """Give leaves the gradients that functions return, as :func:`accumulate_grads` does, but not copies of them.

    Each function is called when the leaves before have their gradients. All this is one call of the engine, which hands
    over to a thread of its own for each: on a GPU that takes the host longer than to launch a product.

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
        for table, ours in self._tables:  # noqa: SIM110 (a generator is a call for each)
            if len(table() or ()) > ours:
                return True
        return False

    def _own_tables(self) -> list[tuple[Callable[[], Any], int]]:
        """Return the nodes' hook tables, each with the number of our hooks in it."""
        tables = [handle.hooks_dict_ref for handle in (*self._handles, *self._before)]
        ours = Counter(id(table()) for table in tables)
        return [(table, ours[id(table())]) for table in tables]

    def remove(self) -> None:
        """Remove the hooks."""
        if fp32_accumulation.sums:
            fp32_accumulation.drop_sums(param.grad for param in self._params)
        _remove(self._handles, self._before)
        self.nodes.clear()


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

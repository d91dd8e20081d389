"""Weight gradients of the linears of a stage, computed after the backward that left them out.

A backward with deferral yields the gradient of the stage's input and the gradients of all parameters but the weights
and biases of linears. For those it keeps input and output gradient of each linear, from which W makes the products.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.data_parallel.graph_tasks import DeferredGrads, accumulate_deferred, accumulate_grads
from ovpatch.overlap.tensors.linear_ops import DELAYED_WGRAD, DELAYS_WGRAD, ComputeGrad, autocast_dtype
from ovpatch_plugins.pipeline.graph import find_readers
from ovpatch_plugins.pipeline.pipeline_counters import StageReport

_QUEUE: Final = "_ovpatch_wgrad_queue"
_VIEWS: Final = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


class WeightGradError(RuntimeError):
    """A stage takes gradients in a way that a deferred weight gradient cannot follow."""


class _Call:
    """One call of a deferred linear: input ``[rows, in]`` and output gradient ``[rows, out]``, from B until W.

    Of a linear of another feature, what computes the weight's gradient instead.
    """

    __slots__ = ("bias", "compute", "grad", "input", "queue", "sums_rows_at_once", "weight")

    def __init__(
        self, queue: WeightGradQueue, weight: Tensor, bias: Tensor | None = None, compute: ComputeGrad | None = None
    ) -> None:
        self.queue = queue
        self.weight = weight
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.compute = compute
        self.input: Tensor | None = None
        self.grad: Tensor | None = None
        self.sums_rows_at_once = True

    def keep_grad(self, grads: Sequence[Tensor | None]) -> None:
        """Keep the output gradient; called before the node that made the output."""
        self.grad = grads[0]

    def take_operands(self) -> tuple[Tensor, Tensor]:
        """Return input and output gradient, and drop them: nodes keep the call as long as the script keeps a loss."""
        assert self.grad is not None
        assert self.input is not None
        operands = self.input, self.grad
        self.input = self.grad = None
        return operands


class _Keep(torch.autograd.Function):
    """The identity; its backward, which runs right behind the linear's, hands the call to the queue.

    It saves the input *before* the product is computed: a non-reentrant checkpoint recomputes up to the last saved
    tensor, and would otherwise compute one more product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call = call
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ctx.call.input,) = ctx.saved_tensors
        ctx.call.queue.add_call(ctx.call)
        return grads[0], None


class _DeferredLinear(nn.Linear):
    """``nn.Linear`` while the engine runs its stage. Weight and bias enter the graph detached."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        queue: WeightGradQueue = self.__dict__[_QUEUE]
        if weight is None or torch.compiler.is_compiling() or not _is_deferrable(input, weight, bias):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                queue.note_undeferred(self)
            return F.linear(input, self.weight, self.bias)
        if queue.is_looking and queue.keeps_in_backward(self):
            return queue.look_at(self, F.linear(input, weight, bias))
        x, w, b = input, weight.detach(), None if bias is None else bias.detach()
        dtype = autocast_dtype(x.device.type, x.dtype)
        if dtype is not None:
            x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
        call = _Call(queue, weight, bias)
        if bias is not None and not bias.requires_grad:
            b = bias
        y = F.linear(_Keep.apply(x, call), w, b)  # type: ignore[no-untyped-call]  # torch's apply()
        # A hook of the node, not of the tensor: it sees the gradient after hooks that the script puts on the output. Of
        # the product's node, not of a view's: that one leaves the graph if the script changes the output in place.
        node = _skip_views(y.grad_fn)
        node.register_prehook(call.keep_grad)
        # A product of several batch dimensions whose bias is added afterwards sums over all of them in one reduction.
        call.sums_rows_at_once = type(node).__name__ == "AddBackward0"
        return y


def _skip_views(node: Any) -> Any:
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node


_DeferredLinear.__name__ = nn.Linear.__name__
_DeferredLinear.__qualname__ = nn.Linear.__qualname__
_DeferredLinear.__module__ = nn.Linear.__module__


def _is_deferrable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether a call can be deferred with stock's bits."""
    return (
        x.requires_grad
        and weight.requires_grad
        and torch.is_grad_enabled()
        and weight.is_leaf
        and (bias is None or bias.is_leaf)
        # Other inputs are folded into a matrix only if the weight needs a gradient, which the detached one does not.
        and (x.dim() == 2 or (x.dim() > 2 and x.is_contiguous()))
        and x.layout is torch.strided
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class WeightGradQueue:
    """The deferred weight gradients of one stage.

    [Note: deferral keeps stock's bits] W computes the products of stock's backward on the same operands and gives them
    to the leaf through the engine, which accumulates and calls hooks as in stock. Microbatches come in stock's order. A
    weight that has other contributions, as a tied one, would round as (G + e) + h instead of G + (e + h): such weights
    stay in B. The first microbatch leaves all in B: its graph shows which these are.

    Args:
        module: The stage's module.
        report: Gets the reasons why linears stay in B.
        takes_others: Whether linears of other features leave their weight gradients to W, too, under which they may
            hide a communication in B.
        fuse: Add products into the gradient where no hook sees it; rounds once instead of twice.

    Attributes:
        defers: Whether the step's scan found linears to defer.
        is_looking: Whether the first microbatch is computed, which shows what has to stay in B.
        computed: Weight gradients computed here.
        pending: Calls whose weight gradient is due, over all microbatches.
    """

    def __init__(
        self, module: nn.Module, report: StageReport, *, takes_others: bool = False, fuse: bool = False
    ) -> None:
        self.defers = False
        self.computed = self.pending = 0
        self._module = module
        self._fuse, self._takes_others = fuse, takes_others
        self._calls: dict[int, list[_Call]] = {}
        self._microbatch: int | None = None
        self._linears: list[nn.Linear] = []
        self._others: list[nn.Linear] = []  # of other features
        self._is_of_others: dict[int, bool] = {}  # by the id of a weight
        self._report, self._reasons = report, report.reasons
        self._undeferred: set[int] = set()  # ids of linears; the module keeps them alive
        self._read_elsewhere: set[int] = set()
        self._due_at_once: set[int] = set()  # ids of their weights, in the step that found them
        self._is_checked = self._is_graph_checked = self.is_looking = self._recomputes = False
        self._first: int | None = None  # the first microbatch, in its step
        # Its linears, by id: the ids of their weights, which FSDP2 may take out of modules again, and product nodes.
        self._seen: dict[int, tuple[int, list[Any]]] = {}

    def scan(self) -> None:
        """Find the linears to defer. Called for each step, as scripts freeze, tie and wrap modules between steps."""
        self._first = None
        if not self._is_graph_checked:
            self._seen.clear()
        self._due_at_once.clear()
        owners: defaultdict[int, int] = defaultdict(int)
        linears: list[tuple[nn.Linear, bool]] = []
        self._reasons.clear()
        self._report.expert_weights = 0
        for module, compiled in walk_modules(self._module):
            for param in module._parameters.values():
                if param is not None:
                    owners[id(param)] += 1
                    is_grouped = param.dim() == 3 and "expert" in type(module).__name__.lower()
                    self._report.expert_weights += is_grouped and param.requires_grad
            leaves_wgrad = self._takes_others and getattr(type(module), DELAYS_WGRAD, False)
            if type(module) is nn.Linear or (leaves_wgrad and isinstance(module, nn.Linear)):
                linears.append((module, compiled))
            elif isinstance(module, nn.Linear):
                self._reasons[f"of class {type(module).__module__}.{type(module).__qualname__}"] += 1
        self._linears, self._others = [], []
        self._is_of_others.clear()
        for linear, compiled in linears:
            reason = self._reason_against(linear, compiled, owners)
            if reason:
                self._reasons[reason] += 1
            else:
                (self._linears if type(linear) is nn.Linear else self._others).append(linear)
        self.defers = bool(self._linears or self._others)

    def _reason_against(self, linear: nn.Linear, compiled: bool, owners: dict[int, int]) -> str:
        params = [param for param in linear._parameters.values() if param is not None]
        if compiled:
            return "inside a compiled module"
        if linear._parameters.get("weight") is None:
            return "without a weight of their own"
        if "forward" in linear.__dict__:
            return "with a forward of their own"
        if any(owners[id(param)] > 1 for param in params):
            return "with a weight that another module has, too"
        if id(linear) in self._undeferred:
            return "whose input needs no gradient or is not contiguous"
        if id(linear) in self._read_elsewhere:
            return "with a weight that is read outside of them, too"
        if not linear.weight.requires_grad:
            return "with a frozen weight"
        is_plain = type(linear) is nn.Linear
        if not is_plain and (has_hooks(linear.weight) or getattr(linear.weight, "main_grad", None) is not None):
            return "of tp_linear, with hooks or a main_grad"  # B would call hooks without a gradient
        return ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the stage's linears defer inside the ``with`` block."""
        linears = self._linears
        try:
            for linear in linears:
                linear.__dict__[_QUEUE] = self
                object.__setattr__(linear, "__class__", _DeferredLinear)
            yield
        finally:
            for linear in linears:
                self._uninstall(linear)

    def _uninstall(self, linear: nn.Linear) -> None:
        linear.__dict__.pop(_QUEUE, None)
        if type(linear) is _DeferredLinear:
            object.__setattr__(linear, "__class__", nn.Linear)

    def start_forward(self, microbatch: int) -> None:
        """Called in front of the forward of a microbatch."""
        self.is_looking, self._recomputes = not (self._is_checked or self._is_graph_checked), False
        if self.is_looking:
            self._first = microbatch

    def start_recomputation(self, microbatch: int) -> None:
        """Called in front of what may compute forwards of a microbatch again."""
        self.is_looking, self._recomputes = microbatch == self._first, True

    def keeps_in_backward(self, linear: nn.Linear) -> bool:
        """Return whether a linear of the first microbatch leaves its weight gradient in B.

        What is computed again does so as its forward did, of which a reentrant checkpoint had no graph.
        """
        return not self._recomputes or id(linear) in self._seen

    def look_at(self, linear: nn.Linear, output: Tensor) -> Tensor:
        """Take note of the node that computes a linear's output, which is returned."""
        if not self._recomputes:
            node = _skip_views(output.grad_fn)
            if type(node).__name__ == "AddBackward0":  # of the bias
                node = _skip_views(node.next_functions[0][0])
            _, nodes = self._seen.setdefault(id(linear), (id(linear._parameters["weight"]), []))
            nodes.append(node)
        return output

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """Collect the calls whose backward runs inside the ``with`` block."""
        if self._due_at_once:
            self._compute_due_at_once()
        self._microbatch = microbatch
        self.start_recomputation(microbatch)
        self._calls.setdefault(microbatch, [])
        found: list[nn.Linear] = []
        hooks = [] if self._is_checked else self._watch_weights(found)
        if self._others:
            DELAYED_WGRAD.take = self._take
        try:
            yield
        finally:
            DELAYED_WGRAD.take = self._microbatch = None
            for hook in hooks:
                hook.remove()
        self._is_checked = True
        self._keep_in_backward(found)
        if self._due_at_once:
            self._compute_due_at_once()

    def check_graph(self, output: Any) -> None:
        """Find weights that a graph reads outside of their linears, as ``F.linear(x, module.weight)`` does.

        Called with the output of the first microbatch, or its loss. A reentrant checkpoint hides its graph until the
        first backward, which looks for weights of linears inside of it. Others may be read there, so they stay in B.
        """
        if self._is_checked or self._is_graph_checked:
            return
        self._is_graph_checked = True
        tensors = output if isinstance(output, (tuple, list)) else [output]
        readers, is_whole = find_readers([one for one in tensors if isinstance(one, Tensor)])
        found = []
        for linear in self._linears:
            weight, products = self._seen.get(id(linear), (id(linear.weight), []))
            is_hidden = not is_whole and id(linear) in self._seen
            if is_hidden or not readers.get(weight, set()) <= set(products):
                found.append(linear)
        self._keep_in_backward(found)
        for _, products in self._seen.values():
            products.clear()  # they keep the graph alive

    def note_undeferred(self, linear: nn.Linear) -> None:
        """Keep a linear in B for good: the input of a call needs no gradient or is no matrix in memory."""
        self._undeferred.add(id(linear))
        self._keep_in_backward([linear])

    def _keep_in_backward(self, linears: Sequence[nn.Linear]) -> None:
        """Compute weight gradients of linears in B from their next call on."""
        for linear in linears:
            self._due_at_once.add(id(linear.weight))
            self._uninstall(linear)
            if id(linear) not in self._undeferred:
                self._read_elsewhere.add(id(linear))
        kept = self._undeferred | self._read_elsewhere
        self._linears = [linear for linear in self._linears if id(linear) not in kept]
        self._others = [linear for linear in self._others if id(linear) not in kept]
        self._is_of_others.clear()

    def _compute_due_at_once(self) -> None:
        """Compute what linears deferred that have been kept in B since: their next microbatch accumulates in B."""
        for microbatch, calls in self._calls.items():
            due = [call for call in calls if id(call.weight) in self._due_at_once]
            if due:
                self._calls[microbatch] = [call for call in calls if id(call.weight) not in self._due_at_once]
                self._accumulate(due)

    def add_call(self, call: _Call) -> None:
        """Take a call whose backward has just run.

        Raises:
            WeightGradError: No backward of the engine is running, or it builds a graph of its own.
        """
        if self._microbatch is None or torch.is_grad_enabled():
            raise WeightGradError(
                "a stage takes gradients inside its forward, or of its gradients, through a linear whose weight "
                "gradient is computed later. Set OVPATCH_PIPELINE_DELAY_WGRAD_COMPUTE=off."
            )
        if call.grad is None:
            raise WeightGradError(
                "the gradient of a linear's output was not seen. Set OVPATCH_PIPELINE_DELAY_WGRAD_COMPUTE=off, and "
                "please report the model."
            )
        self._calls[self._microbatch].append(call)
        self.pending += 1

    def _take(self, weight: Tensor, compute: ComputeGrad) -> bool:
        """Take the weight gradient of a linear of another feature, unless it has to stay in B."""
        key = id(weight)
        if key not in self._is_of_others:  # here, in B, modules have the weights that FSDP2 has gathered
            self._is_of_others[key] = any(linear._parameters["weight"] is weight for linear in self._others)
        if self._microbatch is None or not self._is_of_others[key] or torch.is_grad_enabled():
            return False
        self._calls[self._microbatch].append(_Call(self, weight, compute=compute))
        self.pending += 1
        return True

    def compute(self, microbatch: int) -> None:
        """Compute and accumulate the weight gradients of a microbatch."""
        self._accumulate(self._calls.pop(microbatch, []))

    @torch.no_grad()  # the saved input belongs to a graph, which the gradient would otherwise grow on
    def _accumulate(self, calls: list[_Call]) -> None:
        alike: dict[int, list[_Call]] = {}  # the calls of each weight, in the order of the last
        while calls:
            call = calls.pop(0)
            alike[id(call.weight)] = [*alike.pop(id(call.weight), ()), call]
            self.pending -= 1
        self.computed += len(alike)
        due: list[DeferredGrads] = []
        while alike:
            same = alike.pop(next(iter(alike)))
            weight, bias = same[0].weight, same[0].bias
            if same[0].compute is not None:
                accumulate_deferred(due)
                products = [product for call in same if (product := _compute_other(call)) is not None]
                if products:  # else they were added already
                    accumulate_grads([weight], [functools.reduce(torch.add, products).to(weight.dtype)])
            elif not self._fuse or len(same) > 1 or not _add_product(same[0]):
                due.append(([weight] if bias is None else [weight, bias], functools.partial(_compute_products, same)))
        accumulate_deferred(due)

    def clear(self) -> None:
        """Drop what is due, after an error."""
        self._calls.clear()
        self._microbatch, self.pending = None, 0

    def _watch_weights(self, found: list[nn.Linear]) -> list[RemovableHandle]:
        """Have linears put into ``found`` whose weights get a gradient."""

        def watch(linear: nn.Linear) -> RemovableHandle:
            def find(grad: Tensor | None) -> None:
                if grad is not None:  # as where another feature's linear has left it out
                    found.append(linear)

            hook: RemovableHandle = linear.weight.register_hook(find)
            return hook

        return [watch(one) for one in (*self._linears, *self._others) if id(one) not in self._seen]


def walk_modules(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module once, with whether it is part of a compiled one."""
    return _walk(module, False, set())


def _walk(module: nn.Module, compiled: bool, seen: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    compiled = compiled or _is_compiled(module)
    yield module, compiled
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child, compiled, seen)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def has_hooks(param: Tensor) -> bool:
    """Tell whether a script has put hooks on a parameter, which see its gradients."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


def _compute_other(call: _Call) -> Tensor | None:
    """Return the weight's gradient of a linear of another feature, or None if that has added it."""
    assert call.compute is not None
    with torch.autocast(call.weight.device.type, enabled=False):  # as in the backward that left it out
        return call.compute()


def _compute_products(calls: list[_Call]) -> list[Tensor]:
    """Return the gradients of a linear's weight ``[out, in]`` and bias ``[out]``: the sums of its calls, as stock's."""
    weights, biases = [], []
    dtype = calls[0].weight.dtype
    while calls:
        call = calls.pop(0)
        x, whole = call.take_operands()
        grad = _rows(whole)
        weights.append(grad.t().mm(_rows(x)))
        if call.bias is not None:
            summed = whole if call.sums_rows_at_once else grad
            biases.append(summed.sum(tuple(range(summed.dim() - 1))))
    return [functools.reduce(torch.add, products).to(dtype) for products in (weights, biases) if products]


def _add_product(call: _Call) -> bool:
    """Add the products into the gradients in place, where no hook would see them; tell whether that was done."""
    leaves = [call.weight] if call.bias is None else [call.weight, call.bias]
    assert call.grad is not None
    for leaf in leaves:
        grad = leaf.grad
        if grad is None or grad.dtype != call.grad.dtype or has_hooks(leaf):
            return False
    x, whole = call.take_operands()
    rows = _rows(whole)
    assert call.weight.grad is not None
    call.weight.grad.addmm_(rows.t(), _rows(x))
    if call.bias is not None and call.bias.grad is not None:
        call.bias.grad.add_(rows.sum(0))
    return True


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, or ``torch.compile(module)`` returned it."""
    return vars(module).get("_compiled_call_impl") is not None or "dynamo_ctx" in vars(module)

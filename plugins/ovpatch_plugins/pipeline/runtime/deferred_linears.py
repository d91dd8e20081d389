"""The linears of a stage whose weight gradients are computed after the backward.

A backward with deferral yields the gradient of the stage's input and the gradients of all parameters except
the weights and biases of linears. For these it keeps the input and the output gradient of each linear. W
computes the GEMMs from them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.autograd import DeferredGrads, accumulate_deferred, accumulate_grads
from ovpatch.overlap.tensors.linear_ops import (
    DELAYED_WGRAD,
    DELAYS_WGRAD,
    ComputeGrad,
    autocast_dtype,
)
from ovpatch_plugins.pipeline.graph import find_readers
from ovpatch_plugins.pipeline.pipeline_counters import StageReport

# The attribute of a linear that has its queue.
_QUEUE: Final = "_ovpatch_wgrad_queue"
_VIEWS: Final = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


class WeightGradError(RuntimeError):
    """A stage takes gradients in a way that deferred weight gradients cannot represent."""


class _Call:
    """One call of a deferred linear: input ``[rows, in]`` and output gradient ``[rows, out]``, from B until W.

    A call of another feature's linear has a function ``compute`` instead, which returns the weight's gradient.
    """

    __slots__ = ("bias", "compute", "grad", "input", "queue", "sums_rows_at_once", "weight")

    def __init__(
        self,
        queue: DeferredLinears,
        weight: Tensor,
        bias: Tensor | None = None,
        compute: ComputeGrad | None = None,
    ) -> None:
        self.queue = queue
        self.weight = weight
        # A frozen bias needs no gradient.
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.compute = compute
        self.input: Tensor | None = None
        self.grad: Tensor | None = None
        # Whether stock PyTorch sums the bias's gradient over all batch dimensions in one reduction.
        self.sums_rows_at_once = True

    def keep_grad(self, grads: Sequence[Tensor | None]) -> None:
        """Keep the output gradient. Autograd calls this before the node that made the output."""
        self.grad = grads[0]

    def take_operands(self) -> tuple[Tensor, Tensor]:
        """Return input and output gradient, and drop them, because the script's loss keeps the call alive."""
        assert self.grad is not None
        assert self.input is not None
        operands = self.input, self.grad
        self.input = None
        self.grad = None
        return operands


class _Keep(torch.autograd.Function):
    """The identity, whose backward runs right after the linear's and hands the call to the queue.

    It saves the input *before* the GEMM. A non-reentrant checkpoint recomputes up to the last saved tensor,
    and would otherwise compute one more GEMM.
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
    """``nn.Linear`` while the engine runs its stage; weight and bias enter the graph detached."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        queue: DeferredLinears = self.__dict__[_QUEUE]
        if (
            weight is None
            or torch.compiler.is_compiling()
            or not _is_deferrable(input, weight, bias)
        ):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                queue.note_undeferred(self)
            return F.linear(input, self.weight, self.bias)
        if queue.is_observing and queue.keeps_in_backward(self):
            return queue.observe_output(self, F.linear(input, weight, bias))
        x, w, b = input, weight.detach(), None if bias is None else bias.detach()
        dtype = autocast_dtype(x.device.type, x.dtype)
        if dtype is not None:
            x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
        call = _Call(queue, weight, bias)
        # A frozen bias needs no call, so it stays in the graph as in stock PyTorch.
        if bias is not None and not bias.requires_grad:
            b = bias
        y = F.linear(_Keep.apply(x, call), w, b)  # type: ignore[no-untyped-call]  # torch's apply()
        # A hook of the node runs after the hooks that the script puts on the output, so it reads their result. It
        # is the node of the GEMM: a view's node leaves the graph if the script changes the output in place.
        node = _skip_views(y.grad_fn)
        node.register_prehook(call.keep_grad)
        # If the bias is added after a GEMM of several batch dimensions, torch sums over all of them in one reduction.
        call.sums_rows_at_once = type(node).__name__ == "AddBackward0"
        return y


def _skip_views(node: Any) -> Any:
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node


# Scripts print and compare the name of the class, so it is the name of torch's class.
_DeferredLinear.__name__ = nn.Linear.__name__
_DeferredLinear.__qualname__ = nn.Linear.__qualname__
_DeferredLinear.__module__ = nn.Linear.__module__


def _is_deferrable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a call can be deferred with the bits of stock PyTorch."""
    return (
        x.requires_grad
        and weight.requires_grad
        and torch.is_grad_enabled()
        and weight.is_leaf
        and (bias is None or bias.is_leaf)
        # Torch folds other inputs into a matrix only if the weight needs a gradient, and the detached one needs none.
        and (x.dim() == 2 or (x.dim() > 2 and x.is_contiguous()))
        and x.layout is torch.strided
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class DeferredLinears:
    """The linears of one stage that defer, and their weight gradients from B until W.

    [Note: deferral keeps the bits] W computes the GEMMs of stock PyTorch's backward on the same operands. It
    gives the results to the leaf through the engine of autograd, which accumulates and calls hooks as in
    stock PyTorch. Microbatches come in the same order. A weight with other contributions, such as a tied
    weight, would round as (G + e) + h instead of G + (e + h). Such weights stay in B. The first microbatch
    leaves all weights in B, because only its graph shows which weights have other readers.

    Args:
        module: The stage's module.
        report: Gets the reasons for which linears stay in B.
        takes_foreign: Whether linears of other features also leave their weight gradients to W. In B, these
            gradients may hide a communication.
        is_fused: Whether GEMMs add into a gradient that no hook sees. This rounds once instead of twice.

    Attributes:
        defers: Whether the step's scan found linears to defer.
        is_graph_known: Whether the graph of a microbatch has shown which weights must stay in B.
        is_observing: Whether the first microbatch is computed, whose graph is still unknown.
        computed: Number of weight gradients computed here.
        pending: Number of calls whose weight gradient is not computed, over all microbatches.
    """

    def __init__(
        self,
        module: nn.Module,
        report: StageReport,
        *,
        takes_foreign: bool = False,
        is_fused: bool = False,
    ) -> None:
        self.defers = False
        self.is_graph_known = False
        self.is_observing = False
        self.computed = 0
        self.pending = 0
        self._module = module
        self._report = report
        self._is_fused = is_fused
        self._takes_foreign = takes_foreign
        # - Calls whose weight gradient is not computed, by microbatch
        self._calls: dict[int, list[_Call]] = {}
        # The microbatch whose backward runs.
        self._microbatch: int | None = None
        # - Linears
        self._linears: list[nn.Linear] = []
        # Linears of other features.
        self._foreign_linears: list[nn.Linear] = []
        # Whether a weight belongs to a linear of another feature, by the id of the weight.
        self._is_foreign: dict[int, bool] = {}
        # Ids of linears that stay in B. The module keeps the linears alive.
        self._undeferred: set[int] = set()
        self._read_elsewhere: set[int] = set()
        # Ids of their weights, in the step that found them.
        self._due_in_backward: set[int] = set()
        # - The first microbatch
        # Whether a backward has shown the weights that graphs read outside of their linears.
        self._is_checked = False
        # Whether forwards are recomputations.
        self._recomputes = False
        # The index of the first microbatch.
        self._first: int | None = None
        # By the id of a linear: the id of its weight, which FSDP2 may take out of the module, and its GEMM nodes.
        self._seen: dict[int, tuple[int, list[Any]]] = {}

    def start_step(self) -> None:
        """Find the linears to defer, and defer them; scripts freeze, tie and wrap modules between steps."""
        self._first = None
        self.is_observing = False
        self._recomputes = False
        if not self.is_graph_known:
            self._seen.clear()
        self._due_in_backward.clear()
        reasons = self._report.reasons
        reasons.clear()
        expert_weights = 0
        owners: Counter[int] = Counter()
        linears: list[tuple[nn.Linear, bool]] = []
        for module, is_compiled in walk_modules(self._module):
            for param in module._parameters.values():
                if param is not None:
                    owners[id(param)] += 1
                    if (
                        param.dim() == 3
                        and param.requires_grad
                        and "expert" in type(module).__name__.lower()
                    ):
                        expert_weights += 1
            if isinstance(module, nn.Linear):
                if type(module) is nn.Linear or (
                    self._takes_foreign and getattr(type(module), DELAYS_WGRAD, False)
                ):
                    linears.append((module, is_compiled))
                else:
                    reasons[f"of class {type(module).__module__}.{type(module).__qualname__}"] += 1
        self._report.expert_weights = expert_weights
        self._linears = []
        self._foreign_linears = []
        self._is_foreign.clear()
        for linear, is_compiled in linears:
            reason = self._find_reason(linear, is_compiled, owners)
            if reason:
                reasons[reason] += 1
            else:
                (self._linears if type(linear) is nn.Linear else self._foreign_linears).append(
                    linear
                )
        self.defers = bool(self._linears or self._foreign_linears)
        for linear in self._linears:
            linear.__dict__[_QUEUE] = self
            object.__setattr__(linear, "__class__", _DeferredLinear)

    def _find_reason(self, linear: nn.Linear, is_compiled: bool, owners: Mapping[int, int]) -> str:
        """Return the reason for which a linear stays in B, or ""."""
        if is_compiled:
            return "inside a compiled module"
        if linear._parameters.get("weight") is None:
            return "that have no weight"
        if "forward" in linear.__dict__:
            return "whose forward was replaced"
        for param in linear._parameters.values():
            if param is not None and owners[id(param)] > 1:
                return "with a weight that another module has, too"
        if id(linear) in self._undeferred:
            return "whose input needs no gradient or is not contiguous"
        if id(linear) in self._read_elsewhere:
            return "with a weight that is read outside of them, too"
        if not linear.weight.requires_grad:
            return "with a frozen weight"
        is_plain = type(linear) is nn.Linear
        # Without a gradient in B, hooks would be called with None.
        if not is_plain and (
            has_hooks(linear.weight) or getattr(linear.weight, "main_grad", None) is not None
        ):
            return "of tp_linear, with hooks or a main_grad"
        return ""

    def uninstall(self, linears: Sequence[nn.Linear] | None = None) -> None:
        """Restore the forward of linears. Default: of all linears that defer."""
        for linear in self._linears if linears is None else linears:
            linear.__dict__.pop(_QUEUE, None)
            if type(linear) is _DeferredLinear:
                object.__setattr__(linear, "__class__", nn.Linear)

    def start_forward(self, microbatch: int) -> None:
        """Start the forward of a microbatch whose graph is unknown."""
        self.is_observing = not self._is_checked
        self._recomputes = False
        if self.is_observing:
            self._first = microbatch

    def start_recomputation(self, microbatch: int) -> None:
        """Start to recompute forwards of a microbatch before its backward."""
        self.is_observing = microbatch == self._first
        self._recomputes = True

    def keeps_in_backward(self, linear: nn.Linear) -> bool:
        """Return whether a linear of the first microbatch leaves its weight gradient in B.

        A recomputed linear does the same as in its forward. The forward of a reentrant checkpoint had no graph.
        """
        return not self._recomputes or id(linear) in self._seen

    def observe_output(self, linear: nn.Linear, output: Tensor) -> Tensor:
        """Note the node that computes a linear's output, and return the output."""
        if not self._recomputes:
            node = _skip_views(output.grad_fn)
            # If the bias was added after the GEMM, the last node is the addition.
            if type(node).__name__ == "AddBackward0":
                node = _skip_views(node.next_functions[0][0])
            _, nodes = self._seen.setdefault(id(linear), (id(linear._parameters["weight"]), []))
            nodes.append(node)
        return output

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """Collect the calls whose backward runs inside the ``with`` block."""
        if self._due_in_backward:
            self._compute_due_in_backward()
        self._microbatch = microbatch
        self.is_observing = microbatch == self._first
        self._recomputes = True
        self._calls.setdefault(microbatch, [])
        found: list[nn.Linear] = []
        hooks = [] if self._is_checked else self._watch_weights(found)
        if self._foreign_linears:
            DELAYED_WGRAD.take = self._take
        try:
            yield
        finally:
            DELAYED_WGRAD.take = None
            self._microbatch = None
            for hook in hooks:
                hook.remove()
        if not self._is_checked:
            self._is_checked = True
            self._keep_in_backward(found)
        # FSDP2 may gather the weights into other tensors for the next backward.
        self._is_foreign.clear()
        if self._due_in_backward:
            self._compute_due_in_backward()
        self.is_observing = False
        self._recomputes = False

    def check_graph(self, output: Any) -> None:
        """Find weights that a graph reads outside of their linears, as ``F.linear(x, module.weight)`` does.

        A reentrant checkpoint hides its graph until the first backward. That backward finds weights of linears
        inside of the checkpoint. The weights of other linears may be read there, so they stay in B.

        Args:
            output: The output of the first microbatch, or its loss.
        """
        if self._is_checked or self.is_graph_known:
            return
        self.is_graph_known = True
        self.is_observing = False
        tensors = output if isinstance(output, (tuple, list)) else [output]
        readers, is_complete = find_readers(
            [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        )
        found = []
        for linear in self._linears:
            weight, gemms = self._seen.get(id(linear), (id(linear.weight), []))
            is_hidden = not is_complete and id(linear) in self._seen
            if is_hidden or not readers.get(weight, set()) <= set(gemms):
                found.append(linear)
        self._keep_in_backward(found)
        # The nodes would keep the graph alive.
        for _, gemms in self._seen.values():
            gemms.clear()

    def note_undeferred(self, linear: nn.Linear) -> None:
        """Keep a linear in B in all later steps: the input of a call needs no gradient or is no matrix in memory."""
        self._undeferred.add(id(linear))
        self._keep_in_backward([linear])

    def _keep_in_backward(self, linears: Sequence[nn.Linear]) -> None:
        """Compute weight gradients of linears in B from their next call on."""
        for linear in linears:
            self._due_in_backward.add(id(linear.weight))
            if id(linear) not in self._undeferred:
                self._read_elsewhere.add(id(linear))
        self.uninstall(linears)
        kept = self._undeferred | self._read_elsewhere
        self._linears = [linear for linear in self._linears if id(linear) not in kept]
        self._foreign_linears = [
            linear for linear in self._foreign_linears if id(linear) not in kept
        ]
        self._is_foreign.clear()

    def _compute_due_in_backward(self) -> None:
        """Compute deferred gradients of linears that now stay in B, where their next microbatch accumulates."""
        for microbatch, calls in self._calls.items():
            due = [call for call in calls if id(call.weight) in self._due_in_backward]
            if due:
                self._calls[microbatch] = [
                    call for call in calls if id(call.weight) not in self._due_in_backward
                ]
                self._accumulate(due)

    def add_call(self, call: _Call) -> None:
        """Take a call whose backward has just run.

        Raises:
            WeightGradError: No backward of the engine is running, or the backward builds a graph.
        """
        if self._microbatch is None or torch.is_grad_enabled():
            raise WeightGradError(
                "ovpatch: a stage takes gradients inside its forward, or of its gradients, through a "
                "linear whose weight gradient is computed later. Set "
                "OVPATCH_PIPELINE_DELAY_WGRAD_COMPUTE=off."
            )
        if call.grad is None:
            raise WeightGradError(
                "ovpatch: the hook that keeps the gradient of a linear's output was not called. Set "
                "OVPATCH_PIPELINE_DELAY_WGRAD_COMPUTE=off, and report the model."
            )
        self._calls[self._microbatch].append(call)
        self.pending += 1

    def _take(self, weight: Tensor, compute: ComputeGrad) -> bool:
        """Take the weight gradient of a linear of another feature, unless it must stay in B."""
        key = id(weight)
        # In B, modules have the weights that FSDP2 has gathered.
        if key not in self._is_foreign:
            self._is_foreign[key] = any(
                linear._parameters["weight"] is weight for linear in self._foreign_linears
            )
        if self._microbatch is None or not self._is_foreign[key] or torch.is_grad_enabled():
            return False
        self._calls[self._microbatch].append(_Call(self, weight, compute=compute))
        self.pending += 1
        return True

    def compute(self, microbatch: int) -> None:
        """Compute and accumulate the weight gradients of a microbatch."""
        self._accumulate(self._calls.pop(microbatch, []))

    # The saved input belongs to a graph, which would otherwise grow with the gradient.
    @torch.no_grad()
    def _accumulate(self, calls: list[_Call]) -> None:
        # The calls of each weight, in the order of its last call.
        calls_by_weight: dict[int, list[_Call]] = {}
        while calls:
            call = calls.pop(0)
            calls_by_weight[id(call.weight)] = [*calls_by_weight.pop(id(call.weight), ()), call]
            self.pending -= 1
        self.computed += len(calls_by_weight)
        due: list[DeferredGrads] = []
        while calls_by_weight:
            same = calls_by_weight.pop(next(iter(calls_by_weight)))
            weight, bias = same[0].weight, same[0].bias
            if same[0].compute is not None:
                accumulate_deferred(due)
                weight_grads = [
                    grad for call in same if (grad := _compute_foreign(call)) is not None
                ]
                # If there are none, the other feature has added the gradient itself.
                if weight_grads:
                    accumulate_grads(
                        [weight], [functools.reduce(torch.add, weight_grads).to(weight.dtype)]
                    )
            elif not self._is_fused or len(same) > 1 or not _add_into_grads(same[0]):
                due.append(
                    (
                        [weight] if bias is None else [weight, bias],
                        functools.partial(_compute_grads, same),
                    )
                )
        accumulate_deferred(due)

    def clear(self) -> None:
        """Drop all calls after an error."""
        self._calls.clear()
        self._microbatch = None
        self.pending = 0
        self.is_observing = False
        self._recomputes = False

    def _watch_weights(self, found: list[nn.Linear]) -> list[RemovableHandle]:
        """Add the linears whose weights get a gradient to ``found``."""

        def watch(linear: nn.Linear) -> RemovableHandle:
            def find(grad: Tensor | None) -> None:
                # Another feature's linear may have left its gradient to W.
                if grad is not None:
                    found.append(linear)

            hook: RemovableHandle = linear.weight.register_hook(find)
            return hook

        linears = [
            linear
            for linear in (*self._linears, *self._foreign_linears)
            if id(linear) not in self._seen
        ]
        return [watch(linear) for linear in linears]


def walk_modules(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each module once, in torch's order, and whether it is part of a compiled module."""
    found: list[tuple[nn.Module, bool]] = []
    # A script's module may define equality, so modules are known by their ids.
    seen: set[int] = set()
    left = [(module, False)]
    while left:
        inner, is_compiled = left.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        # The script called `module.compile()`, or `torch.compile(module)` returned the module.
        own = inner.__dict__
        is_compiled = (
            is_compiled or own.get("_compiled_call_impl") is not None or "dynamo_ctx" in own
        )
        found.append((inner, is_compiled))
        left += [
            (child, is_compiled) for child in reversed(inner._modules.values()) if child is not None
        ]
    return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def has_hooks(param: Tensor) -> bool:
    """Return whether a script has put hooks on a parameter, which read its gradients."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


def _compute_foreign(call: _Call) -> Tensor | None:
    """Return the weight's gradient of a linear of another feature, or None if that feature has added it."""
    assert call.compute is not None
    # The backward that deferred the gradient ran without autocast as well.
    with torch.autocast(call.weight.device.type, enabled=False):
        return call.compute()


def _compute_grads(calls: list[_Call]) -> list[Tensor]:
    """Return the gradients of a linear's weight ``[out, in]`` and bias ``[out]``, summed over its calls."""
    weights, biases = [], []
    dtype = calls[0].weight.dtype
    while calls:
        call = calls.pop(0)
        x, output_grad = call.take_operands()
        grad = _rows(output_grad)
        weights.append(grad.t().mm(_rows(x)))
        if call.bias is not None:
            summed = output_grad if call.sums_rows_at_once else grad
            biases.append(summed.sum(tuple(range(summed.dim() - 1))))
    return [functools.reduce(torch.add, grads).to(dtype) for grads in (weights, biases) if grads]


def _add_into_grads(call: _Call) -> bool:
    """Add a call's gradients in place, unless a hook would miss them; return whether they were added."""
    leaves = [call.weight] if call.bias is None else [call.weight, call.bias]
    assert call.grad is not None
    for leaf in leaves:
        grad = leaf.grad
        if grad is None or grad.dtype != call.grad.dtype or has_hooks(leaf):
            return False
    x, output_grad = call.take_operands()
    rows = _rows(output_grad)
    assert call.weight.grad is not None
    call.weight.grad.addmm_(rows.t(), _rows(x))
    if call.bias is not None and call.bias.grad is not None:
        call.bias.grad.add_(rows.sum(0))
    return True

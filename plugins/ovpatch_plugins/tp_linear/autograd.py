"""The operators' autograd functions.

Each computes on rows, ``[sequence, features]``; forward and backward are one schedule's. Inputs and outputs may be
DTensors, as a :class:`OpContext` says.

[Note: what is kept for backward] Rows are mostly a view of the input. Kept is the input itself, then, so that autograd
notices if somebody writes into it before backward: a DTensor's version is not that of its local tensor. What is
gathered is kept gathered, as stock keeps it, unless it is to be gathered anew; of an input that needs no gradient in
any case, since that would be the only reason to communicate, and one rank alone may run that backward. Nothing is kept
that stock does not keep: no input of a frozen weight, no weight of an input that needs no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.data_parallel.grad_hooks import executes
from ovpatch.overlap.tensors.autocast import autocast_dtype
from ovpatch_plugins.tp_linear.config import OpContext
from ovpatch_plugins.tp_linear.gemm import cast, linear, weight_grad
from ovpatch_plugins.tp_linear.layout import (
    arrived,
    from_rows,
    is_partial,
    is_transformed,
    like,
    local,
    place,
    to_rows,
    unwrapped,
    wrapped,
)
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads
from ovpatch_plugins.tp_linear.tp_group import TPGroup

# Weights to whose gradients an operator can add.


def accumulates(weight: Tensor) -> Tensor | None:
    """Return where the weight's gradient can be added to behind autograd's back, or None.

    That is ``weight.main_grad``, as Megatron calls it, or else the gradient that earlier microbatches left, unless
    somebody wants to be told of every gradient: hooks of the weight would not be called.
    """
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None and (not weight.is_leaf or weight.grad is None):
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    if not _is_accumulated(weight):
        return None
    target = weight.grad if main is None else main
    assert target is not None
    return local(target)


def _is_accumulated(weight: Tensor) -> bool:
    """Whether the backward that runs adds to the weight's gradient: with ``inputs`` given, it adds to theirs alone."""
    if not weight.is_leaf:
        return True
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() returns this very gradient
        return False


# Gradients of an operator's weights and biases.


class Collector:
    """Gathers the gradients of an operator's weights and biases, each as what the parameter is.

    Args:
        fuse: Add weights' gradients to what is there already, where nobody would notice.
        weights: The weights.
        biases: The biases.
        wanted: Which of the weights, and then of the biases, need a gradient.

    Attributes:
        weights: Gradients of the weights.
        biases: Gradients of the biases.
    """

    __slots__ = ("_biases", "_fuse", "_wanted", "_weights", "biases", "weights")

    def __init__(
        self, fuse: bool, weights: Sequence[Tensor], biases: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self._fuse, self._weights, self._biases, self._wanted = fuse, weights, biases, wanted
        self.weights: list[Tensor | None] = [None] * len(weights)
        self.biases: list[Tensor | None] = [None] * len(weights)

    @property
    def needs_any(self) -> bool:
        """Whether any weight or bias needs a gradient."""
        return any(self._wanted)

    def take(self, x: Tensor | None, grads: Sequence[Tensor | None]) -> None:
        """Compute the weights' gradients from the whole input, which frozen ones do not need, and the outputs'."""
        for i, grad in enumerate(grads):
            if x is not None and grad is not None and self._wanted[i]:
                self.weights[i] = self._weight(self._weights[i], grad, x)

    def take_biases(self, grads: Sequence[Tensor | None]) -> None:
        """Compute the biases' gradients from the outputs' gradients."""
        for i, grad in enumerate(grads):
            bias = self._biases[i]
            if bias is not None and grad is not None and self._wanted[len(self.weights) + i]:
                self.biases[i] = like(grad.sum(0).to(bias.dtype), bias)

    def _weight(self, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
        target = accumulates(weight) if self._fuse else None
        if target is not None:
            if target.dtype == grad.dtype:
                target.addmm_(grad.t(), x)
            else:
                target.add_(weight_grad(grad, x))
            return None
        found = weight_grad(grad, x)
        return like(found if found.dtype is weight.dtype else found.to(weight.dtype), weight)


def _once(backward: Callable[..., Any]) -> Any:
    """Refuse a second derivative; compute in the dtypes of forward, also where a script calls backward under autocast.

    torch's ``once_differentiable`` turns gradients off in every backward, which mostly runs without them anyway.
    """
    differentiated = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        chosen = differentiated if torch.is_grad_enabled() else backward
        kind = ctx.call.wires.kind
        if not torch.is_autocast_enabled(kind):
            return chosen(ctx, *grads)
        with torch.autocast(kind, enabled=False):
            return chosen(ctx, *grads)

    return run


class GatherLinear(torch.autograd.Function):
    """Gathers a sequence and applies linears to it; returns the gathered input, too, where asked to."""

    @staticmethod
    def compute(
        call: OpContext, x: Tensor, *params: Tensor | None, keeps: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the outputs, and what is to be kept for backward."""
        weights, biases = params[: call.count], params[call.count :]
        here = arrived(local(x))
        given = to_rows(here, call.dim)
        rows, used, added = _cast(call, given, weights, biases)
        schedule = call.how.schedule
        keeps = keeps and not call.anew and any(weight is not None and weight.requires_grad for weight in weights)
        gathered: Tensor | None
        whole: Tensor | None
        if call.later is None and (call.whole is None or rows is given):
            outs, whole = schedule.gather_linear(call.wires, rows, used, added, call.whole is not None or keeps)
            gathered = whole
            results = [from_rows(out, here.shape, call.dim) for out in outs]
        else:  # autocast rounds for linears, and not for who else reads what is gathered
            gathered = call.wires.gathered(given)
            whole = gathered if rows is given else gathered.to(rows.dtype)
            if call.later is None:
                outs = [linear(whole, *params) for params in zip(used, added, strict=True)]
                results = [from_rows(out, here.shape, call.dim) for out in outs]
            else:
                results = [place(whole, len(weight), here.shape, call.dim) for weight in used]
                call.later(whole, [result.detach() for result in results])
        kept = whole if keeps and whole is not None else _as_given(rows, here, x)
        results = [_returned(call, result) for result in results]
        if call.whole is not None and gathered is not None:
            results.append(wrapped(from_rows(gathered, here.shape, call.dim), call.mesh, call.whole))
            if kept is gathered:
                kept = results[-1]  # which tells if somebody writes into it
        return tuple(results), kept

    @staticmethod
    def forward(ctx: Any, call: OpContext, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs."""
        results, kept = GatherLinear.compute(call, x, *params, keeps=True)
        if call.constant:  # then outputs differ in whether they need gradients
            ctx.mark_non_differentiable(*_constant(call, results, params))
        if kept is results[-1]:  # itself, it would stay alive as long as the graph, or be taken apart and put together
            kept = kept.detach()
        ctx.set_materialize_grads(False)
        _keep(ctx, call, x, params[: call.count], params[call.count :], kept)
        return results

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        call: OpContext = ctx.call
        if call.check is not None:
            call.check()
        others, terms = _of_other_readers(call, grads[-1]) if call.whole is not None else (None, None)
        used = any(grad is not None for grad in grads[: call.count])
        if others is not None and (used or terms is not None):
            share = others / call.wires.world
            others, terms = None, share if terms is None else terms + share
        wants = _wants_input(ctx)
        dtype = ctx.dtype if wants else None
        backward = call.how.schedule.gather_linear_backward
        if used or (terms is not None and call.anew and call.trains):  # other ranks gather
            kept, weights, collector = _resume(ctx)
            outs = [None if grad is None else _grad(grad, call, ctx.computed) for grad in grads[: call.count]]
            mine = None
            if call.constant:
                collector.take(kept, outs)
            else:
                take = None if kept is None else collector.take
                mine = backward(call.wires, ColumnGrads(outs, kept, weights, take, dtype, terms, call.anew))
            collector.take_biases(outs)
            return _grads(ctx, mine if wants else None, collector)
        mine = None  # the linears have computed for themselves: nobody minds if the input has changed since
        if terms is not None and wants:
            mine = backward(call.wires, ColumnGrads([], None, [], None, dtype, terms))
        if others is not None:
            own = others.view(call.wires.world, -1, others.shape[1])[call.wires.rank]
            mine = own.clone()  # not a view, which would keep all of it
        return None, _input_grad(ctx, mine if wants else None), *[None] * (2 * call.count)


class LinearScatter(torch.autograd.Function):
    """Applies a linear and adds up over the ranks; each keeps its part of the sequence."""

    @staticmethod
    def compute(call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and what is to be kept for backward."""
        return _summed(call.how.schedule.linear_scatter, call, x, weight, bias, call.dim)

    @staticmethod
    def forward(ctx: Any, call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        result, kept = LinearScatter.compute(call, x, weight, bias)
        _keep(ctx, call, x, (weight,), (bias,), kept)
        return result

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        call: OpContext = ctx.call
        rows, (used,), collector = _resume(ctx)

        def take(whole: Tensor, _: Any) -> None:
            collector.take(rows, (whole,))
            collector.take_biases((whole,))

        dx = call.how.schedule.linear_scatter_backward(
            call.wires,
            _grad(grad, call, ctx.computed),
            used,
            take if collector.needs_any else None,
            ctx.needs_input_grad[1],
        )
        return _grads(ctx, dx, collector)


class LinearReduce(torch.autograd.Function):
    """Applies a linear and adds up over the ranks."""

    @staticmethod
    def compute(call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and what is to be kept for backward."""
        return _summed(call.how.schedule.linear_reduce, call, x, weight, bias, 0)

    @staticmethod
    def forward(ctx: Any, call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        result, kept = LinearReduce.compute(call, x, weight, bias)
        _keep(ctx, call, x, (weight,), (bias,), kept)
        return result

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        rows, (used,), collector = _resume(ctx)
        grads = (_grad(grad, ctx.call, ctx.computed),)
        dx = grads[0] @ used if ctx.needs_input_grad[1] else None
        collector.take(rows, grads)
        collector.take_biases(grads)
        return _grads(ctx, dx, collector)


class ReplicatedLinear(torch.autograd.Function):
    """Applies a linear to what all ranks have; the input's gradient is added up over them, unless it stays partial."""

    @staticmethod
    def compute(call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and what is to be kept for backward."""
        here = arrived(local(x))
        rows, used, added = _cast_one(call, to_rows(here, 0), weight, bias)
        result = from_rows(torch.nn.functional.linear(rows, used, added), here.shape, 0)
        return _returned(call, result), _as_given(rows, here, x)

    @staticmethod
    def forward(ctx: Any, call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        result, kept = ReplicatedLinear.compute(call, x, weight, bias)
        _keep(ctx, call, x, (weight,), (bias,), kept)
        return result

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        call: OpContext = ctx.call
        rows, (used,), collector = _resume(ctx)
        grads = (_grad(grad, call, ctx.computed),)
        wants = _wants_input(ctx)
        if call.partial or not wants:  # nothing to send
            dx = grads[0] @ used if wants else None
            collector.take(rows, grads)
        else:
            take = None if rows is None else collector.take
            dx = call.how.schedule.replicated_linear_backward(
                call.wires, ColumnGrads(grads, rows, [used], take, ctx.dtype)
            )
        collector.take_biases(grads)
        return _grads(ctx, dx, collector)


FUNCTIONS: Final[dict[str, Any]] = {
    "gather_linear": GatherLinear,
    "linear_scatter": LinearScatter,
    "linear_reduce": LinearReduce,
    "replicated_linear": ReplicatedLinear,
}


def run(function: Any, call: OpContext, x: Tensor, *params: Tensor | None) -> Any:
    """Apply one of the functions above."""
    if not torch.is_grad_enabled():
        return function.compute(call, x, *params)[0]
    if is_transformed():
        return function.apply(call, x, *params)  # which says what torch.func would need
    return super(torch.autograd.Function, function).apply(call, x, *params)  # spares 2 µs of asking what is known


def _summed(
    product: Callable[[TPGroup, Tensor, Tensor], Tensor],
    call: OpContext,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
) -> tuple[Tensor, Tensor]:
    """Return a schedule's product, of which each rank has a term, with the bias; and what is to be kept."""
    here = arrived(local(x))
    rows, used, added = _cast_one(call, to_rows(here, dim), weight, bias)
    result = product(call.wires, rows, used)
    if added is not None:
        result += added
    return _returned(call, from_rows(result, here.shape, dim)), _as_given(rows, here, x)


def _keep(
    ctx: Any, call: OpContext, x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None], kept: Tensor
) -> None:
    """Keep what backward needs; see [Note: what is kept for backward]."""
    ctx.call, ctx.shape, ctx.dtype, ctx.computed = call, local(x).shape, x.dtype, kept.dtype
    ctx.biases = biases
    # Who checks before backward knows from when on a weight must not change; outputs may be nobody's, or empty yet.
    ctx.weights, saved = ((), weights) if x.requires_grad and call.check is None else (weights, ())
    needed = any(weight.requires_grad for weight in weights) or (call.anew and call.trains)
    ctx.save_for_backward(kept if needed else None, *saved)


def _resume(ctx: Any) -> tuple[Tensor | None, list[Tensor], Collector]:
    """Return rows, if kept, and weights as they were computed with, and what collects gradients."""
    kept, *saved = ctx.saved_tensors
    call, weights = ctx.call, [*saved, *ctx.weights]
    collector = Collector(call.how.fuse, weights, ctx.biases, ctx.needs_input_grad[2:])
    rows = None if kept is None else _rows(kept, call.dim)
    return rows, [_used(weight, ctx.computed) for weight in weights], collector


def _wants_input(ctx: Any) -> bool:
    """Tell whether this backward goes on to the input: where only weights' gradients are asked for, it does not."""
    return ctx.needs_input_grad[1] and executes(ctx.next_functions[0][0])


def _grads(ctx: Any, dx: Tensor | None, collector: Collector) -> tuple[Any, ...]:
    return (None, _input_grad(ctx, dx), *collector.weights, *collector.biases)


def _input_grad(ctx: Any, dx: Tensor | None) -> Tensor | None:
    """Return rows as what the input was."""
    if dx is None:
        return None
    call = ctx.call
    dx = from_rows(dx if dx.dtype is ctx.dtype else dx.to(ctx.dtype), ctx.shape, call.dim)
    return dx if call.given is None else wrapped(dx, call.mesh, call.given)


def _grad(grad: Tensor, call: OpContext, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an output as rows."""
    grad = unwrapped(grad, call.returned)
    return to_rows(grad if grad.dtype is dtype else grad.to(dtype), call.dim)


def _of_other_readers(call: OpContext, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gathered input's gradient, as rows: as it is on all ranks, or as this rank's term of a sum.

    [Note: other readers] What reads a gathered input beside the linears whose products were computed with the gather
    has a gradient of it: that of other linears is a term of a sum on each rank, that of operations on the DTensor is
    said to be the same on all. Where both meet, stock adds to each rank's term its share; so is it done here.
    """
    if grad is None:
        return None, None
    if is_partial(grad):
        return None, to_rows(arrived(local(grad)), call.dim)
    return to_rows(unwrapped(grad, call.whole), call.dim), None


def _constant(call: OpContext, results: Sequence[Tensor], params: Sequence[Tensor | None]) -> list[Tensor]:
    """Return what needs no gradient of the results of an input that needs none."""
    needs = [param is not None and param.requires_grad for param in params]
    return [result for i, result in enumerate(results) if i == call.count or not (needs[i] or needs[call.count + i])]


def _returned(call: OpContext, result: Tensor) -> Tensor:
    return result if call.returned is None else wrapped(result, call.mesh, call.returned)


def _as_given(rows: Tensor, here: Tensor, x: Tensor) -> Tensor:
    """Return what to keep of an input, of which ``here`` is the local part; see [Note: what is kept for backward]."""
    return x if rows is here or (rows.data_ptr() == here.data_ptr() and rows.dtype == here.dtype) else rows


def _rows(kept: Tensor, dim: int) -> Tensor:
    here = arrived(local(kept))
    return here if here.dim() == 2 else to_rows(here, dim)


def _used(weight: Tensor, dtype: torch.dtype) -> Tensor:
    found = local(weight)
    return found if found.dtype is dtype else found.to(dtype)


def _cast(
    call: OpContext, rows: Tensor, weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Return local tensors, as autocast would have them for linears."""
    used = [local(weight) for weight in weights]
    added = [None if bias is None else local(bias) for bias in biases]
    dtype = autocast_dtype(call.wires.kind, rows.dtype)
    if dtype is None:
        return rows, used, added
    biased = [None if bias is None else bias.to(dtype) for bias in added]
    return rows.to(dtype), [weight.to(dtype) for weight in used], biased


def _cast_one(
    call: OpContext, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return local tensors, as autocast would have them for a linear."""
    return cast(call.wires.kind, rows, local(weight), None if bias is None else local(bias))

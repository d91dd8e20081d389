"""The operators' autograd functions.

Each computes on rows, ``[sequence, features]``; forward and backward are one schedule's.

[Note: what is kept for backward] Rows are mostly a view of the input. Kept is the input itself, then, so that autograd
notices if somebody writes into it before backward. An input that needs no gradient is kept gathered, as stock keeps it:
its backward would be the only reason to communicate, and one rank alone may run that.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch_plugins.tp_linear.products import linear, weight_grad
from ovpatch_plugins.tp_linear.rows import arrived, from_rows, to_rows
from ovpatch_plugins.tp_linear.schedules import Schedule
from ovpatch_plugins.tp_linear.weights import accumulates, like, local
from ovpatch_plugins.tp_linear.wires import Wires


@dataclass(frozen=True)
class How:
    """How an operator is computed.

    Attributes:
        schedule: In which order.
        fuse: Add weights' gradients to what is there already, where nobody would notice.
    """

    schedule: Schedule
    fuse: bool = False


class Whole(enum.Enum):
    """What a gathered input is taken for, which decides what a gradient of it means; see [Note: other readers].

    [Note: other readers] What reads a gathered input beside the linears has a gradient on each rank. Under stock, a
    DTensor
    that is said to be replicated has the mean of them, where it meets the linears' terms of a sum; a local tensor has
    this rank's own. They differ where the ranks' gradients do.
    """

    LOCAL = "local"
    DTENSOR = "DTensor"


class Call(NamedTuple):
    """What an autograd function is told beside tensors."""

    how: How
    wires: Wires
    dim: int
    weights: int  # how many
    whole: Whole | None = None  # whether to return the gathered input as well
    check: Callable[[], None] | None = None  # called before backward
    keeps_gathered: bool = False  # because the input needs no gradient
    partial: bool = False  # the input's gradient is this rank's term only


def _without_autocast(backward: Callable[..., Any]) -> Any:
    """Compute in the dtypes of forward, also where a script calls backward under autocast."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_autocast_enabled(ctx.kind):
            return backward(ctx, *grads)
        with torch.autocast(ctx.kind, enabled=False):
            return backward(ctx, *grads)

    return run


class GatherLinear(torch.autograd.Function):
    """Gathers a sequence and applies linears to it; returns the gathered rows, too, where asked to."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs."""
        weights, biases = params[: call.weights], params[call.weights :]
        x = arrived(x)
        given = to_rows(x, call.dim)
        rows, used, added = _cast(given, weights, biases)
        schedule = call.how.schedule
        keeps = call.keeps_gathered or schedule.keeps_gathered
        whole: Tensor | None
        if call.whole and rows.dtype != given.dtype:  # autocast rounds for linears, and not for who else reads it
            gathered = whole = _gathered(given, call.wires)
            rounded = gathered.to(rows.dtype)
            outs = [linear(rounded, *params) for params in zip(used, added, strict=True)]
        else:
            rounded = None
            outs, whole = schedule.gather_linear(call.wires, rows, used, added, call.whole is not None or keeps)
        given_out = [*outs, whole] if call.whole and whole is not None else outs
        results = [from_rows(result, x.shape, call.dim) for result in given_out]
        kept: Tensor | None = _as_given(rows, x)
        if keeps:
            kept = whole if rounded is None else rounded
        if kept is whole and call.whole:
            kept = results[-1]  # itself, since whoever gets it may write into it
        if call.whole and call.keeps_gathered:
            ctx.mark_non_differentiable(results[-1])
            kept = None if kept is None else kept.detach()  # itself, it would stay alive for as long as the graph
        ctx.call, ctx.shape, ctx.dtype, ctx.kind = call, x.shape, x.dtype, x.device.type
        ctx.biases = biases
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, *weights)
        return tuple(results)

    @staticmethod
    @_without_autocast
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        call: Call = ctx.call
        if call.check is not None:
            call.check()
        kept, *weights = ctx.saved_tensors
        kept = _rows(kept, call.dim)
        outs, rest = grads[: call.weights], grads[call.weights :]
        rows = [None if grad is None else to_rows(grad.to(kept.dtype), call.dim) for grad in outs]
        other = None if not rest or rest[0] is None else to_rows(rest[0], call.dim)
        summed = call.whole is Whole.DTENSOR and other is not None
        collector = _Collector(ctx, weights)
        mine: Tensor | None = None
        if call.keeps_gathered:
            collector.take(kept, rows)
            collector.take_biases(rows)
        elif any(grad is not None for grad in rows):
            mine = call.how.schedule.gather_linear_backward(
                call.wires,
                rows,
                kept,
                [local(weight).to(kept.dtype) for weight in weights],
                collector.take if collector.needs_weights else None,
                ctx.dtype if ctx.needs_input_grad[1] else None,
                other / call.wires.world if other is not None and summed else None,
            )
            collector.take_biases(rows)
        if other is not None and not (summed and mine is not None):
            own = _own_rows(other, call.wires)
            mine = own.clone() if mine is None else mine + own  # not a view, which would keep all of it
        return _grads(ctx, mine if ctx.needs_input_grad[1] else None, collector)


class LinearScatter(torch.autograd.Function):
    """Applies a linear and adds up over the ranks; each keeps its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs."""
        rows, used, added = _begin(ctx, call, x, weight, bias)
        result = call.how.schedule.linear_scatter(call.wires, rows, used)
        if added is not None:
            result += added
        return from_rows(result, ctx.shape, call.dim)

    @staticmethod
    @_without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        call: Call = ctx.call
        rows, used, collector = _resume(ctx)

        def take(whole: Tensor, _: Any) -> None:
            collector.take(rows, [whole])
            collector.take_biases([whole])

        dx = call.how.schedule.linear_scatter_backward(
            call.wires,
            to_rows(grad.to(rows.dtype), call.dim),
            used,
            take if collector.needs_any else None,
            ctx.needs_input_grad[1],
        )
        return _grads(ctx, dx, collector)


class LinearReduce(torch.autograd.Function):
    """Applies a linear and adds up over the ranks."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs."""
        rows, used, added = _begin(ctx, call, x, weight, bias)
        result = call.how.schedule.linear_reduce(call.wires, rows, used)
        if added is not None:
            result += added
        return from_rows(result, ctx.shape, 0)

    @staticmethod
    @_without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        rows, used, collector = _resume(ctx)
        grads = [to_rows(grad.to(rows.dtype), 0)]
        dx = grads[0] @ used if ctx.needs_input_grad[1] else None
        collector.take(rows, grads)
        collector.take_biases(grads)
        return _grads(ctx, dx, collector)


class ReplicatedLinear(torch.autograd.Function):
    """Applies a linear to what all ranks have; the input's gradient is added up over them, unless it stays partial."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs."""
        return from_rows(torch.nn.functional.linear(*_begin(ctx, call, x, weight, bias)), ctx.shape, 0)

    @staticmethod
    @_without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of what forward was given."""
        call: Call = ctx.call
        rows, used, collector = _resume(ctx)
        grads = [to_rows(grad.to(rows.dtype), 0)]
        if call.partial or not ctx.needs_input_grad[1]:  # nothing to send
            dx = grads[0] @ used if ctx.needs_input_grad[1] else None
            collector.take(rows, grads)
        else:
            take = collector.take if collector.needs_weights else None
            dx = call.how.schedule.replicated_linear_backward(call.wires, grads, rows, [used], take, ctx.dtype)
        collector.take_biases(grads)
        return _grads(ctx, dx, collector)


def _begin(
    ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, weight and bias as they are computed with, of a linear alone; keep what backward needs."""
    x = arrived(x)
    rows, (used,), (added,) = _cast(to_rows(x, call.dim), (weight,), (bias,))
    ctx.call, ctx.shape, ctx.dtype, ctx.kind = call, x.shape, x.dtype, x.device.type
    ctx.biases = (bias,)
    ctx.save_for_backward(_as_given(rows, x), weight)
    return rows, used, added


def _resume(ctx: Any) -> tuple[Tensor, Tensor, _Collector]:
    """Return rows and weight as they were computed with, and what collects the gradients of weight and bias."""
    kept, weight = ctx.saved_tensors
    rows = _rows(kept, ctx.call.dim)
    return rows, local(weight).to(rows.dtype), _Collector(ctx, [weight])


def _grads(ctx: Any, dx: Tensor | None, collector: _Collector) -> tuple[Any, ...]:
    dx = None if dx is None else from_rows(dx.to(ctx.dtype), ctx.shape, ctx.call.dim)
    return (None, dx, *collector.weights, *collector.biases)


class _Collector:
    """Gathers the gradients of an operator's weights and biases, each as what the parameter is."""

    def __init__(self, ctx: Any, weights: Sequence[Tensor]) -> None:
        self._given_biases, self._fuse = ctx.biases, ctx.call.how.fuse
        self._wanted = ctx.needs_input_grad[2:]
        self.weights: list[Tensor | None] = [None] * len(weights)
        self.biases: list[Tensor | None] = [None] * len(weights)
        self._given = weights

    @property
    def needs_any(self) -> bool:
        """Whether any weight or bias needs a gradient."""
        return any(self._wanted)

    @property
    def needs_weights(self) -> bool:
        """Whether any weight needs a gradient."""
        return any(self._wanted[: len(self.weights)])

    def take(self, x: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Compute the weights' gradients from the whole input and the outputs' gradients."""
        for i, grad in enumerate(grads):
            if grad is not None and self._wanted[i]:
                self.weights[i] = self._weight(self._given[i], grad, x)

    def take_biases(self, grads: Sequence[Tensor | None]) -> None:
        """Compute the biases' gradients from the outputs' gradients."""
        for i, grad in enumerate(grads):
            bias = self._given_biases[i]
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
        return like(weight_grad(grad, x).to(weight.dtype), weight)


def _as_given(rows: Tensor, x: Tensor) -> Tensor:
    """Return what to keep of an input; see [Note: what is kept for backward]."""
    return x if rows.data_ptr() == x.data_ptr() and rows.dtype == x.dtype else rows


def _rows(kept: Tensor, dim: int) -> Tensor:
    return kept if kept.dim() == 2 else to_rows(kept, dim)


def _gathered(rows: Tensor, wires: Wires) -> Tensor:
    whole, pending = wires.all_gather(rows)
    pending.wait()
    return whole


def _own_rows(rows: Tensor, wires: Wires) -> Tensor:
    return rows.view(wires.world, -1, rows.shape[1])[wires.rank]


def _cast(
    rows: Tensor, weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Return local tensors, as autocast would have them for a linear."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        rows = rows.to(dtype)
        used = [local(weight).to(dtype) for weight in weights]
        return rows, used, [None if bias is None else local(bias).to(dtype) for bias in biases]
    return rows, [local(weight) for weight in weights], [None if bias is None else local(bias) for bias in biases]

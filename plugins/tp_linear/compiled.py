"""The operators as ``torch.library`` custom operators, for torch.compile.

[Note: opaque to the compiler] A traced collective becomes a node that waits where the next node reads it, and the
overlap inside of an operator would be lost; handles of collectives cannot be traced at all. So graphs get opaque
operators, which do at run time what the eager ones do. They take the group by name and lists of tensors, as operators
must, and keep this rank's rows for backward whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ovpatch_plugins.tp_linear import wires as wires_of
from ovpatch_plugins.tp_linear.counters import COUNTERS
from ovpatch_plugins.tp_linear.products import weight_grad
from ovpatch_plugins.tp_linear.rows import from_rows, to_rows
from ovpatch_plugins.tp_linear.schedules import Schedule, named
from ovpatch_plugins.tp_linear.wires import Wires


def gather_linear(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], group: dist.ProcessGroup, dim: int, schedule: Schedule
) -> list[Tensor]:
    """Return an output for each weight; as :func:`ovpatch_plugins.tp_linear.operators.gather_linear`."""
    rows, weights, biases = _cast(to_rows(x, dim), weights, biases)
    outs = _gather_linear(rows, weights, biases, group.group_name, schedule.name, str(x.dtype)[6:])
    return [from_rows(out, x.shape, dim) for out in outs]


def linear_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, dim: int, schedule: Schedule
) -> Tensor:
    """Return this rank's part of the sequence."""
    rows, (weight,), biases = _cast(to_rows(x, dim), [weight], [] if bias is None else [bias])
    return from_rows(_linear_scatter(rows, weight, biases, group.group_name, schedule.name), x.shape, dim)


def linear_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, schedule: Schedule
) -> Tensor:
    """Return the whole sequence on all ranks."""
    rows, (weight,), biases = _cast(to_rows(x, 0), [weight], [] if bias is None else [bias])
    result = _linear_reduce(rows, weight, group.group_name, schedule.name)
    return from_rows(result + biases[0] if biases else result, x.shape, 0)


def replicated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, schedule: Schedule, *, partial: bool
) -> Tensor:
    """Apply a linear to an input that all ranks have."""
    if partial:
        return torch.nn.functional.linear(x, weight, bias)
    rows, (weight,), biases = _cast(to_rows(x, 0), [weight], [] if bias is None else [bias])
    result = _replicated_linear(rows, weight, biases, group.group_name, schedule.name, str(x.dtype)[6:])
    return from_rows(result, x.shape, 0)


def _cast(rows: Tensor, weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return rows.to(dtype), [one.to(dtype) for one in weights], [one.to(dtype) for one in biases]
    return rows, weights, biases


def _group(name: Any) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)


def _of(group: str, like: Tensor) -> Wires:
    return wires_of.of(_group(group), like.device)


def _world(group: str) -> int:
    return _group(group).size()


def _at(name: str) -> Schedule:
    return named("chunk", int(name[5:])) if name.startswith("chunk") else named(name, 1)


def _or_none(biases: Sequence[Tensor], count: int) -> list[Tensor | None]:
    return list(biases) if biases else [None] * count


def _count() -> None:
    COUNTERS.calls += 1
    COUNTERS.compiled_calls += 1


class _Sums:
    """Weights' gradients, as a schedule has them computed."""

    def __init__(self, count: int) -> None:
        self.found: list[Tensor | None] = [None] * count

    def take(self, x: Tensor, grads: Sequence[Tensor | None]) -> None:
        self.found = [None if grad is None else weight_grad(grad, x) for grad in grads]


# ---------------------------------------------------------------- gather, then linears


@torch.library.custom_op("ovpatch::gather_linear", mutates_args=())
def _gather_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: str, schedule: str, dtype: str
) -> list[Tensor]:
    _count()
    outs, _ = _at(schedule).gather_linear(_of(group, x), x, weights, _or_none(biases, len(weights)), False)
    return outs


@_gather_linear.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: str, schedule: str, dtype: str
) -> list[Tensor]:
    return [x.new_empty((x.shape[0] * _world(group), weight.shape[0])) for weight in weights]


@torch.library.custom_op("ovpatch::gather_linear_backward", mutates_args=())
def _gather_linear_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    group: str,
    schedule: str,
    dtype: str,
    needs_x: bool,
    needs_weights: bool,
) -> list[Tensor]:
    at, wires, sums = _at(schedule), _of(group, x), _Sums(len(weights))
    if at.keeps_gathered and needs_weights:
        kept, pending = wires.all_gather(x)
        pending.wait()
    else:
        kept = x
    dx = at.gather_linear_backward(
        wires,
        [grad.contiguous() for grad in grads],
        kept,
        weights,
        sums.take if needs_weights else None,
        getattr(torch, dtype) if needs_x else None,
    )
    return [one for one in (dx, *sums.found) if one is not None]


@_gather_linear_backward.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    group: str,
    schedule: str,
    dtype: str,
    needs_x: bool,
    needs_weights: bool,
) -> list[Tensor]:
    found = [x.new_empty(x.shape, dtype=getattr(torch, dtype))] if needs_x else []
    return found + ([torch.empty_like(weight) for weight in weights] if needs_weights else [])


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, biases, *ctx.rest = inputs
    ctx.save_for_backward(x, *weights)
    ctx.dtype, ctx.biased = x.dtype, len(biases)
    ctx.needs = x.requires_grad, any(weight.requires_grad for weight in weights)


def _gather_grads(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    rows = len(x) * _world(ctx.rest[0])
    given = [
        weight.new_zeros((rows, len(weight))) if grad is None else grad
        for grad, weight in zip(grads, weights, strict=True)
    ]
    found = list(_gather_linear_backward(given, x, weights, *ctx.rest, *ctx.needs))
    dx = found.pop(0).to(ctx.dtype) if ctx.needs[0] else None
    biases = [grad.sum(0) for grad in given] if ctx.biased else []
    return dx, found or [None] * len(weights), biases, None, None, None


_gather_linear.register_autograd(_gather_grads, setup_context=_keep_gather)


# ---------------------------------------------------------------- linear, then reduce-scatter


@torch.library.custom_op("ovpatch::linear_scatter", mutates_args=())
def _linear_scatter(x: Tensor, weight: Tensor, biases: Sequence[Tensor], group: str, schedule: str) -> Tensor:
    _count()
    result = _at(schedule).linear_scatter(_of(group, x), x, weight)
    return result.add_(biases[0]) if biases else result


@_linear_scatter.register_fake
def _(x: Tensor, weight: Tensor, biases: Sequence[Tensor], group: str, schedule: str) -> Tensor:
    return x.new_empty((x.shape[0] // _world(group), weight.shape[0]))


@torch.library.custom_op("ovpatch::linear_scatter_backward", mutates_args=())
def _linear_scatter_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, needs_x: bool, needs_params: bool
) -> list[Tensor]:
    found: list[Tensor] = []

    def take(whole: Tensor, _: Any) -> None:
        found.extend((weight_grad(whole, x), whole.sum(0)))

    dx = _at(schedule).linear_scatter_backward(
        _of(group, x), grad.contiguous(), weight, take if needs_params else None, needs_x
    )
    return [one for one in (dx, *found) if one is not None]


@_linear_scatter_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, needs_x: bool, needs_params: bool
) -> list[Tensor]:
    params = [torch.empty_like(weight), weight.new_empty(weight.shape[0])] if needs_params else []
    return ([torch.empty_like(x)] if needs_x else []) + params


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, biases, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = len(biases)
    ctx.needs = x.requires_grad, weight.requires_grad or any(bias.requires_grad for bias in biases)


def _scatter_grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found: list[Any] = list(_linear_scatter_backward(grad, *ctx.saved_tensors, *ctx.rest, *ctx.needs))
    dx = found.pop(0) if ctx.needs[0] else None
    dw, db = found or (None, None)
    return dx, dw, [db] * ctx.biased, None, None


_linear_scatter.register_autograd(_scatter_grads, setup_context=_keep_scatter)


# ---------------------------------------------------------------- linear, then all-reduce


@torch.library.custom_op("ovpatch::linear_reduce", mutates_args=())
def _linear_reduce(x: Tensor, weight: Tensor, group: str, schedule: str) -> Tensor:
    _count()
    return _at(schedule).linear_reduce(_of(group, x), x, weight)


@_linear_reduce.register_fake
def _(x: Tensor, weight: Tensor, group: str, schedule: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _reduce_grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return grad @ weight, weight_grad(grad, x), None, None


_linear_reduce.register_autograd(_reduce_grads, setup_context=_keep)


# ---------------------------------------------------------------- linear of what all ranks have


@torch.library.custom_op("ovpatch::replicated_linear", mutates_args=())
def _replicated_linear(
    x: Tensor, weight: Tensor, biases: Sequence[Tensor], group: str, schedule: str, dtype: str
) -> Tensor:
    _count()
    return torch.nn.functional.linear(x, weight, biases[0] if biases else None)


@_replicated_linear.register_fake
def _(x: Tensor, weight: Tensor, biases: Sequence[Tensor], group: str, schedule: str, dtype: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("ovpatch::replicated_linear_backward", mutates_args=())
def _replicated_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    sums = _Sums(1)
    dx = _at(schedule).replicated_linear_backward(
        _of(group, x),
        [grad.contiguous()],
        x,
        [weight],
        sums.take if needs_weight else None,
        getattr(torch, dtype) if needs_x else None,
    )
    return [one for one in (dx, *sums.found) if one is not None]


@_replicated_linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    found = [torch.empty_like(x, dtype=getattr(torch, dtype))] if needs_x else []
    return found + ([torch.empty_like(weight)] if needs_weight else [])


def _keep_replicated(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, biases, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased, ctx.needs = len(biases), (x.requires_grad, weight.requires_grad)


def _replicated_grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    found: list[Any] = list(_replicated_linear_backward(grad, x, weight, *ctx.rest, *ctx.needs))
    dx = found.pop(0).to(x.dtype) if ctx.needs[0] else None
    return dx, found[0] if found else None, [grad.sum(0)] * ctx.biased, None, None, None


_replicated_linear.register_autograd(_replicated_grads, setup_context=_keep_replicated)

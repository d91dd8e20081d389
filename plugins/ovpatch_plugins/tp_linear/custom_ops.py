"""The operators as operators of a ``torch.library``, for torch.compile.

[Note: opaque to the compiler] A traced collective becomes a node that waits where the next node reads it, and the
overlap inside of an operator would be lost; handles of collectives cannot be traced at all. So graphs get opaque
operators, which do at run time what the eager ones do. They take the group by name, as operators must, and keep this
rank's rows for backward, to be gathered anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ovpatch_plugins.tp_linear import tp_group as wires_of
from ovpatch_plugins.tp_linear.gemm import cast, weight_grad
from ovpatch_plugins.tp_linear.layout import from_rows, to_rows
from ovpatch_plugins.tp_linear.report import COUNTERS
from ovpatch_plugins.tp_linear.schedules import Schedule, named
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads, WeightGrads
from ovpatch_plugins.tp_linear.tp_group import TPGroup


def run(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    dim: int,
    schedule: Schedule,
    *,
    partial: bool,
) -> Tensor:
    """Do what an autograd function does; see :data:`ovpatch_plugins.tp_linear.autograd.FUNCTIONS`."""
    if partial:
        return torch.nn.functional.linear(x, weight, bias)
    rows, used, added = cast(x.device.type, to_rows(x, dim), weight, bias)
    name, how = group.group_name, schedule.name
    if operator == "gather_linear":
        result = _gather_linear(rows, used, added, name, how, str(x.dtype)[6:])
    elif operator == "linear_scatter":
        result = _linear_scatter(rows, used, added, name, how)
    elif operator == "linear_reduce":
        result = _linear_reduce(rows, used, name, how)
        result = result if added is None else result + added
    else:
        result = _replicated_linear(rows, used, added, name, how, str(x.dtype)[6:])
    return from_rows(result, x.shape, dim)


def _group(name: Any) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)


def _of(group: str, like: Tensor) -> TPGroup:
    return wires_of.of(_group(group), like.device)


def _world(group: str) -> int:
    return _group(group).size()


def _at(name: str) -> Schedule:
    for kind in ("chunk", "auto"):
        if name.startswith(kind):
            return named(kind, int(name.removeprefix(kind)), anew=True)
    return named(name, 1)


def _count() -> None:
    COUNTERS.calls += 1
    COUNTERS.compiled_calls += 1


_LIBRARY: Final = torch.library.Library("ovpatch", "FRAGMENT")  # operators go with it


def _operator(function: Callable[..., Any]) -> Any:
    """Make an operator of a function; ``torch.library.custom_op`` would check results at each call, for 10 µs."""
    name = function.__name__[1:]
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.ovpatch, name).default


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say by a function of which shapes an operator's results are."""
    found: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(
        f"ovpatch::{name}", lib=_LIBRARY
    )
    return found


def _differentiate(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Say how an operator is differentiated, and that the operator which does so is not."""
    torch.library.register_autograd(f"ovpatch::{name}", backward, setup_context=keep, lib=_LIBRARY)
    torch.library.register_autograd(f"ovpatch::{name}_backward", _refuse, lib=_LIBRARY)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "a tensor-parallel linear of a compiled graph cannot be differentiated twice: set OVPATCH_TP_LINEAR_COMPILED=0"
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None and bias.requires_grad
    ctx.needs = x.requires_grad, weight.requires_grad


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _column_grads(backward: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of a linear whose features are cut, which an operator computes."""
    found = list(backward(grad, *ctx.saved_tensors, *ctx.rest, *ctx.needs)) if any(ctx.needs) else []
    dx = found.pop(0).to(ctx.saved_tensors[0].dtype) if ctx.needs[0] else None
    return dx, found[0] if found else None, grad.sum(0) if ctx.biased else None, None, None, None


def _shapes_of_column_grads(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    found = [torch.empty_like(x, dtype=_dtype(dtype))] if needs_x else []
    return [*found, torch.empty_like(weight)] if needs_weight else found


def _into(found: list[Tensor]) -> WeightGrads:
    """Return what puts weights' gradients into a list."""

    def take(x: Tensor, grads: Sequence[Tensor | None]) -> None:
        found.extend(weight_grad(grad, x) for grad in grads if grad is not None)

    return take


# ---------------------------------------------------------------- gather, then linear


@_operator
def _gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str) -> Tensor:
    _count()
    (out,), _ = _at(schedule).gather_linear(_of(group, x), x, [weight], [bias], False)
    return out


@_fake("gather_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str) -> Tensor:
    return x.new_empty((x.shape[0] * _world(group), weight.shape[0]))


@_operator
def _gather_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    found: list[Tensor] = []
    take, wanted = _into(found) if needs_weight else None, _dtype(dtype) if needs_x else None
    asked = ColumnGrads([grad.contiguous()], x, [weight], take, wanted, anew=True)
    dx = _at(schedule).gather_linear_backward(_of(group, x), asked)
    return found if dx is None else [dx, *found]


_fake("gather_linear_backward")(_shapes_of_column_grads)
_differentiate("gather_linear", functools.partial(_column_grads, _gather_linear_backward), _keep)


# ---------------------------------------------------------------- linear, then reduce-scatter


@_operator
def _linear_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str) -> Tensor:
    _count()
    result = _at(schedule).linear_scatter(_of(group, x), x, weight)
    return result if bias is None else result.add_(bias)


@_fake("linear_scatter")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str) -> Tensor:
    return x.new_empty((x.shape[0] // _world(group), weight.shape[0]))


@_operator
def _linear_scatter_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, needs_x: bool, needs_params: bool
) -> list[Tensor]:
    found: list[Tensor] = []

    def take(whole: Tensor, _: Any) -> None:
        found.extend((weight_grad(whole, x), whole.sum(0)))

    dx = _at(schedule).linear_scatter_backward(
        _of(group, x), grad.contiguous(), weight, take if needs_params else None, needs_x
    )
    return found if dx is None else [dx, *found]


@_fake("linear_scatter_backward")
def _(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, needs_x: bool, needs_params: bool
) -> list[Tensor]:
    params = [torch.empty_like(weight), weight.new_empty(weight.shape[0])] if needs_params else []
    return ([torch.empty_like(x)] if needs_x else []) + params


def _scatter_grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs_x, needs_params = ctx.needs[0], ctx.needs[1] or ctx.biased
    found: list[Any] = list(_linear_scatter_backward(grad, *ctx.saved_tensors, *ctx.rest, needs_x, needs_params))
    dx = found.pop(0) if needs_x else None
    dw, db = found or (None, None)
    return dx, dw, db if ctx.biased else None, None, None


_differentiate("linear_scatter", _scatter_grads, _keep)


# ---------------------------------------------------------------- linear, then all-reduce


@_operator
def _linear_reduce(x: Tensor, weight: Tensor, group: str, schedule: str) -> Tensor:
    _count()
    return _at(schedule).linear_reduce(_of(group, x), x, weight)


@_fake("linear_reduce")
def _(x: Tensor, weight: Tensor, group: str, schedule: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@_operator
def _linear_reduce_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight, weight_grad(grad, x)


@_fake("linear_reduce_backward")
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_reduce(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _reduce_grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_linear_reduce_backward(grad, *ctx.saved_tensors), None, None


_differentiate("linear_reduce", _reduce_grads, _keep_reduce)


# ---------------------------------------------------------------- linear of what all ranks have


@_operator
def _replicated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str) -> Tensor:
    _count()
    return torch.nn.functional.linear(x, weight, bias)


@_fake("replicated_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@_operator
def _replicated_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, needs_x: bool, needs_weight: bool
) -> list[Tensor]:
    found: list[Tensor] = []
    take, wanted = _into(found) if needs_weight else None, _dtype(dtype) if needs_x else None
    asked = ColumnGrads([grad.contiguous()], x, [weight], take, wanted)
    dx = _at(schedule).replicated_linear_backward(_of(group, x), asked)
    return found if dx is None else [dx, *found]


_fake("replicated_linear_backward")(_shapes_of_column_grads)
_differentiate("replicated_linear", functools.partial(_column_grads, _replicated_linear_backward), _keep)

"""The operators of :mod:`.operators` in a ``torch.library``, for torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ovpatch_plugins.tp_linear import tp_group
from ovpatch_plugins.tp_linear.layout import from_rows, to_rows
from ovpatch_plugins.tp_linear.operators import (
    OPERATORS,
    LocalLinear,
    ParamGrads,
    cast_operands,
    multiply_weight_grad,
)
from ovpatch_plugins.tp_linear.report import COUNTERS
from ovpatch_plugins.tp_linear.schedules import Schedule, find_schedule
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads
from ovpatch_plugins.tp_linear.tp_group import TPGroup

_FORWARD: Final = "(Tensor x, Tensor weight, Tensor? bias, str group, str schedule, str dtype) -> Tensor"
_BACKWARD: Final = (
    "(Tensor grad, Tensor x, Tensor weight, str group, str schedule, str dtype, "
    "bool needs_x, bool needs_weight, bool needs_bias) -> Tensor[]"
)

_LIBRARY: Final = torch.library.Library("ovpatch", "FRAGMENT")  # its operators go with it


class CustomOp:
    """One operator, opaque to the compiler.

    [Note: opaque to the compiler] A traced collective becomes a node that waits where the next node reads it, which
    ends the overlap inside an operator; a collective's handle cannot be traced at all. So a graph gets one node, which
    does at run time what the eager operator does. It takes the group by name, as operators must, and backward gathers
    this rank's rows again.
    """

    def __init__(self, operator: LocalLinear) -> None:
        self._operator = operator
        self._forward = self._define("", _FORWARD, self._compute, self._fake)
        self._backward = self._define("_backward", _BACKWARD, self._compute_grads, self._fake_grads)
        name = f"ovpatch::{operator.name}"
        torch.library.register_autograd(name, self._differentiate, setup_context=_keep, lib=_LIBRARY)
        torch.library.register_autograd(f"{name}_backward", _refuse, lib=_LIBRARY)

    def _define(self, suffix: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        name = self._operator.name + suffix
        _LIBRARY.define(name + schema)  # torch.library.custom_op checks results at each call, which costs 10 µs
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ovpatch::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.ovpatch, name).default

    def __call__(self, *args: Any) -> Tensor:
        """Compute on rows; arguments as in :data:`_FORWARD`."""
        found: Tensor = self._forward(*args)
        return found

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str) -> Tensor:
        COUNTERS.calls += 1
        COUNTERS.compiled_calls += 1
        return self._operator.forward(_parse_schedule(schedule), _find_ranks(group, x), x, weight, bias)

    def _fake(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str) -> Tensor:
        world = _find_group(group).size()
        return x.new_empty((self._operator.count_rows(x.shape[0], world), weight.shape[0]))

    def _compute_grads(
        self, grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, *needs: bool
    ) -> list[Tensor]:
        needs_x, needs_weight, needs_bias = needs
        # The weight stands for the bias as well, of which only the dtype counts.
        params = ParamGrads(multiply_weight_grad, [weight], [weight], (needs_weight, needs_bias))
        take = params.compute_weights if needs_weight else None
        wanted = _find_dtype(dtype) if needs_x else None
        asked = ColumnGrads([grad.contiguous()], x, [weight], take, wanted, anew=True)
        dx = self._operator.backward(_parse_schedule(schedule), _find_ranks(group, x), asked, params)
        return [found for found in (dx, *params.weights, *params.biases) if found is not None]

    def _fake_grads(
        self, grad: Tensor, x: Tensor, weight: Tensor, group: str, schedule: str, dtype: str, *needs: bool
    ) -> list[Tensor]:
        needs_x, needs_weight, needs_bias = needs
        summed = _find_dtype(dtype) if self._operator.sums_input_grad else x.dtype
        found = [torch.empty_like(x, dtype=summed)] if needs_x else []
        found += [torch.empty_like(weight)] if needs_weight else []
        return [*found, weight.new_empty(weight.shape[0])] if needs_bias else found

    def _differentiate(self, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathers = self._operator.gathers_grad
        needs = needs_x, needs_weight, needs_bias and gathers  # else the compiler can fuse the bias' gradient
        found = list(self._backward(grad, x, weight, *ctx.rest, *needs)) if any(needs) else []
        dx = found.pop(0).to(x.dtype) if needs_x else None
        dw = found.pop(0) if needs_weight else None
        db = None if not needs_bias else found.pop(0) if gathers else grad.sum(0)
        return dx, dw, db, None, None, None


def compute_linear(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    dim: int,
    schedule: Schedule,
) -> Tensor:
    """Compute a linear as a node of a graph: ``[.., s, .., k]``, ``[n, k]`` and ``[n]`` or None.

    The operator's name is one of :data:`~ovpatch_plugins.tp_linear.operators.OPERATORS`; dimension ``dim`` of the input
    comes first in rows.
    """
    if operator == LocalLinear.name:
        return torch.nn.functional.linear(x, weight, bias)
    rows, (used,), (added,) = cast_operands(x.device.type, to_rows(x, dim), [weight], [bias])
    last = added if operator == "linear_reduce" else None  # which the compiler can fuse with what follows
    first = added if last is None else None
    result = _CUSTOM_OPS[operator](rows, used, first, group.group_name, schedule.name, str(x.dtype)[6:])
    return from_rows(result if last is None else result + last, x.shape, dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "a tensor-parallel linear of a compiled graph cannot be differentiated twice: set OVPATCH_TP_LINEAR_COMPILED=0"
    )


def _find_group(name: Any) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)


def _find_ranks(group: str, x: Tensor) -> TPGroup:
    return tp_group.get_tp_group(_find_group(group), x.device)


def _parse_schedule(name: str) -> Schedule:
    for kind in ("chunk", "auto"):
        if name.startswith(kind):
            return find_schedule(kind, int(name.removeprefix(kind)), anew=True)
    return find_schedule(name, 1)


def _find_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


_CUSTOM_OPS: Final = {name: CustomOp(operator) for name, operator in OPERATORS.items() if name != LocalLinear.name}

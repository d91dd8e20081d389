"""The operators on rows: a linear whose weight is cut over the ranks, with its collective.

Each is defined here once. :mod:`.autograd` computes it eagerly; a ``torch.library`` has it for torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ovpatch.overlap.tensor_parallel import operator_counts, tp_group
from ovpatch.overlap.tensor_parallel.layout import from_rows, get_local, to_rows, wrap_grad
from ovpatch.overlap.tensor_parallel.schedules import Schedule, parse_schedule
from ovpatch.overlap.tensor_parallel.schedules.stock import ColumnGrads, compute_weight_grad, linear
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.overlap.tensors.linear_ops import DELAYED_WGRAD, autocast_dtype

WeightGrad = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""Computes a weight's gradient, from the weight, the output's gradient ``[M, n]`` and the whole input ``[M, k]``.

Returns it in the weight's class and dtype, or None if it has been added to the one that is already there.
"""


def multiply_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the product; see :data:`WeightGrad`."""
    found = compute_weight_grad(grad, x)
    return wrap_grad(found if found.dtype is weight.dtype else found.to(weight.dtype), weight)


def accumulate_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add to the gradient that is already there as part of the product, where no hook would miss it."""
    target = _accumulation_target(weight)
    if target is None:
        return multiply_weight_grad(weight, grad, x)
    if target.dtype == grad.dtype:
        target.addmm_(grad.t(), x)
    else:
        target.add_(compute_weight_grad(grad, x))
    return None


class ParamGrads:
    """Gradients of an operator's weights and biases, each of the parameter's class and dtype.

    ``compute`` computes a weight's. ``wanted`` tells which of the weights, and then of the biases, need a gradient.
    ``leaves`` are the weights themselves where a checkpoint has given others for them.
    """

    __slots__ = (
        "_biases",
        "_compute",
        "_wanted",
        "_weights",
        "biases",
        "leaves",
        "needs_any",
        "weights",
    )

    def __init__(
        self,
        compute: WeightGrad,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> None:
        self._compute, self._weights, self._biases, self._wanted = compute, weights, biases, wanted
        self.leaves, self.needs_any = (
            weights,
            any(wanted),
        )  # whether any weight or bias needs a gradient
        self.weights: list[Tensor | None] = [None] * len(weights)  # gradients of the weights
        self.biases: list[Tensor | None] = [None] * len(weights)  # gradients of the biases

    def compute_weights(self, x: Tensor | None, grads: Sequence[Tensor | None]) -> None:
        """Compute the weights' gradients from the whole input ``[M, k]`` and the outputs' gradients ``[M, n_i]``."""
        take = DELAYED_WGRAD.take
        for i, grad in enumerate(grads):
            if x is not None and grad is not None and self._wanted[i]:
                weight = self._weights[i]
                if take is None or not take(
                    self.leaves[i], functools.partial(self._compute, weight, grad, x)
                ):
                    self.weights[i] = self._compute(weight, grad, x)

    def compute_biases(self, grads: Sequence[Tensor | None]) -> None:
        """Compute the biases' gradients from those of the outputs, ``[M, n_i]``."""
        for i, grad in enumerate(grads):
            bias = self._biases[i]
            if bias is not None and grad is not None and self._wanted[len(self.weights) + i]:
                self.biases[i] = wrap_grad(grad.sum(0).to(bias.dtype), bias)


def _accumulation_target(weight: Tensor) -> Tensor | None:
    """Return the tensor to which the weight's gradient can be added behind autograd's back, or None.

    It is ``weight.main_grad``, Megatron's name, or else the gradient of earlier microbatches. A weight with hooks has
    none: they would not be called.
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
    return get_local(target)


def _is_accumulated(weight: Tensor) -> bool:
    """Return whether the running backward adds to ``weight.grad``: with ``inputs=``, it adds to theirs alone."""
    if not weight.is_leaf:
        return True
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() returns this very gradient
        return False


class LocalLinear:
    """A linear of an input that all ranks have; nothing is sent, and the input's gradient is a term of a sum.

    This is also the interface of the other operators. ``m`` is a rank's number of rows, ``M = world * m``.
    """

    name = "local_linear"  # in :data:`OPERATORS` and in ``torch.ops.ovpatch``
    sums_input_grad = (
        False  # whether the input's gradient is summed over the ranks, in ``asked.input_dtype``
    )
    gathers_rows = False  # whether outputs have the rows of all ranks
    # Whether outputs have the rows of one rank, so that backward gathers their gradient; all ranks run it alike then.
    gathers_grad = False

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return ``[m, n]`` or ``[M, n]``, from ``[m, k]`` or ``[M, k]``, ``[n, k]`` and ``[n]`` or None."""
        return linear(x, weight, bias)

    def backward(
        self, schedule: Schedule, ranks: TPGroup, asked: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        """Return the input's gradient on this rank, None if it needs none; ``params`` gets the others.

        ``asked`` has the outputs' gradients, and what forward has kept.
        """
        (grad,), (weight,) = asked.grads, asked.weights
        assert grad is not None
        dx = grad @ weight if asked.input_dtype is not None else None
        params.compute_weights(asked.kept, asked.grads)
        params.compute_biases(asked.grads)
        return dx


class GatherLinear(LocalLinear):
    """Gathers the input, ``[m, k]``, and applies a linear to it.

    Several linears may share the gather: forward is the schedule's :meth:`~Schedule.gather_linear` then, and backward
    is the same.
    """

    name = "gather_linear"
    sums_input_grad = gathers_rows = True

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return schedule.gather_linear(ranks, x, [weight], [bias], False)[0][0]

    def backward(
        self, schedule: Schedule, ranks: TPGroup, asked: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        dx = schedule.gather_linear_backward(ranks, asked)
        params.compute_biases(asked.grads)
        return dx


class LinearScatter(LocalLinear):
    """Applies a linear to ``[M, k]``, sums over the ranks, and leaves each rank its rows."""

    name = "linear_scatter"
    gathers_grad = True

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return schedule.linear_scatter(ranks, x, weight, _take_share(bias, ranks))

    def backward(
        self, schedule: Schedule, ranks: TPGroup, asked: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        (grad,), (weight,) = asked.grads, asked.weights
        assert grad is not None

        def compute_params(whole: Tensor, _: Sequence[Tensor | None]) -> None:
            params.compute_weights(asked.kept, (whole,))
            params.compute_biases((whole,))

        take = compute_params if params.needs_any else None
        needs_input = asked.input_dtype is not None
        if asked.gather is not None:
            return schedule.scatter_backward_of_gather(asked.gather, weight, take, needs_input)
        return schedule.linear_scatter_backward(ranks, grad, weight, take, needs_input)


class LinearScatterThenBias(LinearScatter):
    """Adds this rank's bias to the sum, for callers whose biases are the same on all ranks."""

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        rows = schedule.linear_scatter(ranks, x, weight)
        return rows if bias is None else rows.add_(bias)


class LinearReduce(LocalLinear):
    """Applies a linear to ``[M, k]``, and sums over the ranks."""

    name = "linear_reduce"

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return schedule.linear_reduce(ranks, x, weight, _take_share(bias, ranks))


class ReplicatedLinear(LocalLinear):
    """Applies a linear to an input that all ranks have, and sums the input's gradient over them."""

    name = "replicated_linear"
    sums_input_grad = True

    def backward(
        self, schedule: Schedule, ranks: TPGroup, asked: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        if asked.input_dtype is None:  # nothing to send
            return super().backward(schedule, ranks, asked, params)
        dx = schedule.replicated_linear_backward(ranks, asked)
        params.compute_biases(asked.grads)
        return dx


GATHER_LINEAR: Final = GatherLinear()

OPERATORS: Final[dict[str, LocalLinear]] = {
    operator.name: operator
    for operator in (
        GATHER_LINEAR,
        LinearScatter(),
        LinearReduce(),
        ReplicatedLinear(),
        LocalLinear(),
    )
}


def cast_operands(
    kind: str, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the operands of linears in the dtype of autocast on a kind of device; unchanged if it is off."""
    dtype = autocast_dtype(kind, rows.dtype)
    if dtype is None:
        return rows, weights, biases
    cast = [None if bias is None else bias.to(dtype) for bias in biases]
    return rows.to(dtype), [weight.to(dtype) for weight in weights], cast


def _take_share(bias: Tensor | None, ranks: TPGroup) -> Tensor | None:
    """Return this rank's term of a bias that every rank has.

    DTensor makes a replicated bias a term of the sum by this division. So the mean of the ranks' biases is added where
    training has let these copies drift apart, and equal copies give the bits of stock PyTorch.
    """
    return None if bias is None else bias / ranks.world


# --- for torch.compile ---


_FORWARD: Final = (
    "(Tensor x, Tensor weight, Tensor? bias, str group, str schedule, str dtype) -> Tensor"
)
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
        torch.library.register_autograd(
            name, self._differentiate, setup_context=_keep, lib=_LIBRARY
        )
        torch.library.register_autograd(f"{name}_backward", _refuse, lib=_LIBRARY)

    def _define(
        self, suffix: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
    ) -> Any:
        name = self._operator.name + suffix
        _LIBRARY.define(name + schema)  # torch.library.custom_op checks results at each call
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ovpatch::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.ovpatch, name).default

    def __call__(self, *args: Any) -> Tensor:
        """Compute on rows; arguments as in :data:`_FORWARD`."""
        found: Tensor = self._forward(*args)
        return found

    def _compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str
    ) -> Tensor:
        operator_counts.counts.calls += 1
        operator_counts.counts.compiled_calls += 1
        return self._operator.forward(
            parse_schedule(schedule), _find_ranks(group, x), x, weight, bias
        )

    def _fake(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str, dtype: str
    ) -> Tensor:
        rows, world = x.shape[0], _find_group(group).size()
        rows = (
            rows * world
            if self._operator.gathers_rows
            else rows // world
            if self._operator.gathers_grad
            else rows
        )
        return x.new_empty((rows, weight.shape[0]))

    def _compute_grads(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        group: str,
        schedule: str,
        dtype: str,
        *needs: bool,
    ) -> list[Tensor]:
        needs_x, needs_weight, needs_bias = needs
        # The weight stands for the bias as well: only its dtype counts.
        params = ParamGrads(multiply_weight_grad, [weight], [weight], (needs_weight, needs_bias))
        take = params.compute_weights if needs_weight else None
        wanted = getattr(torch, dtype) if needs_x else None
        asked = ColumnGrads([grad.contiguous()], x, [weight], take, wanted, anew=True)
        dx = self._operator.backward(parse_schedule(schedule), _find_ranks(group, x), asked, params)
        return [found for found in (dx, *params.weights, *params.biases) if found is not None]

    def _fake_grads(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        group: str,
        schedule: str,
        dtype: str,
        *needs: bool,
    ) -> list[Tensor]:
        needs_x, needs_weight, needs_bias = needs
        summed = getattr(torch, dtype) if self._operator.sums_input_grad else x.dtype
        found = [torch.empty_like(x, dtype=summed)] if needs_x else []
        found += [torch.empty_like(weight)] if needs_weight else []
        return [*found, weight.new_empty(weight.shape[0])] if needs_bias else found

    def _differentiate(self, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathers = self._operator.gathers_grad
        needs = (
            needs_x,
            needs_weight,
            needs_bias and gathers,
        )  # else the compiler can fuse the bias' gradient
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

    The operator's name is one of :data:`OPERATORS`; dimension ``dim`` of the input comes first in rows.
    """
    if operator == LocalLinear.name:
        return torch.nn.functional.linear(x, weight, bias)
    rows, (used,), (added,) = cast_operands(x.device.type, to_rows(x, dim), [weight], [bias])
    result = _CUSTOM_OPS[operator](
        rows, used, added, group.group_name, schedule.name, str(x.dtype)[6:]
    )
    return from_rows(result, x.shape, dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, *ctx.rest = inputs
    ctx.save_for_backward(x, weight)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "a tensor-parallel linear of a compiled graph cannot be differentiated twice: set "
        "OVPATCH_TP_LINEAR_COMPILED=0"
    )


def _find_group(name: Any) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)


def _find_ranks(group: str, x: Tensor) -> TPGroup:
    return tp_group.get_tp_group(_find_group(group), x.device)


_CUSTOM_OPS: Final = {
    name: CustomOp(operator) for name, operator in OPERATORS.items() if name != LocalLinear.name
}

"""The operators on rows: a linear whose weight is sharded over the ranks, with its collective.

Each operator is defined here once, and :mod:`.tp_autograd` computes it. :mod:`.graph_pass` puts operators without
gradients into compiled graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.tensor_parallel import operator_counts
from ovpatch.overlap.tensor_parallel.layout import get_local, wrap_grad
from ovpatch.overlap.tensor_parallel.schedules import Schedule, parse_schedule
from ovpatch.overlap.tensor_parallel.schedules.stock import ColumnGrads, compute_weight_grad, linear
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup, resolve_group, resolve_tp_group
from ovpatch.overlap.tensors.linear_ops import DELAYED_WGRAD, autocast_dtype

WeightGrad = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""Computes a weight's gradient, from the weight, the output's gradient ``[M, n]`` and the gathered input ``[M, k]``.

Returns the gradient in the weight's class and dtype; None if it was added to an existing gradient.
"""


def multiply_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the GEMM of a weight's gradient; see :data:`WeightGrad`."""
    result = compute_weight_grad(grad, x)
    return wrap_grad(result if result.dtype is weight.dtype else result.to(weight.dtype), weight)


def accumulate_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add to the existing gradient as part of the GEMM, unless a hook would miss that; see :data:`WeightGrad`."""
    target = _find_accumulation_target(weight)
    if target is None:
        return multiply_weight_grad(weight, grad, x)
    # A GEMM can add only to a tensor of its operands' dtype.
    if target.dtype == grad.dtype:
        target.addmm_(grad.t(), x)
    else:
        target.add_(compute_weight_grad(grad, x))
    return None


class ParamGrads:
    """The gradients of an operator's weights and biases, each in the parameter's class and dtype.

    Args:
        compute: Computes a weight's gradient.
        weights: The weights.
        biases: Their biases.
        is_needed: Whether each weight, and then whether each bias, needs a gradient.

    Attributes:
        leaves: The parameters of the script, if a checkpoint has replaced them by other weights.
        needs_any: Whether any weight or bias needs a gradient.
        weights: The gradients of the weights.
        biases: The gradients of the biases.
    """

    __slots__ = (
        "_biases",
        "_compute",
        "_is_needed",
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
        is_needed: Sequence[bool],
    ) -> None:
        self._compute = compute
        self._weights = weights
        self._biases = biases
        self._is_needed = is_needed
        self.leaves = weights
        self.needs_any = any(is_needed)
        self.weights: list[Tensor | None] = [None] * len(weights)
        self.biases: list[Tensor | None] = [None] * len(weights)

    def compute_weights(self, x: Tensor | None, grads: Sequence[Tensor | None]) -> None:
        """Compute the weights' gradients from the gathered input ``[M, k]`` and the outputs' gradients ``[M, n_i]``."""
        take = DELAYED_WGRAD.take
        for i, grad in enumerate(grads):
            if x is not None and grad is not None and self._is_needed[i]:
                weight = self._weights[i]
                # A pipeline may take the GEMM to compute it after a send.
                if take is None or not take(
                    self.leaves[i], functools.partial(self._compute, weight, grad, x)
                ):
                    self.weights[i] = self._compute(weight, grad, x)

    def compute_biases(self, grads: Sequence[Tensor | None]) -> None:
        """Compute the biases' gradients from the outputs' gradients, ``[M, n_i]``."""
        for i, grad in enumerate(grads):
            bias = self._biases[i]
            if bias is not None and grad is not None and self._is_needed[len(self.weights) + i]:
                self.biases[i] = wrap_grad(grad.sum(0).to(bias.dtype), bias)


def _find_accumulation_target(weight: Tensor) -> Tensor | None:
    """Return the tensor to which the weight's gradient can be added outside of autograd, or None.

    This is ``weight.main_grad``, a name of Megatron's, or otherwise the gradient of earlier microbatches. A weight with
    hooks has no such tensor, because its hooks would not be called.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None and (not weight.is_leaf or weight.grad is None):
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    if not _receives_grad(weight):
        return None
    target = weight.grad if main_grad is None else main_grad
    assert target is not None
    return get_local(target)


def _receives_grad(weight: Tensor) -> bool:
    """Return whether the running backward adds to ``weight.grad``.

    With ``inputs=``, a backward adds only to the gradients of these inputs.
    """
    if not weight.is_leaf:
        return True
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    # The engine raises this error if torch.autograd.grad() returns this very gradient.
    except RuntimeError:
        return False


class LocalLinear:
    """A linear of an input that all ranks have.

    This operator sends nothing, and the input's gradient is a term of a sum over the ranks. This class is also the
    interface of the other operators. ``m`` is a rank's number of rows, ``M = world * m``.

    Attributes:
        name: The name in :data:`OPERATORS`.
        sums_input_grad: Whether ranks sum the input's gradient, in ``request.input_grad_dtype``.
        gathers_rows: Whether outputs have the rows of all ranks.
        gathers_grad: Whether outputs have the rows of one rank, so that backward gathers their gradient. All ranks then
            run the same backward.
    """

    name = "local_linear"
    sums_input_grad = False
    gathers_rows = False
    gathers_grad = False

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return ``[m, n]`` or ``[M, n]``, from ``[m, k]`` or ``[M, k]``, ``[n, k]`` and ``[n]`` or None."""
        return linear(x, weight, bias)

    def backward(
        self, schedule: Schedule, ranks: TPGroup, request: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        """Return the input's gradient on this rank; None if it needs none.

        Args:
            schedule: The order of GEMMs and collectives.
            ranks: The ranks.
            request: The outputs' gradients, and the tensors that forward saved.
            params: Gets the gradients of weights and biases.
        """
        (grad,), (weight,) = request.output_grads, request.weights
        assert grad is not None
        input_grad = grad @ weight if request.input_grad_dtype is not None else None
        params.compute_weights(request.saved_input, request.output_grads)
        params.compute_biases(request.output_grads)
        return input_grad


class GatherLinear(LocalLinear):
    """An operator that gathers the input, ``[m, k]``, and applies a linear to it.

    If several linears share the gather, forward calls :meth:`.Schedule.gather_linear` itself, and backward is the same.
    """

    name = "gather_linear"
    sums_input_grad = True
    gathers_rows = True

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return schedule.gather_linear(ranks, x, [weight], [bias], False)[0][0]

    def backward(
        self, schedule: Schedule, ranks: TPGroup, request: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        input_grad = schedule.gather_linear_backward(ranks, request)
        params.compute_biases(request.output_grads)
        return input_grad


class LinearScatter(LocalLinear):
    """An operator that applies a linear to ``[M, k]``, sums over the ranks, and leaves each rank its rows."""

    name = "linear_scatter"
    gathers_grad = True

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return schedule.linear_scatter(ranks, x, weight, _share_bias(bias, ranks))

    def backward(
        self, schedule: Schedule, ranks: TPGroup, request: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        (grad,), (weight,) = request.output_grads, request.weights
        assert grad is not None

        # The schedule calls this with the gathered gradient, which weights and biases need.
        def compute_params(gathered: Tensor, _: Sequence[Tensor | None]) -> None:
            params.compute_weights(request.saved_input, (gathered,))
            params.compute_biases((gathered,))

        compute_weight_grads = compute_params if params.needs_any else None
        needs_input = request.input_grad_dtype is not None
        if request.grad_gather is not None:
            return schedule.finish_scatter_backward(
                request.grad_gather, weight, compute_weight_grads, needs_input
            )
        return schedule.linear_scatter_backward(
            ranks, grad, weight, compute_weight_grads, needs_input
        )


class LinearScatterThenBias(LinearScatter):
    """An operator that adds this rank's bias to the sum, for callers with the same biases on all ranks."""

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        rows = schedule.linear_scatter(ranks, x, weight)
        # The rows are new memory of the collective, so the sum in place changes no tensor of the caller.
        return rows if bias is None else rows.add_(bias)


class LinearReduce(LocalLinear):
    """An operator that applies a linear to ``[M, k]``, and sums over the ranks."""

    name = "linear_reduce"

    def forward(
        self, schedule: Schedule, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return schedule.linear_reduce(ranks, x, weight, _share_bias(bias, ranks))


class ReplicatedLinear(LocalLinear):
    """An operator that applies a linear to an input that all ranks have, and sums the input's gradient over them."""

    name = "replicated_linear"
    sums_input_grad = True

    def backward(
        self, schedule: Schedule, ranks: TPGroup, request: ColumnGrads, params: ParamGrads
    ) -> Tensor | None:
        # Without a gradient of the input, there is nothing to sum over the ranks.
        if request.input_grad_dtype is None:
            return super().backward(schedule, ranks, request, params)
        input_grad = schedule.replicated_linear_backward(ranks, request)
        params.compute_biases(request.output_grads)
        return input_grad


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
    """Return the operands of linears in autocast's dtype for a type of device; unchanged if autocast is off."""
    dtype = autocast_dtype(kind, rows.dtype)
    if dtype is None:
        return rows, weights, biases
    cast = [None if bias is None else bias.to(dtype) for bias in biases]
    return rows.to(dtype), [weight.to(dtype) for weight in weights], cast


def _share_bias(bias: Tensor | None, ranks: TPGroup) -> Tensor | None:
    """Return this rank's term of a bias that every rank has.

    DTensor makes a replicated bias a term of the sum by this division. So the sum has the mean of the ranks' biases if
    training has let these copies drift apart, and equal copies give the bits of stock PyTorch.
    """
    return None if bias is None else bias / ranks.world


# --- for compiled graphs ---
#
# A traced collective becomes a node that waits before the next node reads its result, which ends the overlap inside an
# operator. The handle of a collective cannot be traced at all. So a graph gets one node for GEMMs and their collective,
# which computes at run time as the eager operators do. A node takes its group and its schedule by name, because graphs
# keep no objects.

# The operators live as long as this object.
_LIBRARY: Final = torch.library.Library("ovpatch", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    # torch.library.custom_op would check results at each call, which takes host time.
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ovpatch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ovpatch, name).default


def _gather_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    schedule: str,
    needs_gathered: bool,
) -> list[Tensor]:
    _count_call()
    outputs, gathered = parse_schedule(schedule).gather_linear(
        resolve_tp_group(group, x.device), x.contiguous(), weights, biases, needs_gathered
    )
    if not needs_gathered:
        return outputs
    assert gathered is not None
    return [*outputs, gathered]


def _fake_gather_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    schedule: str,
    needs_gathered: bool,
) -> list[Tensor]:
    rows = x.shape[0] * resolve_group(group).size()
    outputs = [x.new_empty((rows, weight.shape[0])) for weight in weights]
    return [*outputs, x.new_empty((rows, x.shape[1]))] if needs_gathered else outputs


def _linear_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str
) -> Tensor:
    _count_call()
    return parse_schedule(schedule).linear_scatter(
        resolve_tp_group(group, x.device), x.contiguous(), weight, bias
    )


def _fake_linear_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, schedule: str
) -> Tensor:
    return x.new_empty((x.shape[0] // resolve_group(group).size(), weight.shape[0]))


def _input_grads_scatter(
    grads: Sequence[Tensor], weights: Sequence[Tensor], group: str, schedule: str
) -> Tensor:
    _count_call()
    request = ColumnGrads(grads, None, weights, None, grads[0].dtype)
    result = parse_schedule(schedule).gather_linear_backward(
        resolve_tp_group(group, grads[0].device), request
    )
    assert result is not None
    return result


def _fake_input_grads_scatter(
    grads: Sequence[Tensor], weights: Sequence[Tensor], group: str, schedule: str
) -> Tensor:
    rows = grads[0].shape[0] // resolve_group(group).size()
    return grads[0].new_empty((rows, weights[0].shape[1]))


def _count_call() -> None:
    # A graph calls no code of the feature, so the operators count themselves.
    operator_counts.counts.calls += 1
    operator_counts.counts.compiled_calls += 1


# Weights have the shapes in which schedules take them, so that no call transposes a weight.

GATHER_LINEARS: Final = _define(
    "gather_linears(Tensor x, Tensor[] weights, Tensor?[] biases, str group, str schedule, bool needs_gathered)"
    " -> Tensor[]",
    _gather_linears,
    _fake_gather_linears,
)
"""Gathers rows ``[m, k]``, and applies linears with weights ``[n_i, k]`` and biases ``[n_i]`` or None.

Returns ``[world * m, n_i]`` for each weight. With ``needs_gathered`` the gathered rows come last.
"""

LINEAR_SCATTER: Final = _define(
    "linear_scatter(Tensor x, Tensor weight, Tensor? bias, str group, str schedule) -> Tensor",
    _linear_scatter,
    _fake_linear_scatter,
)
"""Applies a linear with weight ``[n, k]`` to ``[world * m, k]``, and sums over the ranks.

Returns this rank's rows, ``[m, n]``. ``bias``, ``[n]``, is this rank's term of the bias.
"""

INPUT_GRADS_SCATTER: Final = _define(
    "input_grads_scatter(Tensor[] grads, Tensor[] weights, str group, str schedule) -> Tensor",
    _input_grads_scatter,
    _fake_input_grads_scatter,
)
"""Sums the GEMMs of ``[world * m, n_i]`` and ``[n_i, k]`` over the operands and the ranks.

Such a sum is the gradient of an input that several linears share. Returns this rank's rows, ``[m, k]``.
"""

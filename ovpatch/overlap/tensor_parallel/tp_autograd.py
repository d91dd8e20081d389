"""The eager operators: autograd functions around :mod:`.operators`.

They turn activations into rows, ``[sequence, features]``, and back. Inputs and outputs may be DTensors; an
:class:`OpContext` has their placements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.autograd import will_execute
from ovpatch.overlap.tensor_parallel.layout import (
    PLAIN,
    from_rows,
    get_local,
    is_partial,
    make_output,
    make_result,
    to_rows,
    unwrap_grad,
    wait_for_collective,
    wrap_local,
)
from ovpatch.overlap.tensor_parallel.operators import (
    GATHER_LINEAR,
    OPERATORS,
    LocalLinear,
    ParamGrads,
    WeightGrad,
    cast_operands,
    multiply_weight_grad,
)
from ovpatch.overlap.tensor_parallel.schedules import Schedule
from ovpatch.overlap.tensor_parallel.schedules.stock import ColumnGrads, linear
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.overlap.tensors.linear_ops import DELAYED_WGRAD


@dataclass(frozen=True)
class TPConfig:
    """The settings of an operator.

    Attributes:
        schedule: The order of GEMMs and collectives.
        weight_grad: Computes a weight's gradient.
        regather: Whether backward gathers the input again. Otherwise the gathered input is kept.
    """

    schedule: Schedule
    weight_grad: WeightGrad = multiply_weight_grad
    regather: bool = False


@dataclass(frozen=True, slots=True)
class OpContext:
    """The non-tensor arguments of an operator; a linear's calls with inputs of one layout share them.

    Attributes:
        config: The settings.
        ranks: The ranks.
        operator: The operator.
        dim: The input dimension that comes first in rows. This is the sequence, if it is sharded.
        weight_count: The number of weights.
        is_constant: Whether the input needs no gradient. It is then always kept gathered.
        mesh: The mesh of the DTensors among inputs and outputs.
        input_grad_placement: The placement of the input's gradient; None if the input is a plain tensor.
        output_placement: The placement of the outputs; None if they are plain tensors.
        gathered_placement: The placement of the gathered input, which is then returned as a DTensor as well. None if
            it is not returned.
        check_backward: Called before backward.
        deferred_outputs: Gets the gathered rows and the outputs' memory, if the linears compute their outputs later.
        trains_weights: Whether any linear that reads the gathered input has a weight to train, even if this operator
            does not compute that linear.
    """

    config: TPConfig
    ranks: TPGroup
    operator: LocalLinear = GATHER_LINEAR
    dim: int = 0
    weight_count: int = 1
    is_constant: bool = False
    mesh: Any = None
    input_grad_placement: Any = None
    output_placement: Any = None
    gathered_placement: Any = None
    check_backward: Callable[[], None] | None = None
    deferred_outputs: list[tuple[Tensor, Sequence[Tensor]]] | None = None
    trains_weights: bool = False


def _once_differentiable(backward: Callable[..., Any]) -> Any:
    """Make a backward refuse second derivatives, and compute in the dtypes of forward.

    A script may call backward under autocast, which would choose other dtypes. torch's ``once_differentiable`` turns
    gradients off in every backward. Most backwards already run without gradients, and do not call it.
    """
    differentiated = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        chosen = differentiated if torch.is_grad_enabled() else backward
        kind = ctx.call.ranks.kind
        # The context manager takes host time, so it is entered only if autocast is on.
        if not torch.is_autocast_enabled(kind):
            return chosen(ctx, *grads)
        with torch.autocast(kind, enabled=False):
            return chosen(ctx, *grads)

    return run


class GatheredLinears(torch.autograd.Function):
    """Gathers a sequence and applies linears to it; can return the gathered input as well.

    [Note: saved for backward] If rows are a view of the input, the input itself is saved, so that autograd detects
    writes to it: the version of a DTensor differs from the version of its local tensor. A gathered input is kept
    gathered as in stock PyTorch, unless ``regather`` is on. An input without a gradient is always kept gathered:
    another gather would be the only collective of its backward, which one rank alone may run. Nothing is saved that
    stock PyTorch does not save: no input of a frozen weight, no weight of an input that needs no gradient.
    """

    @staticmethod
    def compute(
        call: OpContext, x: Tensor, *params: Tensor | None, keeps_gathered: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the outputs, and the input to save for backward."""
        weights, biases = params[: call.weight_count], params[call.weight_count :]
        local, local_rows, rows, gemm_weights, gemm_biases = _find_operands(
            call, x, weights, biases
        )
        keeps_gathered = (
            keeps_gathered
            and (call.is_constant or not call.config.regather)
            and any(weight is not None and weight.requires_grad for weight in weights)
        )
        results = []
        gathered: Tensor | None
        gemm_input: Tensor | None
        if call.deferred_outputs is None and (
            call.gathered_placement is None or rows is local_rows
        ):
            needs_gathered = call.gathered_placement is not None or keeps_gathered
            outputs, gemm_input = call.config.schedule.gather_linear(
                call.ranks, rows, gemm_weights, gemm_biases, needs_gathered
            )
            gathered = gemm_input
            for out in outputs:
                results.append(make_result(out, local.shape, call.dim))
        else:
            # The input is gathered before autocast rounds it, because other readers than linears must get it unrounded.
            gathered = call.ranks.gather_rows(local_rows)
            gemm_input = gathered if rows is local_rows else gathered.to(rows.dtype)
            if call.deferred_outputs is None:
                outputs = [
                    linear(gemm_input, *pair)
                    for pair in zip(gemm_weights, gemm_biases, strict=True)
                ]
                results = [make_result(out, local.shape, call.dim) for out in outputs]
            else:
                results = [
                    make_output(gemm_input, len(weight), local.shape, call.dim)
                    for weight in gemm_weights
                ]
                call.deferred_outputs.append((gemm_input, [result.detach() for result in results]))
        saved = (
            gemm_input
            if keeps_gathered and gemm_input is not None
            else _find_saved_input(rows, local, x)
        )
        # The DTensors are made here, inside of the node, because DTensor.from_local() would be another node.
        if call.output_placement is not None:
            results = [wrap_local(result, call.mesh, call.output_placement) for result in results]
        if call.gathered_placement is not None and gathered is not None:
            results.append(
                wrap_local(
                    from_rows(gathered, local.shape, call.dim), call.mesh, call.gathered_placement
                )
            )
            # The version of the returned tensor shows later writes to it.
            if saved is gathered:
                saved = results[-1]
        return tuple(results), saved

    @staticmethod
    def forward(ctx: Any, call: OpContext, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        results, saved = GatheredLinears.compute(call, x, *params, keeps_gathered=True)
        # If the input needs no gradient, only the outputs of trained weights and biases need one.
        if call.is_constant:
            ctx.mark_non_differentiable(*_list_constant(call, results, params))
        # A saved output would live as long as the graph, or be flattened and rebuilt as a tensor subclass.
        if saved is results[-1]:
            saved = saved.detach()
        # An unused output has no gradient, and then needs no GEMM in backward.
        ctx.set_materialize_grads(False)
        _save(ctx, call, x, params[: call.weight_count], params[call.weight_count :], saved)
        return results

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: OpContext = ctx.call
        if call.check_backward is not None:
            call.check_backward()
        full_grad, term = (
            _read_gathered_grad(call, grads[-1])
            if call.gathered_placement is not None
            else (None, None)
        )
        regathers = call.config.regather and not call.is_constant
        has_output_grad = False
        for grad in grads[: call.weight_count]:
            has_output_grad = has_output_grad or grad is not None
        # The output gradients make a term of a sum over the ranks, which gets its share of the gradient of all ranks.
        if full_grad is not None and has_output_grad:
            term = full_grad / call.ranks.world
            full_grad = None
        wants = _wants_input(ctx)
        dtype = ctx.dtype if wants else None
        # Peers with a gradient of an output gather the input again, so this rank joins them even without one.
        if has_output_grad or (term is not None and regathers and call.trains_weights):
            saved, weights, params = _resume(ctx)
            output_grads = []
            for grad in grads[: call.weight_count]:
                output_grads.append(
                    None if grad is None else _grad_to_rows(grad, call, ctx.gemm_dtype)
                )
            input_grad = None
            # Without an input gradient nothing is sent, so a schedule has nothing to order.
            if call.is_constant:
                params.compute_weights(saved, output_grads)
                params.compute_biases(output_grads)
            else:
                compute_weight_grads = None if saved is None else params.compute_weights
                request = ColumnGrads(
                    output_grads, saved, weights, compute_weight_grads, dtype, term, regathers
                )
                input_grad = GATHER_LINEAR.backward(
                    call.config.schedule, call.ranks, request, params
                )
            return _make_grads(ctx, input_grad if wants else None, params)
        # No output was used. The saved input is not read here, because autograd would refuse it after a write.
        input_grad = None
        if term is not None and wants:
            input_grad = call.config.schedule.gather_linear_backward(
                call.ranks, ColumnGrads([], None, [], None, dtype, term)
            )
        # All ranks have this gradient, so no collective is needed.
        if full_grad is not None:
            own_rows = full_grad.view(call.ranks.world, -1, full_grad.shape[1])[call.ranks.rank]
            # A view would keep the rows of all ranks alive.
            input_grad = own_rows.clone()
        return (
            None,
            _make_input_grad(ctx, input_grad if wants else None),
            *[None] * (2 * call.weight_count),
        )


class SingleLinear(torch.autograd.Function):
    """Computes an operator of one linear, ``call.operator``.

    Each operator gets a subclass with its name, because profilers show the name of the class.
    """

    @staticmethod
    def compute(
        call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the input to save for backward."""
        local, _, rows, (gemm_weight,), (gemm_bias,) = _find_operands(call, x, (weight,), (bias,))
        result = make_result(
            call.operator.forward(call.config.schedule, call.ranks, rows, gemm_weight, gemm_bias),
            local.shape,
            call.dim,
        )
        if call.output_placement is not None:
            result = wrap_local(result, call.mesh, call.output_placement)
        return result, _find_saved_input(rows, local, x)

    @staticmethod
    def forward(
        ctx: Any, call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        result, saved = SingleLinear.compute(call, x, weight, bias)
        _save(ctx, call, x, (weight,), (bias,), saved)
        return result

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: OpContext = ctx.call
        grad_rows = _grad_to_rows(grad, call, ctx.gemm_dtype)
        starts_early = call.operator.gathers_grad and call.config.schedule.starts_grad_gather_early
        # The gather starts before a checkpoint recomputes the saved tensors, and hides the recomputation.
        grad_gather = call.ranks.all_gather(grad_rows) if starts_early else None
        rows, gemm_weights, params = _resume(ctx)
        # The collectives of a gathered gradient may depend on this flag, so it must be the same on all ranks. Whether
        # this backward continues to the input may differ between them.
        wants = ctx.needs_input_grad[1] if call.operator.gathers_grad else _wants_input(ctx)
        compute_weight_grads = None if rows is None else params.compute_weights
        request = ColumnGrads(
            [grad_rows],
            rows,
            gemm_weights,
            compute_weight_grads,
            ctx.dtype if wants else None,
            grad_gather=grad_gather,
        )
        input_grad = call.operator.backward(call.config.schedule, call.ranks, request, params)
        return _make_grads(ctx, input_grad, params)


FUNCTIONS: Final[dict[str, Any]] = {"gather_linear": GatheredLinears} | {
    name: type(type(operator).__name__, (SingleLinear,), {})
    for name, operator in OPERATORS.items()
    if operator is not GATHER_LINEAR
}
"""The autograd functions by the operator's name."""


def run_operator(call: OpContext, x: Tensor, *params: Tensor | None) -> Any:
    """Compute an operator, with gradients if they are on."""
    # The compiler cannot trace process groups, so the graph breaks here.
    if torch.compiler.is_compiling():
        return torch.compiler.disable(run_operator)(call, x, *params)
    function = FUNCTIONS[call.operator.name]
    if not torch.is_grad_enabled():
        return function.compute(call, x, *params)[0]
    # torch's own apply() raises the error of torch.func about this function.
    if torch._C._are_functorch_transforms_active():
        return function.apply(call, x, *params)
    # The base class's apply() does not bind arguments to the signature, which takes host time.
    return super(torch.autograd.Function, function).apply(call, x, *params)


def _save(
    ctx: Any,
    call: OpContext,
    x: Tensor,
    weights: Sequence[Any],
    biases: Sequence[Tensor | None],
    saved_input: Tensor,
) -> None:
    """Save the tensors for backward; see [Note: saved for backward]."""
    local = x if type(x) in PLAIN else get_local(x)
    ctx.call = call
    ctx.shape = local.shape
    ctx.dtype = x.dtype
    ctx.gemm_dtype = saved_input.dtype
    ctx.biases = biases
    # Autograd would refuse a backward after a write to a saved weight. If the call has its own check, weights may
    # change until their linears are called, so autograd does not save them.
    saves_weights = x.requires_grad and call.check_backward is None
    ctx.weights = () if saves_weights else weights
    needs_input = call.trains_weights and call.config.regather and not call.is_constant
    for weight in weights:
        needs_input = needs_input or weight.requires_grad
    ctx.save_for_backward(saved_input if needs_input else None, *(weights if saves_weights else ()))


def _resume(ctx: Any) -> tuple[Tensor | None, list[Tensor], ParamGrads]:
    """Return the saved rows or None, the weights in the dtype of forward, and the parameters' gradients to fill."""
    saved, *saved_weights = ctx.saved_tensors
    call, weights = ctx.call, [*saved_weights, *ctx.weights]
    params = ParamGrads(call.config.weight_grad, weights, ctx.biases, ctx.needs_input_grad[2:])
    # A checkpoint may hand out other tensors for the saved weights. The AccumulateGrad nodes have the parameters.
    if DELAYED_WGRAD.take is not None:
        nodes = [node for node, _ in ctx.next_functions[1 : 1 + call.weight_count]]
        params.leaves = [
            getattr(node, "variable", weight) for node, weight in zip(nodes, weights, strict=True)
        ]
    rows, gemm_weights, dtype = None, [], ctx.gemm_dtype
    if saved is not None:
        rows = to_rows(
            saved if type(saved) in PLAIN else wait_for_collective(get_local(saved)), call.dim
        )
    # Forward saved the weights themselves, so backward repeats the casts of autocast.
    for weight in weights:
        local = weight if type(weight) in PLAIN else get_local(weight)
        gemm_weights.append(local if local.dtype is dtype else local.to(dtype))
    return rows, gemm_weights, params


def _wants_input(ctx: Any) -> bool:
    """Return whether this backward continues to the input, and does not only compute the weights' gradients."""
    return ctx.needs_input_grad[1] and will_execute(ctx.next_functions[0][0])


def _make_grads(ctx: Any, input_grad: Tensor | None, params: ParamGrads) -> tuple[Any, ...]:
    return (None, _make_input_grad(ctx, input_grad), *params.weights, *params.biases)


def _make_input_grad(ctx: Any, rows: Tensor | None) -> Tensor | None:
    """Return rows as an activation like the input."""
    if rows is None:
        return None
    call = ctx.call
    rows = rows if rows.dtype is ctx.dtype else rows.to(ctx.dtype)
    input_grad = from_rows(rows, ctx.shape, call.dim)
    if call.input_grad_placement is None:
        return input_grad
    return wrap_local(input_grad, call.mesh, call.input_grad_placement)


def _grad_to_rows(grad: Tensor, call: OpContext, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an output as rows."""
    if type(grad) is not Tensor:
        grad = unwrap_grad(grad, call.output_placement)
    return to_rows(grad if grad.dtype is dtype else grad.to(dtype), call.dim)


def _read_gathered_grad(
    call: OpContext, grad: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gathered input's gradient as rows, from readers that were not computed with the gather.

    Returns:
        The gradient that is the same on all ranks, or None, and this rank's term of a sum over the ranks, or None, not
        both. An operation on the DTensor leaves the former; another linear leaves the latter. Where both are readers,
        DTensor has added a share of the former to each rank's term.
    """
    if grad is None:
        return None, None
    if is_partial(grad):
        return None, to_rows(wait_for_collective(get_local(grad)), call.dim)
    return to_rows(unwrap_grad(grad, call.gathered_placement), call.dim), None


def _list_constant(
    call: OpContext, results: Sequence[Tensor], params: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the results that need no gradient, if the input needs none."""
    needs = [param is not None and param.requires_grad for param in params]
    return [
        result
        for i, result in enumerate(results)
        if i == call.weight_count or not (needs[i] or needs[call.weight_count + i])
    ]


def _find_saved_input(rows: Tensor, local: Tensor, x: Tensor) -> Tensor:
    """Return the input if its rows are a view of ``local``, its local part; otherwise return the rows."""
    return (
        x
        if rows is local or (rows.data_ptr() == local.data_ptr() and rows.dtype == local.dtype)
        else rows
    )


def _find_operands(
    call: OpContext, x: Tensor, weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the input's local part, its rows, and the operands of the GEMMs: rows, weights and biases."""
    local = x if type(x) in PLAIN else wait_for_collective(get_local(x))
    local_rows, gemm_weights, gemm_biases = to_rows(local, call.dim), [], []
    for weight in weights:
        gemm_weights.append(weight if type(weight) in PLAIN else get_local(weight))
    for bias in biases:
        gemm_biases.append(bias if bias is None or type(bias) in PLAIN else get_local(bias))
    if torch.is_autocast_enabled(call.ranks.kind):
        return (
            local,
            local_rows,
            *cast_operands(call.ranks.kind, local_rows, gemm_weights, gemm_biases),
        )
    return local, local_rows, local_rows, gemm_weights, gemm_biases

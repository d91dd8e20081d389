"""The eager operators: autograd functions around :mod:`.operators`.

They turn activations into rows, ``[sequence, features]``, and back. Inputs and outputs may be DTensors, as an
:class:`OpContext` says.
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
    """How an operator is computed."""

    schedule: Schedule  # the order of products and collectives
    weight_grad: WeightGrad = multiply_weight_grad  # how a weight's gradient is computed
    regather: bool = False  # gather an input anew for backward; else it is kept gathered


@dataclass(frozen=True, slots=True)
class OpContext:
    """The non-tensor arguments of an operator; a linear's calls with inputs of one layout share them."""

    config: TPConfig  # how it is computed
    ranks: TPGroup
    operator: LocalLinear = GATHER_LINEAR
    dim: int = 0  # the input dimension that comes first in rows: the sequence, if that is cut
    count: int = 1  # the number of weights
    constant: bool = False  # whether the input needs no gradient; it is kept gathered then
    mesh: Any = None  # the mesh of DTensors that are given or returned
    given: Any = None  # the placement of the input's gradient if the input is a DTensor, else None
    returned: Any = None  # the placement of the outputs if they are DTensors, else None
    whole: Any = None  # the placement of the gathered input if it is returned as well, as a DTensor, else None
    check: Callable[[], None] | None = None  # called before backward
    later: list[tuple[Tensor, Sequence[Tensor]]] | None = (
        None  # gets rows and outputs' memory, if these come later
    )
    trains: bool = False  # whether any linear that reads the gathered input, in this call or not, has a weight to train


def _once(backward: Callable[..., Any]) -> Any:
    """Refuse a second derivative; compute in the dtypes of forward, also where a script calls backward under autocast.

    torch's ``once_differentiable`` turns gradients off in every backward, which mostly runs without them anyway.
    """
    differentiated = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        chosen = differentiated if torch.is_grad_enabled() else backward
        kind = ctx.call.ranks.kind
        if not torch.is_autocast_enabled(kind):
            return chosen(ctx, *grads)
        with torch.autocast(kind, enabled=False):
            return chosen(ctx, *grads)

    return run


class GatheredLinears(torch.autograd.Function):
    """Gathers a sequence and applies linears to it; can return the gathered input as well.

    [Note: what is kept for backward] Where rows are a view of the input, the input itself is kept: autograd notices a
    write into it then, as a DTensor's version is not that of its local tensor. A gathered input is kept gathered, as
    under stock, unless ``regather`` is on. If the input needs no gradient, it is always kept gathered: gathering again
    would be that backward's only collective, and one rank alone may run it. Nothing is kept that stock does not keep:
    no input of a frozen weight, no weight of an input that needs no gradient.
    """

    @staticmethod
    def compute(
        call: OpContext, x: Tensor, *params: Tensor | None, keeps: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the outputs, and what is to be kept for backward."""
        weights, biases = params[: call.count], params[call.count :]
        here, given, rows, used, added = _find_operands(call, x, weights, biases)
        keeps = (
            keeps
            and (call.constant or not call.config.regather)
            and any(weight is not None and weight.requires_grad for weight in weights)
        )
        results = []
        gathered: Tensor | None
        whole: Tensor | None
        if call.later is None and (call.whole is None or rows is given):
            needs_whole = call.whole is not None or keeps
            outs, whole = call.config.schedule.gather_linear(
                call.ranks, rows, used, added, needs_whole
            )
            gathered = whole
            for out in outs:
                results.append(make_result(out, here.shape, call.dim))
        else:  # autocast rounds for linears alone, and the gathered input has other readers
            gathered = call.ranks.gather_rows(given)
            whole = gathered if rows is given else gathered.to(rows.dtype)
            if call.later is None:
                outs = [linear(whole, *pair) for pair in zip(used, added, strict=True)]
                results = [make_result(out, here.shape, call.dim) for out in outs]
            else:
                results = [make_output(whole, len(weight), here.shape, call.dim) for weight in used]
                call.later.append((whole, [result.detach() for result in results]))
        kept = whole if keeps and whole is not None else _as_given(rows, here, x)
        if call.returned is not None:
            results = [wrap_local(result, call.mesh, call.returned) for result in results]
        if call.whole is not None and gathered is not None:
            results.append(
                wrap_local(from_rows(gathered, here.shape, call.dim), call.mesh, call.whole)
            )
            if kept is gathered:
                kept = results[-1]  # whose version shows a later write into it
        return tuple(results), kept

    @staticmethod
    def forward(ctx: Any, call: OpContext, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        results, kept = GatheredLinears.compute(call, x, *params, keeps=True)
        if call.constant:  # then outputs differ in whether they need gradients
            ctx.mark_non_differentiable(*_constant(call, results, params))
        if (
            kept is results[-1]
        ):  # itself, it would stay alive as long as the graph, or be taken apart and put together
            kept = kept.detach()
        ctx.set_materialize_grads(False)
        _keep(ctx, call, x, params[: call.count], params[call.count :], kept)
        return results

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: OpContext = ctx.call
        if call.check is not None:
            call.check()
        others, terms = (
            _of_other_readers(call, grads[-1]) if call.whole is not None else (None, None)
        )
        used, anew = (
            False,
            call.config.regather and not call.constant,
        )  # the input has to be gathered again for weights
        for grad in grads[: call.count]:
            used = used or grad is not None
        if others is not None and (used or terms is not None):
            share = others / call.ranks.world
            others, terms = None, share if terms is None else terms + share
        wants = _wants_input(ctx)
        dtype = ctx.dtype if wants else None
        if used or (terms is not None and anew and call.trains):  # other ranks gather
            kept, weights, params = _resume(ctx)
            outs = []
            for grad in grads[: call.count]:
                outs.append(None if grad is None else _grad(grad, call, ctx.computed))
            mine = None
            if call.constant:
                params.compute_weights(kept, outs)
                params.compute_biases(outs)
            else:
                take = None if kept is None else params.compute_weights
                asked = ColumnGrads(outs, kept, weights, take, dtype, terms, anew)
                mine = GATHER_LINEAR.backward(call.config.schedule, call.ranks, asked, params)
            return _grads(ctx, mine if wants else None, params)
        mine = None  # no product was used, so the kept input is not read, and may have changed
        if terms is not None and wants:
            mine = call.config.schedule.gather_linear_backward(
                call.ranks, ColumnGrads([], None, [], None, dtype, terms)
            )
        if others is not None:
            own = others.view(call.ranks.world, -1, others.shape[1])[call.ranks.rank]
            mine = own.clone()  # a view would keep all of it alive
        return None, _input_grad(ctx, mine if wants else None), *[None] * (2 * call.count)


class SingleLinear(torch.autograd.Function):
    """Computes an operator of one linear, ``call.operator``; a class for each has its name, which profilers show."""

    @staticmethod
    def compute(
        call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and what is to be kept for backward."""
        here, _, rows, (used,), (added,) = _find_operands(call, x, (weight,), (bias,))
        result = make_result(
            call.operator.forward(call.config.schedule, call.ranks, rows, used, added),
            here.shape,
            call.dim,
        )
        if call.returned is not None:
            result = wrap_local(result, call.mesh, call.returned)
        return result, _as_given(rows, here, x)

    @staticmethod
    def forward(
        ctx: Any, call: OpContext, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        result, kept = SingleLinear.compute(call, x, weight, bias)
        _keep(ctx, call, x, (weight,), (bias,), kept)
        return result

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: OpContext = ctx.call
        given = _grad(grad, call, ctx.computed)
        at_once = call.operator.gathers_grad and call.config.schedule.gathers_grad_at_once
        gather = call.ranks.all_gather(given) if at_once else None
        rows, used, params = _resume(ctx)
        wants = ctx.needs_input_grad[1] if call.operator.gathers_grad else _wants_input(ctx)
        take = None if rows is None else params.compute_weights
        asked = ColumnGrads([given], rows, used, take, ctx.dtype if wants else None, gather=gather)
        dx = call.operator.backward(call.config.schedule, call.ranks, asked, params)
        return _grads(ctx, dx, params)


FUNCTIONS: Final[dict[str, Any]] = {"gather_linear": GatheredLinears} | {
    name: type(type(operator).__name__, (SingleLinear,), {})
    for name, operator in OPERATORS.items()
    if operator is not GATHER_LINEAR
}
"""Autograd functions by the operator's name."""


def run_operator(call: OpContext, x: Tensor, *params: Tensor | None) -> Any:
    """Compute an operator, with gradients if they are on."""
    if (
        torch.compiler.is_compiling()
    ):  # a function's call: the compiler cannot look into process groups
        return torch.compiler.disable(run_operator)(call, x, *params)
    function = FUNCTIONS[call.operator.name]
    if not torch.is_grad_enabled():
        return function.compute(call, x, *params)[0]
    if torch._C._are_functorch_transforms_active():
        return function.apply(call, x, *params)  # which raises torch.func's own error
    return super(torch.autograd.Function, function).apply(
        call, x, *params
    )  # skips a binding of arguments


def _keep(
    ctx: Any,
    call: OpContext,
    x: Tensor,
    weights: Sequence[Any],
    biases: Sequence[Tensor | None],
    kept: Tensor,
) -> None:
    """Keep what backward needs; see [Note: what is kept for backward]."""
    here = x if type(x) in PLAIN else get_local(x)
    ctx.call, ctx.shape, ctx.dtype, ctx.computed = call, here.shape, x.dtype, kept.dtype
    ctx.biases = biases
    # With a check before backward, weights may change until their outputs are handed out.
    ctx.weights, saved = ((), weights) if x.requires_grad and call.check is None else (weights, ())
    needed = call.trains and call.config.regather and not call.constant
    for weight in weights:
        needed = needed or weight.requires_grad
    ctx.save_for_backward(kept if needed else None, *saved)


def _resume(ctx: Any) -> tuple[Tensor | None, list[Tensor], ParamGrads]:
    """Return the kept rows or None, the weights in the dtype of forward, and the parameters' gradients to fill."""
    kept, *saved = ctx.saved_tensors
    call, weights = ctx.call, [*saved, *ctx.weights]
    params = ParamGrads(call.config.weight_grad, weights, ctx.biases, ctx.needs_input_grad[2:])
    if DELAYED_WGRAD.take is not None:
        nodes = [node for node, _ in ctx.next_functions[1 : 1 + call.count]]
        params.leaves = [
            getattr(node, "variable", weight) for node, weight in zip(nodes, weights, strict=True)
        ]
    rows, used, dtype = None, [], ctx.computed
    if kept is not None:
        rows = to_rows(
            kept if type(kept) in PLAIN else wait_for_collective(get_local(kept)), call.dim
        )
    for weight in weights:
        local = weight if type(weight) in PLAIN else get_local(weight)
        used.append(local if local.dtype is dtype else local.to(dtype))
    return rows, used, params


def _wants_input(ctx: Any) -> bool:
    """Return whether this backward continues to the input, and is not for the weights' gradients alone."""
    return ctx.needs_input_grad[1] and will_execute(ctx.next_functions[0][0])


def _grads(ctx: Any, dx: Tensor | None, params: ParamGrads) -> tuple[Any, ...]:
    return (None, _input_grad(ctx, dx), *params.weights, *params.biases)


def _input_grad(ctx: Any, dx: Tensor | None) -> Tensor | None:
    """Return rows as an activation like the input."""
    if dx is None:
        return None
    call = ctx.call
    dx = from_rows(dx if dx.dtype is ctx.dtype else dx.to(ctx.dtype), ctx.shape, call.dim)
    return dx if call.given is None else wrap_local(dx, call.mesh, call.given)


def _grad(grad: Tensor, call: OpContext, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an output as rows."""
    if type(grad) is not Tensor:
        grad = unwrap_grad(grad, call.returned)
    return to_rows(grad if grad.dtype is dtype else grad.to(dtype), call.dim)


def _of_other_readers(call: OpContext, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gathered input's gradient, as rows: as it is on all ranks, or as this rank's term of a sum.

    It comes from readers other than the linears whose products were computed with the gather. The gradient of another
    linear is a term of a sum on each rank; that of an operation on the DTensor is the same on all ranks. Where both
    meet, each rank's term gets its share, as under stock.
    """
    if grad is None:
        return None, None
    if is_partial(grad):
        return None, to_rows(wait_for_collective(get_local(grad)), call.dim)
    return to_rows(unwrap_grad(grad, call.whole), call.dim), None


def _constant(
    call: OpContext, results: Sequence[Tensor], params: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the results that need no gradient, for an input that needs none."""
    needs = [param is not None and param.requires_grad for param in params]
    return [
        result
        for i, result in enumerate(results)
        if i == call.count or not (needs[i] or needs[call.count + i])
    ]


def _as_given(rows: Tensor, here: Tensor, x: Tensor) -> Tensor:
    """Return the input if its rows are a view of ``here``, its local part, else the rows."""
    return (
        x
        if rows is here or (rows.data_ptr() == here.data_ptr() and rows.dtype == here.dtype)
        else rows
    )


def _find_operands(
    call: OpContext, x: Tensor, weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the input's local part, its rows, and the operands of the products: rows, weights and biases."""
    here = x if type(x) in PLAIN else wait_for_collective(get_local(x))
    given, used, added = to_rows(here, call.dim), [], []
    for weight in weights:
        used.append(weight if type(weight) in PLAIN else get_local(weight))
    for bias in biases:
        added.append(bias if bias is None or type(bias) in PLAIN else get_local(bias))
    if torch.is_autocast_enabled(call.ranks.kind):
        return here, given, *cast_operands(call.ranks.kind, given, used, added)
    return here, given, given, used, added

"""The checks of ``cut()``: the stages of a model compute the same as the full model.

In evaluation mode, values and gradients are compared block by block. In training mode, values are
compared with the same random numbers, so that the check finds models that skip blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch_plugins.pipeline.cutting.block_stack import (
    BlockStack,
    CutError,
    ForwardState,
    Trace,
    find_tensors,
    seed_all,
    trace_model,
)
from ovpatch_plugins.pipeline.cutting.stage_tree import ARG, StagePlan

# Models skip a block if a uniform number is below a probability that is larger than this.
_SMALL: Final = 0.01


def name_args(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as keywords, which torch's schedules give to all stages."""
    return {**{f"{ARG}{index}": arg for index, arg in enumerate(args)}, **kwargs}


def check_output(output: Any) -> None:
    """Raise an error for an output that a schedule cannot concatenate.

    Raises:
        CutError: The output has a scalar.
    """
    if any(tensor.dim() == 0 for _, tensor in find_tensors(output)):
        raise CutError(
            "the model returns a scalar, such as its own loss, and schedules concatenate the outputs "
            "of the last stage. Leave labels out of the inputs and pass loss_fn, or select another "
            "value: cut(..., output=lambda result: result.logits)."
        )


def check_training(
    model: nn.Module,
    stack: BlockStack,
    stages: Sequence[tuple[StagePlan, nn.Module]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    restore: Callable[[], None],
) -> None:
    """Compare the values of stages with the full model's in training mode, with the same random numbers.

    Raises:
        CutError: They differ, or the model skips blocks in training.
    """
    # Stages except the first begin where their first block does, with the random numbers of that block.
    starts = [plan.low for plan, _ in stages] + [
        plan.high for plan, _ in stages if not plan.is_last
    ]
    select = stages[0][0].select
    model.train()
    with torch.no_grad():
        device = next(model.parameters()).device
        boundaries = sorted({*starts} - {0})
        # With small uniform numbers, or with large ones, the model skips each block that it may skip,
        # or drops the block's result.
        for seeds in _find_extreme_seeds():
            trace_model(
                model,
                stack,
                boundaries,
                args,
                kwargs,
                between=functools.partial(seed_all, device, *seeds),
            )
            restore()
        trace = trace_model(model, stack, boundaries, args, kwargs)
        trace.output = select(trace.output)
        for plan, tree in stages:
            tree.train()
            restore()
            compare_values(tree, plan, trace, args, kwargs, restores_random=True)
    restore()


@functools.cache
def _find_extreme_seeds() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return seeds of torch and of Python with a first uniform number below a hundredth, or above 0.99."""
    generator = torch.Generator()

    def find(is_extreme: Callable[[float], bool]) -> tuple[int, int]:
        return (
            next(
                seed
                for seed in itertools.count()
                if is_extreme(torch.rand([], generator=generator.manual_seed(seed)).item())
            ),
            next(seed for seed in itertools.count() if is_extreme(random.Random(seed).random())),
        )

    return find(lambda number: number < _SMALL), find(lambda number: number > 1 - _SMALL)


def compare_values(
    tree: nn.Module,
    plan: StagePlan,
    trace: Trace,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    restores_random: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a stage on the inputs of the full model's blocks, and compare values block by block.

    Returns:
        The tensors that the stage received, with gradients, and the tensors that it returned.

    Raises:
        CutError: They differ.
    """
    given = [] if not plan.low else trace.boundaries[plan.low].leaves
    received = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in given]
    state, handles = ForwardState(tree.modules()), []
    if plan.low or not restores_random:
        # Each rank draws its own numbers, so a stage must not depend on numbers that the model draws before its blocks.
        seed_all(trace.device, 1, 1)

    def check(index: int, output: Any) -> None:
        if _differ_any([tensor for _, tensor in find_tensors(output)], trace.results[index]):
            raise CutError(_describe_difference(plan, index, "values", in_training=restores_random))

    for index in range(plan.low, plan.high):
        hook: Any = lambda _, __, output, index=index: check(index, output)  # noqa: E731
        handles.append(plan.stack.blocks[index].register_forward_hook(hook))
    if restores_random and plan.low:
        begin = trace.random_states[plan.low]
        handles.append(plan.stack.blocks[plan.low].register_forward_pre_hook(lambda *_: begin()))
    try:
        values = [tensor for _, tensor in find_tensors(tree(*received, **name_args(args, kwargs)))]
    finally:
        for handle in handles:
            handle.remove()
        state.restore()
    if _differ_any(values, _list_wanted(plan, trace)):
        raise CutError(
            _describe_difference(plan, plan.high - 1, "values", in_training=restores_random)
        )
    return received, values


def _list_wanted(plan: StagePlan, trace: Trace) -> list[Tensor]:
    return (
        [tensor for _, tensor in find_tensors(trace.output)]
        if plan.is_last
        else trace.boundaries[plan.high].tensors
    )


def _describe_difference(
    plan: StagePlan, index: int, what: str, *, in_training: bool = False
) -> str:
    name = plan.stack.name(index)
    where = f"{plan.stack.name(plan.low)} to {plan.stack.name(plan.high - 1)}"
    mode = "training" if in_training else "evaluation"
    return (
        f"the stage with {where} computes other {what} than the full model in {mode} mode, first "
        f"at {name}. The model's forward depends on blocks of other stages, on how often they have "
        "run, or on random numbers that it draws before them, as for the dropout of an encoder that "
        "all blocks read. Move this into the blocks, set such dropout to 0, or name an earlier list "
        "with blocks=."
    )


def compare_grads(
    tree: nn.Module, plan: StagePlan, trace: Trace, ran: tuple[list[Tensor], list[Tensor]]
) -> None:
    """Compare a stage's gradients with the full model's.

    If all stages have equal values, each stage has equal gradients, and nothing else connects stages, the gradients
    of the full model are equal as well.

    Args:
        tree: The stage.
        plan: Its plan.
        trace: The forward of the full model.
        ran: The tensors that the stage received and returned in :func:`compare_values`.

    Raises:
        CutError: They differ.
    """
    received, values = ran
    given = [] if not plan.low else trace.boundaries[plan.low].leaves
    # A stage's outputs with the full model's, if both have gradients.
    pairs = [
        (a, b)
        for a, b in zip(values, _list_wanted(plan, trace), strict=True)
        if a.requires_grad and b.requires_grad
    ]
    params = [param for param in tree.parameters() if param.requires_grad]
    inputs = [(own, leaf) for own, leaf in zip(received, given, strict=True) if leaf.requires_grad]
    if not pairs or not (params or inputs):
        return
    # Random seeds of the backward, so that no difference cancels out.
    draw = torch.Generator(pairs[0][0].device).manual_seed(0)
    seeds = [torch.randn(a.shape, generator=draw, device=a.device).to(a.dtype) for a, _ in pairs]
    own_grads = torch.autograd.grad(
        [a for a, _ in pairs], [*params, *(own for own, _ in inputs)], seeds, allow_unused=True
    )
    model_grads = torch.autograd.grad(
        [b for _, b in pairs],
        [*params, *(leaf for _, leaf in inputs)],
        seeds,
        allow_unused=True,
        retain_graph=True,
    )
    # The block of each parameter, by which the message names the first difference.
    owners = {
        id(param): index
        for index in range(plan.low, plan.high)
        for param in plan.stack.blocks[index].parameters()
    }
    for tensor, own_grad, model_grad in zip(
        [*params, *(own for own, _ in inputs)], own_grads, model_grads, strict=True
    ):
        if _differ(own_grad, model_grad):
            raise CutError(
                _describe_difference(plan, owners.get(id(tensor), plan.low), "gradients")
            )


def _differ_any(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(values) != len(wanted) or any(
        _differ(a, b) for a, b in zip(values, wanted, strict=True)
    )


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors differ by more than rounding; None represents zeros."""
    if a is None or b is None:
        left = a if b is None else b
        return left is not None and bool(left.detach().any())
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if torch.equal(a, b) or not a.numel():
        return False
    if not a.is_floating_point():
        return True
    difference, scale = (a - b).abs().max().item(), b.abs().max().item()
    # NaNs count as a difference, because they compare as false.
    return not difference <= scale * torch.finfo(a.dtype).eps ** 0.75 or math.isinf(scale)

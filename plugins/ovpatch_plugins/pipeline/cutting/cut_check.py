"""The checks of ``cut()``: the stages of a model compute what the whole model computes.

In evaluation mode, values and gradients are compared block by block. In training mode, values are
compared with the same random numbers, so that a model which skips blocks is found.
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

# Models skip blocks with larger probabilities.
_SMALL: Final = 0.01


def name_args(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as keywords, which torch's schedules give to all stages."""
    return {**{f"{ARG}{index}": one for index, one in enumerate(args)}, **kwargs}


def check_output(output: Any) -> None:
    """Raise CutError for an output that a schedule cannot concatenate."""
    if any(tensor.dim() == 0 for _, tensor in find_tensors(output)):
        raise CutError(
            "the model returns a scalar, such as its own loss, and schedules concatenate what the "
            "last stage returns. "
            "Leave labels out of the inputs and pass loss_fn, or select another value: "
            "cut(..., output=lambda result: result.logits)."
        )


def check_training(
    model: nn.Module,
    stack: BlockStack,
    stages: Sequence[tuple[StagePlan, nn.Module]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    restore: Callable[[], None],
) -> None:
    """Compare the values of stages with the whole model's in training mode, with the same random numbers.

    Raises:
        CutError: They differ, or the model skips blocks in training.
    """
    # Stages other than the first begin where their first block does, with the random numbers that it has there.
    starts = [plan.low for plan, _ in stages] + [
        plan.high for plan, _ in stages if not plan.is_last
    ]
    select = stages[0][0].select
    model.train()
    with torch.no_grad():
        device = next(model.parameters()).device
        # Small uniform numbers skip each block that may be skipped.
        trace_model(
            model, stack, (), args, kwargs, between=lambda: seed_all(device, *_find_small_seeds())
        )
        restore()
        trace = trace_model(model, stack, sorted({*starts} - {0}), args, kwargs)
        trace.output = select(trace.output)
        for plan, tree in stages:
            tree.train()
            restore()
            compare_values(tree, plan, trace, args, kwargs, restores_random=True)
    restore()


@functools.cache
def _find_small_seeds() -> tuple[int, int]:
    """Return seeds after which the first uniform number of torch, and of Python, is below a hundredth."""
    generator = torch.Generator()
    return (
        next(
            seed
            for seed in itertools.count()
            if torch.rand([], generator=generator.manual_seed(seed)) < _SMALL
        ),
        next(seed for seed in itertools.count() if random.Random(seed).random() < _SMALL),
    )


def compare_values(
    tree: nn.Module,
    plan: StagePlan,
    trace: Trace,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    restores_random: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a stage on what the whole model's blocks were given, and compare values, block by block.

    Returns:
        What the stage received, with gradients, and what it returned.

    Raises:
        CutError: They differ.
    """
    given = [] if not plan.low else trace.boundaries[plan.low].leaves
    received = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in given]
    state, handles = ForwardState(tree.modules()), []
    if plan.low or not restores_random:
        # Each rank draws its own numbers, so a stage may not depend on numbers that the model draws before its blocks.
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
        f"the stage with {where} computes other {what} than the whole model in {mode} mode, first "
        f"at {name}. "
        "The model's forward depends on blocks of other stages, on how often they have run, or on "
        "random numbers that "
        "it draws before them, as for the dropout of an encoder that all blocks read. Move this "
        "into the blocks, set "
        "such dropout to 0, or name an earlier list with blocks=."
    )


def compare_grads(
    tree: nn.Module, plan: StagePlan, trace: Trace, ran: tuple[list[Tensor], list[Tensor]]
) -> None:
    """Compare a stage's gradients with the whole model's.

    Equal values of all stages and equal gradients of each, with no other way between stages, are equal gradients of the
    whole.

    Args:
        tree: The stage.
        plan: Its plan.
        trace: The forward of the whole model.
        ran: What the stage received and returned in :func:`compare_values`.

    Raises:
        CutError: They differ.
    """
    received, values = ran
    given = [] if not plan.low else trace.boundaries[plan.low].leaves
    pairs = [
        (a, b)
        for a, b in zip(values, _list_wanted(plan, trace), strict=True)
        if a.requires_grad and b.requires_grad
    ]
    params = [param for param in tree.parameters() if param.requires_grad]
    inputs = [(mine, one) for mine, one in zip(received, given, strict=True) if one.requires_grad]
    if not pairs or not (params or inputs):
        return
    draw = torch.Generator(pairs[0][0].device).manual_seed(0)
    seeds = [torch.randn(a.shape, generator=draw, device=a.device).to(a.dtype) for a, _ in pairs]
    mine = torch.autograd.grad(
        [a for a, _ in pairs], [*params, *(leaf for leaf, _ in inputs)], seeds, allow_unused=True
    )
    theirs = torch.autograd.grad(
        [b for _, b in pairs],
        [*params, *(one for _, one in inputs)],
        seeds,
        allow_unused=True,
        retain_graph=True,
    )
    owners = {
        id(param): index
        for index in range(plan.low, plan.high)
        for param in plan.stack.blocks[index].parameters()
    }
    for leaf, one, other in zip(
        [*params, *(leaf for leaf, _ in inputs)], mine, theirs, strict=True
    ):
        if _differ(one, other):
            raise CutError(_describe_difference(plan, owners.get(id(leaf), plan.low), "gradients"))


def _differ_any(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(values) != len(wanted) or any(
        _differ(a, b) for a, b in zip(values, wanted, strict=True)
    )


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding; None is zeros."""
    if one is None or other is None:
        left = one if other is None else other
        return left is not None and bool(left.detach().any())
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if torch.equal(one, other) or not one.numel():
        return False
    if not one.is_floating_point():
        return True
    difference, scale = (one - other).abs().max().item(), other.abs().max().item()
    return not difference <= scale * torch.finfo(one.dtype).eps ** 0.75 or math.isinf(scale)

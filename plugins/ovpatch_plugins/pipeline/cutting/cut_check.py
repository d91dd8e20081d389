"""The checks of ``cut()``: the stages of a model compute the same as the full model.

In evaluation mode, values and gradients are compared block by block. In training mode, values are
compared with the same random numbers, so that the check finds models that skip blocks. Later forwards of a stage check
that hidden states still pass its boundaries unchanged.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ovpatch_plugins.pipeline.cutting.block_stack import (
    BlockStack,
    CutError,
    ForwardState,
    Path,
    Trace,
    find_tensors,
    read_path,
    seed_all,
    trace_model,
)

ARG: Final = "ovpatch_arg_"
"""The prefix of the keyword by which a positional argument of the model is passed to all stages."""

# Models skip a block if a uniform number is below a probability that is larger than this.
_SMALL: Final = 0.01


class StagePart(Protocol):
    """The part of the model that a stage computes; see ``StagePlan``."""

    low: int
    high: int
    stack: BlockStack
    due: int

    @property
    def select(self) -> Callable[[Any], Any]:
        """The function that makes a tensor, or several, of the model's output."""

    @property
    def is_last(self) -> bool:
        """True if the stage has the last block."""


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
    stages: Sequence[tuple[StagePart, nn.Module]],
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
    plan: StagePart,
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


def _list_wanted(plan: StagePart, trace: Trace) -> list[Tensor]:
    return (
        [tensor for _, tensor in find_tensors(trace.output)]
        if plan.is_last
        else trace.boundaries[plan.high].tensors
    )


def _describe_difference(
    plan: StagePart, index: int, what: str, *, in_training: bool = False
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
    tree: nn.Module, plan: StagePart, trace: Trace, ran: tuple[list[Tensor], list[Tensor]]
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


# --- in each forward ---


class BoundaryCheck:
    """The check, in each forward of a stage, that hidden states pass its boundaries as in the traced forward.

    A model's forward may start to change hidden states between two blocks after the cut, for example to scale them or
    to add noise. If a stage ends between the two, it would send changed tensors, and the next stage would repeat the
    change. So the first own block must get the received tensors themselves, and the block after the last own block must
    get the tensors themselves that the last own block returned. Changes between blocks of one stage are right.

    Args:
        plan: The stage.
        blocks: The list of blocks in the stage's module. Wrappers may replace its members later.
        trace: The forward of the full model.
    """

    def __init__(self, plan: StagePart, blocks: nn.Module, trace: Trace) -> None:
        self._plan = plan
        before, after = trace.boundaries.get(plan.low), trace.boundaries.get(plan.high)
        # Places of received tensors in the inputs of the first own block.
        self._entry_places = [] if before is None else before.inputs
        # Places of tensors that are sent, in the output of the last own block and in the inputs of the next one.
        self._exit_places = (
            [] if after is None else list(zip(after.outputs, after.inputs, strict=True))
        )
        watched = [] if before is None else [plan.low]
        watched += [] if after is None or plan.high - 1 in watched else [plan.high - 1]
        self._watches = [_BlockWatch(self, index, blocks) for index in watched]
        # - State of a forward
        # The received tensors with their versions; None after the first own block has begun.
        self._received: list[tuple[Tensor, int]] | None = None
        # The tensors that the last own block returned, with their versions; None before it has returned.
        self._returned: list[tuple[Any, int]] | None = None

    def start(self, received: Sequence[Tensor]) -> None:
        """Start to check a forward, in which the stage's first and last block are watched."""
        self._received = [(tensor, _read_version(tensor)) for tensor in received]
        self._returned = None
        for watch in self._watches:
            watch.install()

    def finish(self) -> None:
        """End the check of a forward."""
        for watch in self._watches:
            watch.remove()
        self._received = None
        self._returned = None

    def begin_block(self, index: int, args: Any, kwargs: Any) -> None:
        """Check the inputs of the stage's first block.

        Raises:
            CutError: They are not the received tensors.
        """
        if index != self._plan.low or self._received is None:
            return
        if self._plan.due != self._plan.low:
            raise CutError(describe_skip(self._plan))
        for place, (tensor, version) in zip(self._entry_places, self._received, strict=True):
            if not _is_unchanged(_read_leaf((args, kwargs), place), tensor, version):
                raise CutError(_describe_change(self._plan, index))
        self._received = None

    def end_block(self, index: int, output: Any) -> None:
        """Keep the tensors that the stage's last block has returned."""
        if index == self._plan.high - 1:
            tensors = [_read_leaf(output, path) for path, _ in self._exit_places]
            self._returned = [(tensor, _read_version(tensor)) for tensor in tensors]

    def check_exit(self, inputs: Any) -> None:
        """Check the inputs ``(args, kwargs)`` of the block after the stage.

        Raises:
            CutError: They are not the tensors that the stage's last block returned.
        """
        # Nothing is known if a compiler has inlined the last block.
        if self._returned is None or torch.compiler.is_compiling():
            return
        for (_, place), (tensor, version) in zip(self._exit_places, self._returned, strict=True):
            if not _is_unchanged(_read_leaf(inputs, place), tensor, version):
                raise CutError(_describe_change(self._plan, self._plan.high))


class _BlockWatch:
    """The call of a block that :class:`BoundaryCheck` watches while a forward of the stage runs.

    Torch calls ``module._compiled_call_impl`` instead of the module's hooks and forward if it is set, as
    ``module.compile()`` does. So the watch is outside of hooks and of compiled code, which stays as it is. The list is
    read in each forward, because wrappers such as ``torch.compile()`` return another module.

    Args:
        check: The check.
        index: The block.
        blocks: The list of blocks in the stage's module.
    """

    def __init__(self, check: BoundaryCheck, index: int, blocks: nn.Module) -> None:
        self._check = check
        self._index = index
        self._blocks = blocks
        self._key = check._plan.stack.keys[index]
        self._module: Any = None
        # The function of module.compile(), or None.
        self._inner: Any = None

    def install(self) -> None:
        """Start to watch the calls of the block."""
        self._module = self._blocks._modules[self._key]
        # The class of some wrappers passes attributes on to the inner module.
        self._inner = self._module.__dict__.get(_CALL)
        self._module.__dict__[_CALL] = self

    def remove(self) -> None:
        """Restore the calls of the block, unless the forward has compiled it."""
        own = self._module.__dict__
        if own.get(_CALL) is self:
            del own[_CALL]
            if self._inner is not None:
                own[_CALL] = self._inner
        self._module = None
        self._inner = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block, and check its inputs and outputs."""
        call = self._module._call_impl if self._inner is None else self._inner
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        self._check.begin_block(self._index, args, kwargs)
        output = call(*args, **kwargs)
        self._check.end_block(self._index, output)
        return output


_CALL: Final = "_compiled_call_impl"


def _read_leaf(value: Any, path: Path) -> Any:
    """Return the value at a place of a nested value, or None if there is no such place."""
    try:
        return read_path(value, path)
    except (LookupError, AttributeError, TypeError):
        return None


def _read_version(tensor: Any) -> int:
    """Return the number of writes to a tensor, which does not exist in inference mode."""
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def _is_unchanged(given: Any, tensor: Any, version: int) -> bool:
    """Return whether a block gets a tensor itself, and without a later write to it."""
    return isinstance(given, Tensor) and given is tensor and _read_version(given) == version


def describe_skip(plan: StagePart, called: int | None = None) -> str:
    """Return the error of a forward that did not call the block that was due.

    Args:
        plan: The stage.
        called: The block that the forward called instead. None: it called another module.
    """
    due = plan.due if plan.due < plan.low else plan.high
    what = (
        f"skipped {plan.stack.name(due)}"
        if called is None or due < len(plan.stack.blocks)
        else f"called {plan.stack.name(called)} again"
    )
    return (
        f"the model's forward {what}, or did not call the blocks in order, so a stage did "
        "not get the hidden states of the previous stage. Have the forward call all blocks in order, "
        "also in training: turn LayerDrop off, as by layerdrop=0.0."
    )


def _describe_change(plan: StagePart, index: int) -> str:
    before, after = plan.stack.name(index - 1), plan.stack.name(index)
    return (
        f"the model's forward did not pass the output of {before} on to {after} unchanged, unlike "
        "with the microbatch that the model was cut with. A stage ends there, and the next stage "
        f"would repeat the change. Move what the forward does between the two into {before} or "
        f"{after}, and cut the model again."
    )

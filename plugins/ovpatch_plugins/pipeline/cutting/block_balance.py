"""The blocks of each stage of a plain model: costs measured on one microbatch, and the partition that fits them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch_plugins.pipeline.cutting.block_stack import BlockStack, CutError, find_tensors

# A partition that takes up to this multiple of the best time is chosen if it needs less memory.
_SLACK: Final = 1.02
# The number of measured rounds. The first one warms up.
_ROUNDS: Final = 3
# The copies of a trained parameter: itself, its gradient and two moments of Adam.
_TRAINED_COPIES: Final = 4


@dataclass
class BlockCosts:
    """The costs of one microbatch.

    Attributes:
        blocks: Seconds of forward and backward, by block.
        before: Seconds of the model's computations before its first block.
        after: Seconds of its computations after its last block.
        block_bytes: Parameters, their gradients and moments, by block.
        activation_bytes: Tensors that a block keeps for its backward, by block.
        before_bytes: As ``block_bytes``, for the modules before the first block.
        after_bytes: As ``block_bytes``, for the modules after the last block.
    """

    blocks: list[float]
    before: float = 0.0
    after: float = 0.0
    block_bytes: list[float] | None = None
    activation_bytes: list[float] | None = None
    before_bytes: float = 0.0
    after_bytes: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the costs as JSON values."""
        return asdict(self)


def measure_costs(
    model: nn.Module,
    stack: BlockStack,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> BlockCosts:
    """Measure the forward and the backward of each block, and of the computations before and after the blocks.

    Each block is detached from the previous block, and its backward runs right after its forward, so only the
    activations of one block exist at a time. Blocks with the same parameters count as equal.

    Args:
        model: The model, in evaluation mode.
        stack: Its blocks.
        args: Arguments of one microbatch.
        kwargs: Keyword arguments of one microbatch.
        device: The device on which it computes.
    """
    rounds = [_Round(model, stack, device).run(args, kwargs) for _ in range(_ROUNDS)][1:]
    if any(len(found.blocks) != len(stack.blocks) for found in rounds):
        # The forward does not call each block once. The trace raises an error that explains this.
        return BlockCosts([1.0] * len(stack.blocks))
    blocks = [min(found.blocks[index] for found in rounds) for index in range(len(stack.blocks))]
    # Blocks of one kind get the median of their times, because noise must not make them differ.
    kinds: dict[Any, list[float]] = {}
    for block, seconds in zip(stack.blocks, blocks, strict=True):
        kinds.setdefault(_find_kind(block), []).append(seconds)
    medians = {kind: statistics.median(found) for kind, found in kinds.items()}
    inside = {id(param) for block in stack.blocks for param in block.parameters()}
    outside = [param for param in model.parameters() if id(param) not in inside]
    after = {id(param) for param in rounds[-1].params_after}
    return BlockCosts(
        [medians[_find_kind(block)] for block in stack.blocks],
        min(found.before for found in rounds),
        min(found.after for found in rounds),
        [_TRAINED_COPIES * _count_bytes(block.parameters()) for block in stack.blocks],
        rounds[-1].activation_bytes,
        _TRAINED_COPIES * _count_bytes(param for param in outside if id(param) not in after),
        _TRAINED_COPIES * _count_bytes(param for param in outside if id(param) in after),
    )


def _find_kind(block: nn.Module) -> Any:
    return type(block), tuple(
        (name, tuple(param.shape), param.dtype) for name, param in block.named_parameters()
    )


def _count_bytes(params: Any) -> float:
    return float(sum(param.numel() * param.element_size() for param in params))


class _Round:
    """One measured forward."""

    def __init__(self, model: nn.Module, stack: BlockStack, device: torch.device) -> None:
        # Seconds of forward and backward, by block.
        self.blocks: list[float] = []
        self.before = 0.0
        self.after = 0.0
        self.activation_bytes: list[float] = []
        # The parameters outside of blocks that the computations after the last block use.
        self.params_after: list[Tensor] = []
        self._model = model
        self._stack = stack
        self._wait: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        inside = {id(param) for block in stack.blocks for param in block.parameters()}
        self._outside: list[Tensor] = [
            param for param in model.parameters() if id(param) not in inside and param.requires_grad
        ]
        self._params = {id(param.untyped_storage()) for param in model.parameters()}
        # The start of the running computation.
        self._started = 0.0
        # The detached inputs of the running computation.
        self._inputs: list[Tensor] = []
        # Bytes that the running block saves, by the address of the storage.
        self._saved: dict[int, int] = {}
        # The hooks that count them; None outside of blocks.
        self._hooks: Any = None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Round:
        """Run the forward and return this object."""
        handles = []
        for block in self._stack.blocks:
            handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            self._started = self._now()
            output = self._model(*args, **kwargs)
            self.after = self._now() - self._started
            used: list[Tensor] = []
            self.after += self._backward([tensor for _, tensor in find_tensors(output)], used)
            self.params_after = used
        finally:
            for handle in handles:
                handle.remove()
            if self._hooks is not None:
                self._hooks.__exit__(None, None, None)
        return self

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()

    def _enter(self, _block: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.blocks:
            self.before = self._now() - self._started
            self.before += self._backward(
                [tensor for _, tensor in find_tensors((args, kwargs))], [], keep=True
            )
        self._inputs = []
        args, kwargs = (_detach(value, self._inputs) for value in (args, kwargs))
        self._saved = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._note_saved, lambda saved: saved
        )
        self._hooks.__enter__()
        self._started = self._now()
        return args, kwargs

    def _leave(self, block: nn.Module, _args: Any, output: Any) -> Any:
        seconds = self._now() - self._started
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        wanted = [*self._inputs, *(param for param in block.parameters() if param.requires_grad)]
        seconds += self._backward([tensor for _, tensor in find_tensors(output)], [], wanted)
        self.blocks.append(seconds)
        self.activation_bytes.append(float(sum(self._saved.values())))
        self._inputs = []
        output = _detach(output, self._inputs)
        self._started = self._now()
        return output

    def _note_saved(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if id(storage) not in self._params:
            self._saved[storage.data_ptr()] = storage.nbytes()
        return saved

    def _backward(
        self,
        outputs: list[Tensor],
        used: list[Tensor],
        wanted: list[Tensor] | None = None,
        *,
        keep: bool = False,
    ) -> float:
        """Compute the gradients of outputs and return the seconds; add the parameters that got one to ``used``."""
        outputs = [
            tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None
        ]
        wanted = self._inputs + self._outside if wanted is None else wanted
        if not outputs or not wanted:
            return 0.0
        seeds = [torch.ones_like(tensor) for tensor in outputs]
        started = self._now()
        grads = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, retain_graph=keep)
        seconds = self._now() - started
        used += [
            tensor
            for tensor, grad in zip(wanted, grads, strict=True)
            if grad is not None and tensor.is_leaf
        ]
        return seconds


def _detach(value: Any, found: list[Tensor]) -> Any:
    """Replace tensors with a gradient by leaves in a nested value, and add the leaves to ``found``."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        found.append(value.detach().requires_grad_())
        return found[-1]
    if type(value) in (tuple, list):
        return type(value)(_detach(item, found) for item in value)
    if type(value) is dict:
        return {key: _detach(item, found) for key, item in value.items()}
    return value


# --- the partition ---


def split_blocks(costs: BlockCosts, placement: Sequence[int]) -> list[int]:
    """Return the first block of each stage: the slowest stage is as fast as possible, then the fullest as small.

    Args:
        costs: The costs of blocks, and of the computations before and after them.
        placement: The rank of each stage.

    Raises:
        CutError: There are fewer blocks than stages.
    """
    stages, count = len(placement), len(costs.blocks)
    check_count(count, stages)
    seconds = _Sums(costs.blocks, costs.before, costs.after)
    best, _ = _partition(
        stages, count, lambda stage, low, high: seconds.sum_stage(stage, stages, low, high)
    )
    if costs.block_bytes is None or costs.activation_bytes is None:
        return best
    params = _Sums(costs.block_bytes, costs.before_bytes, costs.after_bytes)
    activations = _Sums(costs.activation_bytes)
    slowest = max(
        seconds.sum_stage(stage, stages, low, high) for stage, low, high in _ranges(best, count)
    )

    def fill(stage: int, low: int, high: int) -> float:
        if seconds.sum_stage(stage, stages, low, high) > slowest * _SLACK:
            return float("inf")
        # With 1F1B, a stage holds the activations of as many microbatches as stages follow, itself included.
        held = (stages - stage) * activations.sum_stage(stage, stages, low, high)
        return params.sum_stage(stage, stages, low, high) + held

    starts, fullest = _partition(stages, count, fill)
    return starts if fullest < float("inf") else best


def split_evenly(count: int, stages: int) -> list[int]:
    """Return the first block of each stage, so that their numbers of blocks differ by at most one.

    Raises:
        CutError: There are fewer blocks than stages.
    """
    check_count(count, stages)
    return [stage * count // stages for stage in range(stages)]


def check_count(count: int, stages: int) -> None:
    """Check that each stage can have a block.

    Raises:
        CutError: There are fewer blocks than stages.
    """
    if count < stages:
        raise CutError(
            f"{count} blocks make no {stages} stages. Use at most {count} stages: fewer ranks or "
            "chunks."
        )


class _Sums:
    """Sums over blocks, with amounts before the first block and after the last."""

    def __init__(self, blocks: Sequence[float], before: float = 0.0, after: float = 0.0) -> None:
        self._upto = [0.0]
        for amount in blocks:
            self._upto.append(self._upto[-1] + amount)
        self._before = before
        self._after = after

    def sum_stage(self, stage: int, stages: int, low: int, high: int) -> float:
        """Return the sum of a stage with blocks ``low`` to ``high - 1``."""
        extra = (self._before if stage == 0 else 0.0) + (
            self._after if stage == stages - 1 else 0.0
        )
        return self._upto[high] - self._upto[low] + extra


def _ranges(starts: Sequence[int], count: int) -> list[tuple[int, int, int]]:
    return [
        (stage, low, high)
        for stage, (low, high) in enumerate(zip(starts, [*starts[1:], count], strict=True))
    ]


def _partition(
    stages: int, count: int, weigh: Callable[[int, int, int], float]
) -> tuple[list[int], float]:
    """Return the first block of each stage for the lightest heaviest stage, and that stage's weight."""
    # best[s][b] is the weight of the heaviest of s stages with b blocks; first[s][b] is the last stage's first block.
    best: list[list[float]] = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    first = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(stages):
        for high in range(stage + 1, count - (stages - stage - 1) + 1):
            for low in range(stage, high):
                heaviest = max(best[stage][low], weigh(stage, low, high))
                if heaviest < best[stage + 1][high]:
                    best[stage + 1][high], first[stage + 1][high] = heaviest, low
    starts: list[int] = []
    high = count
    for stage in range(stages, 0, -1):
        high = first[stage][high]
        starts.insert(0, high)
    return starts, best[stages][count]

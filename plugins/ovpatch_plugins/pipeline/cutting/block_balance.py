"""Which blocks each stage of a plain model gets: costs measured on one microbatch, and the partition that fits them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch_plugins.pipeline.cutting.block_stack import BlockStack, CutError, find_tensors

_SLACK: Final = 1.02  # of the best time, within which less memory is preferred
_ROUNDS: Final = 3  # of measuring; the first warms up
_TRAINED_COPIES: Final = 4  # of a parameter: itself, its gradient and two moments of Adam


@dataclass
class BlockCosts:
    """What one microbatch costs.

    Attributes:
        blocks: Seconds of forward and backward, by block.
        before: Seconds of what the model computes before its first block.
        behind: Seconds of what it computes behind its last block.
        block_bytes: Parameters, their gradients and moments, by block.
        activation_bytes: What a block keeps for its backward, by block.
        before_bytes: As ``block_bytes``, of what is before the first block.
        behind_bytes: As ``block_bytes``, of what is behind the last block.
    """

    blocks: list[float]
    before: float = 0.0
    behind: float = 0.0
    block_bytes: list[float] | None = None
    activation_bytes: list[float] | None = None
    before_bytes: float = 0.0
    behind_bytes: float = 0.0

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
    """Measure the forward and the backward of each block, and of what is before and behind them.

    Each block is detached from the one before it, and its backward runs right behind its forward: at one time the
    activations of one block are alive. Blocks with the same parameters count as equal.

    Args:
        model: The model, in evaluation mode.
        stack: Its blocks.
        args: Arguments of one microbatch.
        kwargs: Keyword arguments of one microbatch.
        device: Where it computes.
    """
    rounds = [_Round(model, stack, device).run(args, kwargs) for _ in range(_ROUNDS)][1:]
    if any(len(found.blocks) != len(stack.blocks) for found in rounds):
        return BlockCosts([1.0] * len(stack.blocks))  # the trace says what is wrong
    blocks = [min(found.blocks[index] for found in rounds) for index in range(len(stack.blocks))]
    kinds: dict[Any, list[float]] = {}
    for block, seconds in zip(stack.blocks, blocks, strict=True):
        kinds.setdefault(_kind_of(block), []).append(seconds)
    medians = {kind: statistics.median(found) for kind, found in kinds.items()}
    inside = {id(param) for block in stack.blocks for param in block.parameters()}
    outside = [param for param in model.parameters() if id(param) not in inside]
    behind = {id(param) for param in rounds[-1].params_behind}
    return BlockCosts(
        [medians[_kind_of(block)] for block in stack.blocks],
        min(found.before for found in rounds),
        min(found.behind for found in rounds),
        [_TRAINED_COPIES * _count_bytes(block.parameters()) for block in stack.blocks],
        rounds[-1].activation_bytes,
        _TRAINED_COPIES * _count_bytes(param for param in outside if id(param) not in behind),
        _TRAINED_COPIES * _count_bytes(param for param in outside if id(param) in behind),
    )


def _kind_of(block: nn.Module) -> Any:
    return type(block), tuple(
        (name, tuple(param.shape), param.dtype) for name, param in block.named_parameters()
    )


def _count_bytes(params: Any) -> float:
    return float(sum(param.numel() * param.element_size() for param in params))


class _Round:
    """One measured forward."""

    def __init__(self, model: nn.Module, stack: BlockStack, device: torch.device) -> None:
        self.blocks: list[float] = []
        self.before = self.behind = 0.0
        self.activation_bytes: list[float] = []
        self.params_behind: list[Tensor] = []
        self._model, self._stack = model, stack
        self._wait: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        inside = {id(param) for block in stack.blocks for param in block.parameters()}
        self._outside: list[Tensor] = [
            param for param in model.parameters() if id(param) not in inside and param.requires_grad
        ]
        self._params = {id(param.untyped_storage()) for param in model.parameters()}
        self._started = 0.0
        self._inputs: list[Tensor] = []
        self._saved: dict[int, int] = {}
        self._hooks: Any = None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Round:
        """Run it."""
        handles = []
        for block in self._stack.blocks:
            handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            self._started = self._now()
            output = self._model(*args, **kwargs)
            self.behind = self._now() - self._started
            used: list[Tensor] = []
            self.behind += self._backward([one for _, one in find_tensors(output)], used)
            self.params_behind = used
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
                [one for _, one in find_tensors((args, kwargs))], [], keep=True
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
        seconds += self._backward([one for _, one in find_tensors(output)], [], wanted)
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
        """Compute the gradients of outputs and return the seconds; collect the parameters outside that got one."""
        outputs = [one for one in outputs if one.requires_grad and one.grad_fn is not None]
        wanted = self._inputs + self._outside if wanted is None else wanted
        if not outputs or not wanted:
            return 0.0
        ones = [torch.ones_like(one) for one in outputs]
        started = self._now()
        grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True, retain_graph=keep)
        seconds = self._now() - started
        used += [
            one for one, grad in zip(wanted, grads, strict=True) if grad is not None and one.is_leaf
        ]
        return seconds


def _detach(value: Any, found: list[Tensor]) -> Any:
    """Return a nested value with leaves in place of tensors with a gradient, which are collected."""
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
    """Return the first block of each stage: the slowest stage is as fast as can be, then the fullest as small.

    Args:
        costs: What blocks cost, and what is before and behind them.
        placement: The rank of each stage.

    Raises:
        CutError: There are fewer blocks than stages.
    """
    stages, count = len(placement), len(costs.blocks)
    check_count(count, stages)
    seconds = _Sums(costs.blocks, costs.before, costs.behind)
    best, _ = _partition(
        stages, count, lambda stage, low, high: seconds.of(stage, stages, low, high)
    )
    if costs.block_bytes is None or costs.activation_bytes is None:
        return best
    params = _Sums(costs.block_bytes, costs.before_bytes, costs.behind_bytes)
    activations = _Sums(costs.activation_bytes)
    slowest = max(seconds.of(stage, stages, low, high) for stage, low, high in _ranges(best, count))

    def fill(stage: int, low: int, high: int) -> float:
        if seconds.of(stage, stages, low, high) > slowest * _SLACK:
            return float("inf")
        return params.of(stage, stages, low, high) + (stages - stage) * activations.of(
            stage, stages, low, high
        )

    starts, fullest = _partition(stages, count, fill)
    return starts if fullest < float("inf") else best


def split_evenly(count: int, stages: int) -> list[int]:
    """Return the first block of each stage, with numbers of blocks that differ by one at most.

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
    """Sums over blocks, with what is before the first one and behind the last."""

    def __init__(self, blocks: Sequence[float], before: float = 0.0, behind: float = 0.0) -> None:
        self._upto = [0.0]
        for one in blocks:
            self._upto.append(self._upto[-1] + one)
        self._before, self._behind = before, behind

    def of(self, stage: int, stages: int, low: int, high: int) -> float:
        """Return the sum of a stage with blocks ``low`` to ``high - 1``."""
        extra = (self._before if stage == 0 else 0.0) + (
            self._behind if stage == stages - 1 else 0.0
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
    """Return the first block of each stage that makes the heaviest stage lightest, and its weight."""
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

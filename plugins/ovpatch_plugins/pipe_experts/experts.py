"""Experts as a layer calls them: parts of stacked weights, or a script's own function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ovpatch_plugins.pipe_experts.chunks import ChunkPlan, Counts
from ovpatch_plugins.pipe_experts.grouped_gemm import Groups
from ovpatch_plugins.pipe_experts.row_buffer import RowBuffer, cut
from ovpatch_plugins.pipe_experts.wgrad import DelayedWeightGrads

Activation = Callable[[Tensor], Tensor]
"""What is between two products: ``[rows, n]`` -> ``[rows, k]``, row by row."""


class Experts(Protocol):
    """Computes the parts of one call."""

    @property
    def trains(self) -> bool:
        """Whether they have a weight that needs a gradient, as far as can be told: the same on all ranks."""

    def begin(self, part: int) -> None:
        """Be told that a part's rows will be waited for next."""

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """Return a part's outputs: ``[rows, h]`` -> ``[rows, h]``, rows by rank and then by expert."""


Maker = Callable[[ChunkPlan, Counts], Experts]
"""Makes what computes the parts of one call."""


def swiglu(h: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[rows, 2 k]``, whose halves they are."""
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


ACTIVATIONS: Final[dict[str, Activation]] = {
    "swiglu": swiglu,
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
}


class _Parts:
    """The parts of one call.

    Args:
        plan: Which there are.
        counts: Rows of each.
        trains: See :attr:`Experts.trains`.
    """

    def __init__(self, plan: ChunkPlan, counts: Counts, trains: bool) -> None:
        self._parts, self._counts, self.trains = plan.parts, counts, trains

    def begin(self, part: int) -> None:
        """See :meth:`Experts.begin`."""


class _ByExpert(_Parts):
    """Sorts a part's rows by expert, and what is made of them by rank again."""

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        arriving = self._counts.arriving[part]
        by_expert = [list(sizes) for sizes in zip(*arriving, strict=True)]
        sizes = [sum(of_ranks) for of_ranks in by_expert]
        return transposed(self._computed(transposed(rows, arriving), self._parts[part][1], sizes), by_expert)

    def _computed(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        raise NotImplementedError


class StackedFFN(_ByExpert):
    """Feed-forward networks, their weights stacked: a product, the activation, a product.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        weights: ``[e, n, h]`` and ``[e, h, k]``, in the dtype in which is computed.
        activation: Between the products.
        delays: See :class:`DelayedWeightGrads`.
    """

    def __init__(
        self, plan: ChunkPlan, counts: Counts, weights: Sequence[Tensor], activation: Activation, *, delays: bool
    ) -> None:
        self._weights, self._activation = DelayedWeightGrads(weights, delays=delays, reused=plan.chunks > 1), activation
        super().__init__(plan, counts, self._weights.trained)

    def begin(self, part: int) -> None:
        """See :meth:`Experts.begin`."""
        self._weights.begin(part)

    def _computed(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        groups = Groups(sizes)
        h = self._weights.product(0, rows, experts, groups)
        between = self._activation(h).to(h.dtype)  # autocast has some operations computed in float32
        return self._weights.product(1, between, experts, groups)


@dataclass(frozen=True)
class Stacked:
    """Makes a :class:`StackedFFN`, of whose arguments it is told all but the first two."""

    weights: Sequence[Tensor]
    activation: Activation
    delays: bool

    def __call__(self, plan: ChunkPlan, counts: Counts) -> Experts:
        """Make what computes the parts of one call."""
        return StackedFFN(plan, counts, self.weights, self.activation, delays=self.delays)


class Separate(_ByExpert):
    """Experts that are modules, or functions, one each.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        modules: This rank's experts, ``[rows, h]`` -> ``[rows, h]`` each. One without rows is called with none, so that
            its parameters have a gradient on every rank.
    """

    def __init__(self, plan: ChunkPlan, counts: Counts, modules: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__(plan, counts, any(_trains(module) for module in modules))
        self._modules = modules

    def _computed(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        split = cut(rows, RowBuffer(sizes))
        return torch.cat([self._modules[i](some) for i, some in zip(experts, split, strict=True)])


class Grouped(_ByExpert):
    """Experts that one function computes, which is told how many rows each has, as torchtitan's are.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        function: Rows by expert, ``[rows, h]``, and the number of rows of each of this rank's experts, ``[e]``, ->
            ``[rows, h]``. It is called in every part, also without rows.
    """

    def __init__(self, plan: ChunkPlan, counts: Counts, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(plan, counts, _trains(function))
        self._function, self._local = function, plan.local

    def _computed(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        numbers = [0] * self._local
        numbers[experts.start : experts.stop] = sizes
        return self._function(rows, torch.tensor(numbers, device=rows.device))


class Numbered(_Parts):
    """Experts that one function computes, which is told each row's expert.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        function: ``[rows, h]`` and local experts ``[rows]`` -> ``[rows, h]``. Not called without rows, unless no part
            has any; what it returns becomes of the rows' dtype, as it is on ranks where it is not called.
    """

    def __init__(self, plan: ChunkPlan, counts: Counts, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(plan, counts, _trains(function))
        self._function = function
        self._gets_none = not any(sum(counts.received(part)) for part in range(len(self._parts)))

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        if not len(rows):
            return self._of_none(part, rows)
        arriving, experts = self._counts.arriving[part], self._parts[part][1]
        numbers = torch.arange(experts.start, experts.stop, device=rows.device).repeat(len(arriving))
        sizes = torch.tensor(arriving, device=rows.device).view(-1)
        return self._function(rows, numbers.repeat_interleave(sizes, output_size=len(rows))).to(rows.dtype)

    def _of_none(self, part: int, rows: Tensor) -> Tensor:
        """Return no rows; if this rank gets none at all, of a row without effect, so that parameters get gradients."""
        if part or not self._gets_none:
            return rows
        some = rows.sum(dim=0, keepdim=True)
        return self._function(some, torch.zeros(1, dtype=torch.long, device=rows.device))[:0].to(rows.dtype)


def _trains(function: Any) -> bool:
    """Tell whether a module, or a module's method, has anything to train; other functions are said to have."""
    while isinstance(function, functools.partial):
        function = function.args[0] if function.args else function.func
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return not isinstance(module, nn.Module) or any(param.requires_grad for param in module.parameters())


def transposed(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return blocks of rows that lie by the first index of ``sizes`` and then by the second, the other way round."""
    first, second = len(sizes), len(sizes[0])
    if first == 1 or second == 1:
        return rows
    blocks = rows.split([size for some in sizes for size in some])
    return torch.cat([blocks[i * second + j] for j in range(second) for i in range(first)])

"""Experts as a layer calls them: parts of stacked weights, or a script's own function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ovpatch_plugins.pipe_experts.counters import COUNTERS
from ovpatch_plugins.pipe_experts.memory import Memory, cut
from ovpatch_plugins.pipe_experts.parts import Counts, Plan
from ovpatch_plugins.pipe_experts.weights import Weights

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


Maker = Callable[[Plan, Counts], Experts]
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


class StackedFFN:
    """Feed-forward networks, their weights stacked: a product, the activation, a product.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        weights: ``[e, n, h]`` and ``[e, h, k]``, in the dtype in which is computed.
        activation: Between the products.
        delays: See :class:`Weights`.
    """

    def __init__(
        self, plan: Plan, counts: Counts, weights: Sequence[Tensor], activation: Activation, *, delays: bool
    ) -> None:
        self._parts, self._counts, self._activation = plan.parts, counts, activation
        self._weights = Weights(weights, delays=delays)
        self.trains = self._weights.trained
        COUNTERS.stacked_calls += 1

    def begin(self, part: int) -> None:
        """See :meth:`Experts.begin`."""
        self._weights.begin(part)

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        arriving, experts = self._counts.arriving[part], self._parts[part][1]
        by_expert = [list(sizes) for sizes in zip(*arriving, strict=True)]
        sizes = [sum(of_ranks) for of_ranks in by_expert]
        h = self._weights.product(0, transposed(rows, arriving), experts, sizes)
        between = self._activation(h).to(h.dtype)  # autocast has some operations computed in float32
        out = self._weights.product(1, between, experts, sizes)
        return transposed(out, by_expert)


class Separate:
    """Experts that are modules, or functions, one each.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        modules: This rank's experts, ``[rows, h]`` -> ``[rows, h]`` each. One without rows is called with none, so that
            its parameters have a gradient on every rank.
    """

    def __init__(self, plan: Plan, counts: Counts, modules: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._parts, self._counts, self._modules = plan.parts, counts, modules
        self.trains = any(_trains(module) for module in modules)

    def begin(self, part: int) -> None:
        """See :meth:`Experts.begin`."""

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        arriving, experts = self._counts.arriving[part], self._parts[part][1]
        by_expert = [list(sizes) for sizes in zip(*arriving, strict=True)]
        split = cut(transposed(rows, arriving), Memory([sum(sizes) for sizes in by_expert]))
        outs = [self._modules[i](some) for i, some in zip(experts, split, strict=True)]
        return transposed(torch.cat(outs), by_expert)


class Numbered:
    """Experts that one function computes, which is told each row's expert.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        function: ``[rows, h]`` and local experts ``[rows]`` -> ``[rows, h]``. Not called without rows, unless no part
            has any; what it returns becomes of the rows' dtype, as it is on ranks where it is not called.
    """

    def __init__(self, plan: Plan, counts: Counts, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._parts, self._counts, self._function = plan.parts, counts, function
        self.trains = _trains(function)
        self._needed = not any(sum(counts.received(part)) for part in range(len(self._parts)))

    def begin(self, part: int) -> None:
        """See :meth:`Experts.begin`."""

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        if not len(rows):
            return self._of_none(part, rows)
        experts = self._parts[part][1]
        sizes = torch.tensor(self._counts.arriving[part], device=rows.device).view(-1)
        numbers = torch.arange(experts.start, experts.stop, device=rows.device).repeat(len(self._counts.arriving[part]))
        return self._function(rows, numbers.repeat_interleave(sizes, output_size=len(rows))).to(rows.dtype)

    def _of_none(self, part: int, rows: Tensor) -> Tensor:
        """Return no rows; if this rank gets none at all, of a row without effect, so that parameters get gradients."""
        if not self._needed or part:
            return rows
        some = rows.sum(dim=0, keepdim=True)
        return self._function(some, torch.zeros(1, dtype=torch.long, device=rows.device))[:0].to(rows.dtype)


class Grouped:
    """Experts that one function computes, which is told how many rows each has, as torchtitan's are.

    Args:
        plan: Which parts there are.
        counts: Rows of each.
        function: Rows by expert, ``[rows, h]``, and the number of rows of each of this rank's experts, ``[e]``, ->
            ``[rows, h]``. It is called in every part, also without rows.
    """

    def __init__(self, plan: Plan, counts: Counts, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._parts, self._counts, self._function, self._local = plan.parts, counts, function, plan.local
        self.trains = _trains(function)

    def begin(self, part: int) -> None:
        """See :meth:`Experts.begin`."""

    def __call__(self, part: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        arriving, experts = self._counts.arriving[part], self._parts[part][1]
        by_expert = [list(sizes) for sizes in zip(*arriving, strict=True)]
        numbers = [0] * self._local
        numbers[experts.start : experts.stop] = [sum(sizes) for sizes in by_expert]
        found = self._function(transposed(rows, arriving), torch.tensor(numbers, device=rows.device))
        return transposed(found, by_expert)


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

"""A few numbers that all ranks of a group are to see alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Numbers:
    """Exchanges numbers; all ranks call the same methods in the same order. The host waits for the result.

    Args:
        group: The ranks.
        device: Where their collectives run.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def of_first(self, values: Sequence[float]) -> list[float]:
        """Return what the group's first rank gave."""
        numbers = self._tensor(values)
        dist.broadcast(numbers, group=self._group, group_src=0)
        return _listed(numbers)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return, of each number, the largest that a rank gave. No rank is done before all have begun."""
        numbers = self._tensor(values)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return _listed(numbers)

    def of_all(self, value: float) -> list[float]:
        """Return each rank's number."""
        numbers = self._tensor([0.0] * self._group.size())
        numbers[self._group.rank()] = value
        dist.all_reduce(numbers, group=self._group)
        return _listed(numbers)

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _listed(numbers: Tensor) -> list[float]:
    found: list[float] = numbers.tolist()
    return found

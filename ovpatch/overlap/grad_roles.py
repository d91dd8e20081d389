"""Who works with the gradients of which a model's ranks keep parts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Arriving(Protocol):
    """Reductions under way, as :class:`ovpatch.overlap.reduction.Reduction`."""

    def wait_for_peers(self) -> None:
        """Wait until all ranks have taken part; no part has been written."""

    def wait(self) -> None:
        """Wait for the results."""


class Reducer(Protocol):
    """Who reduces the gradients of a model."""

    @property
    def identity(self) -> str:
        """Name of the model, the same on all ranks and no other's in the process group."""


class Taker(Protocol):
    """Who takes gradients of half precision in the running backward, before they are cast."""

    def take(self, param: torch.nn.Parameter, index: int, half: Tensor) -> bool:
        """Put a gradient in ``p.grad``, unless it is better cast; return whether that was done."""

    def adds(self, index: int) -> None:
        """Note that autograd is about to add to a gradient, and so that none was taken, or not only."""

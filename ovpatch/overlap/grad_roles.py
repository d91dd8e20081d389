"""Who works with the gradients of which a model's ranks keep parts."""

from __future__ import annotations

from typing import Protocol


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

"""Whether models that are wrapped from now on keep gradients by parts; set by the feature that makes use of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

# Who works with the gradients of which a model's ranks keep parts.


class Arriving(Protocol):
    """Reductions under way, as :class:`ovpatch.overlap.data_parallel.grad_sync.GradSync`."""

    def wait_for_peers(self) -> None:
        """Wait until all ranks have taken part; no part has been written."""

    def wait(self) -> None:
        """Wait for the results."""


class Reducer(Protocol):
    """Who reduces the gradients of a model."""

    @property
    def identity(self) -> str:
        """Name of the model, the same on all ranks and no other's in the process group."""


# With how many elements a parameter is worth to be cut; None keeps all whole, and costs nothing.
Minimum = Callable[[Tensor], int] | None


class Sharding:
    """What is to be the same on all ranks.

    Attributes:
        minimum: Where parameters begin to be cut.
        in_flight: How many bytes of whole gradients may be under way to their parts; see [Note: gradients in flight].
        terms: What else of the feature has to be the same on all ranks; empty where it is off.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Keep gradients whole."""
        self.minimum: Minimum = None
        self.in_flight = math.inf
        self.terms: Mapping[str, Any] = {}


sharding = Sharding()

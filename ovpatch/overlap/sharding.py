"""Whether models that are wrapped from now on keep gradients by parts; set by the feature that makes use of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

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

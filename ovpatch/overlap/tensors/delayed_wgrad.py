"""Weight gradients that a linear's backward leaves to another feature, which computes them later.

A feature with linears of its own asks the slot of :data:`DELAYED_WGRAD` for each weight gradient, and leaves out what
is taken. A feature that can compute later fills it. An empty slot costs the test for None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import Tensor

ComputeGrad: TypeAlias = Callable[[], Tensor | None]
"""Returns a weight's gradient in its class and dtype, or None if it has been added to the one that is already there."""

DELAYS_WGRAD: Final = "_ovpatch_delays_wgrad"
"""Attribute of classes of linears that ask; true."""


@dataclass
class DelayedWgrad:
    """The slot.

    Attributes:
        take: Called inside a backward with a weight and what computes its gradient, which keeps its operands; tells
            whether the caller leaves the gradient out.
    """

    take: Callable[[Tensor, ComputeGrad], bool] | None = None


DELAYED_WGRAD: Final = DelayedWgrad()

"""What features ask of linears: the dtype of their products, and delayed weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a product is computed; None if autocast leaves it alone.

    Args:
        kind: Type of the device.
        dtype: Of the input.
    """
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


ComputeGrad: TypeAlias = Callable[[], Tensor | None]
"""Returns a weight's gradient in its class and dtype, or None if it has been added to the one that is already there."""

DELAYS_WGRAD: Final = "_ovpatch_delays_wgrad"
"""Attribute of classes of linears that ask; true."""


@dataclass
class DelayedWgrad:
    """The slot for weight gradients that a linear's backward leaves to another feature, which computes them later.

    A feature with linears of its own asks the slot for each weight gradient, and leaves out what is taken. A feature
    that can compute later fills it. An empty slot costs the test for None.

    Attributes:
        take: Called inside a backward with a weight and what computes its gradient, which keeps its operands; tells
            whether the caller leaves the gradient out.
    """

    take: Callable[[Tensor, ComputeGrad], bool] | None = None


DELAYED_WGRAD: Final = DelayedWgrad()

"""Shared facts about linears: the dtype of their GEMMs, and delayed weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a GEMM runs, or None if autocast does not change it.

    Args:
        kind: The type of the device.
        dtype: The dtype of the input.
    """
    # torch's autocast does not cast float64 either.
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


#: Returns the gradient of a weight in the weight's class and dtype. Returns None if it has already
#: added the gradient to ``weight.grad``.
ComputeGrad: TypeAlias = Callable[[], Tensor | None]

#: Name of an attribute that is true in classes of linears that offer their weight gradients to
#: :data:`DELAYED_WGRAD`.
DELAYS_WGRAD: Final = "_ovpatch_delays_wgrad"


@dataclass
class DelayedWgrad:
    """A slot for weight gradients that a linear's backward leaves to another feature.

    A feature with its own linears offers each weight gradient to the slot, and omits the gradients
    that the slot takes. A feature that can compute gradients later fills the slot. An empty slot
    costs one test for None.

    Attributes:
        take: Called inside a backward, with a weight and a function that computes its gradient and
            holds the operands. Returns whether the caller must omit the gradient.
    """

    take: Callable[[Tensor, ComputeGrad], bool] | None = None


DELAYED_WGRAD: Final = DelayedWgrad()

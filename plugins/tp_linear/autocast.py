"""In which dtype autocast has a linear computed."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return in which dtype a linear of an input of ``dtype`` is computed; None if autocast leaves it alone.

    Args:
        kind: Type of the device.
        dtype: Of the input.
    """
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def cast(kind: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, weight and bias as autocast would have them for a linear."""
    dtype = autocast_dtype(kind, rows.dtype)
    if dtype is None:
        return rows, weight, bias
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

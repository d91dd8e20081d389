"""The dtype in which autocast has a product computed."""

from __future__ import annotations

import torch


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a product is computed; None if autocast leaves it alone.

    Args:
        kind: Type of the device.
        dtype: Of the input.
    """
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)

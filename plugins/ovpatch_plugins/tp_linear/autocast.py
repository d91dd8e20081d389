"""What autocast makes of a linear's tensors."""

from __future__ import annotations

from torch import Tensor

from ovpatch.overlap.autocast import autocast_dtype


def cast(kind: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, weight and bias as autocast would have them for a linear."""
    dtype = autocast_dtype(kind, rows.dtype)
    if dtype is None:
        return rows, weight, bias
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

"""Sums of what several ranks gave."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_up(out: Tensor, given: Sequence[Tensor], scale: float) -> None:
    """Write ``scale`` times the sum of tensors, added in their order in float32 (float64 in float64), rounded once.

    Args:
        out: ``[n]``, contiguous.
        given: ``[n]`` each, contiguous, of the dtype of ``out``.
        scale: Factor.
    """
    if out.is_cuda:
        from ovpatch.overlap.copies import kernels  # Triton is not everywhere

        kernels.add_up(out, given, scale)
        return
    total = given[0].to(torch.promote_types(out.dtype, torch.float32))
    for one in given[1:]:
        total = total + one
    out.copy_(total * scale)

"""Sums of what several ranks gave."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ovpatch.overlap.copies.spans import Span


def add_up(out: Span, given: Sequence[Span], scale: float, stream: int) -> None:
    """Write ``scale`` times a sum, whose terms are added in their order in float32 (float64 in float64), rounded once.

    Args:
        out: Where to.
        given: The terms, as long as ``out``, of one dtype.
        scale: Factor.
        stream: On which CUDA stream, by its handle; 0 without CUDA.
    """
    if out.memory.is_cuda:
        from ovpatch.overlap.copies import kernels  # Triton is not everywhere

        kernels.add_up(out, given, scale, stream)
        return
    first, *others = [span.tensor() for span in given]
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for one in others:
        total = total + one
    out.tensor().copy_(total * scale)

"""Sums of what several ranks gave."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ovpatch.overlap.copies.spans import Addend, Span


def add_up(slots: Sequence[Span | None], addends: Sequence[Addend], scale: float, stream: int) -> None:
    """Write ``scale`` times sums, whose terms are added in the order of ranks in float32, and rounded once.

    Args:
        slots: What other ranks sent, by rank, of one dtype; None for this rank. Terms of float64 are added in float64.
        addends: What this rank adds, of the same dtype, and where the sums go, of one dtype.
        scale: Factor.
        stream: On which CUDA stream, by its handle; 0 without CUDA.
    """
    if addends[0].out.memory.is_cuda:
        from ovpatch.overlap.copies import kernels  # Triton is not everywhere

        kernels.add_up(slots, addends, scale, stream)
        return
    for own, out, at in addends:
        terms = [own.tensor() if slot is None else slot.tensor().narrow(0, at, own.numel) for slot in slots]
        total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32))
        for term in terms[1:]:
            total = total + term
        out.tensor().copy_(total * scale)

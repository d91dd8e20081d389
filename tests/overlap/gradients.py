"""Gradients as autograd makes them, and collectives done by hand: several buckets stand for the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ovpatch.overlap.data_parallel.grad_bucket import GradBucket

FLAT = 1 << 60  # as flat_below: every gradient is small
ALONE = 0  # as flat_below: none is


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def backward(given: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Give every parameter a gradient as the engine does; return their values."""
    torch.autograd.backward(list(given), [torch.randn_like(p) for p in given])
    return [p.grad.clone() for p in given]


def alike(given: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return another rank's parameters: the same values, memory of their own, no gradients."""
    return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in given]


def reduce(
    buckets: Sequence[GradBucket],
    *,
    average: bool = False,
    absent: Sequence[Any] = (),
    skip: Any = (),
) -> None:
    """Reduce the gradients in ``buckets``, one per rank, as ``Reduction`` does."""
    world = len(buckets)
    given = absent or [()] * world
    packs = [
        b.pack(1 if average else world, absent=left_out)
        for b, left_out in zip(buckets, given, strict=True)
    ]
    for pieces in zip(*packs, strict=True):
        assert all(piece.is_contiguous() for piece in pieces)
        # Bits as they lie in memory: that is what a collective sees.
        total = sum(piece.flatten() for piece in pieces)
        for piece in pieces:
            piece.view(-1).copy_(total / world if average else total)
    for bucket in buckets:
        finish(bucket, skip=skip)


def finish(bucket: GradBucket, skip: Any = ()) -> None:
    for target, result in bucket.unpack(skip=skip):
        with torch.no_grad():
            target.copy_(result)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

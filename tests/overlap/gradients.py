"""Gradients as autograd makes them, and collectives by hand between buckets that represent the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ovpatch.overlap.data_parallel.grad_bucket import GradBucket

# A value of flat_below with which every gradient is small.
FLAT = 1 << 60
# A value of flat_below with which no gradient is small.
ALONE = 0


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def backward(given: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Give every parameter a gradient as autograd's engine does; return copies of the gradients."""
    torch.autograd.backward(list(given), [torch.randn_like(p) for p in given])
    return [p.grad.clone() for p in given]


def replicas(given: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters of another rank, with the same values, their own memory, and no gradients."""
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
        # A collective adds elements in the order in which they are stored.
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

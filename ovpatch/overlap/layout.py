"""Which gradients share a bucket, by the rules of stock DDP, so that reductions add up in the same order.

A ring adds the parts of a flat tensor in an order that depends on where the tensor begins and ends. Buckets cut at the
places where stock DDP cuts them therefore give stock's bits; torch's own function makes the cut.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ovpatch.overlap.buckets import GradBucket


def initial_layout(
    params: Sequence[torch.nn.Parameter], limits: Sequence[int], *, bucketed: bool
) -> list[GradBucket]:
    """Return the buckets for the first backward, whose order of gradients is not known yet.

    Args:
        params: The parameters in registration order.
        limits: Capacity of the first, second, … bucket in bytes; the last one holds for all that follow.
        bucketed: Cut in reverse registration order. Otherwise one bucket per dtype and device, as stock DDP begins
            where it will see the order of gradients in the first backward.
    """
    sizes = list(limits) if bucketed else [sys.maxsize]
    groups, _ = dist._compute_bucket_assignment_by_size(list(params), sizes, [False] * len(params))
    return [_bucket(params, group) for group in reversed(groups)]


def arrival_layout(
    params: Sequence[torch.nn.Parameter], limits: Sequence[int], order: Sequence[int]
) -> list[GradBucket]:
    """Return the buckets cut along ``order``, the parameters' indices as their gradients arrived."""
    groups, _ = dist._compute_bucket_assignment_by_size(
        [params[i] for i in order], list(limits), [False] * len(order), list(order)
    )
    return [_bucket(params, group) for group in groups]


def _bucket(params: Sequence[torch.nn.Parameter], indices: Sequence[int]) -> GradBucket:
    return GradBucket(indices, [params[i] for i in indices])

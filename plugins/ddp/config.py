"""What the reducer is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReducerConfig:
    """What the reducer is told by the ``DistributedDataParallel`` object and by the feature's options.

    Attributes:
        bucket_limits: Capacity of the first, second, … bucket in bytes; the last holds for all that follow.
        find_unused_parameters: Whether a backward may leave parameters out.
        gradient_as_bucket_view: Whether ``p.grad`` may always share memory with the bucket.
        overlap: Whether buckets are reduced while backward still computes.
    """

    bucket_limits: tuple[int, ...]
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    overlap: bool = True

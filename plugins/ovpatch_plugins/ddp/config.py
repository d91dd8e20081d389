"""What the reducer is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReducerConfig:
    """What the reducer is told by the ``DistributedDataParallel`` object and by the feature's options.

    Attributes:
        bucket_limits: Capacity of the first, second, … bucket in bytes; the last holds for all that follow.
        granularity: What a bucket holds: ``size``, ``layer`` or ``module``.
        sparse: Whether each parameter's gradient will be sparse.
        find_unused_parameters: Whether a backward may leave parameters out.
        skip_unused: Launch nothing for buckets whose parameters are all left out.
        overlap: Whether buckets are reduced while backward still computes.
        in_fp32: Whether half-precision gradients are reduced in float32.
        sums_in_fp32: Whether they are added up in float32 over several backwards.
        average: Whether the collective divides by the number of ranks.
        max_ctas: How many thread blocks the collectives may take; ``None`` for as many as the script's communicator.
        late: Whether a further backward through a synchronised forward is reduced, too.
    """

    bucket_limits: tuple[int, ...]
    granularity: str = "size"
    sparse: tuple[bool, ...] = ()
    find_unused_parameters: bool = False
    skip_unused: bool = False
    overlap: bool = True
    in_fp32: bool = False
    sums_in_fp32: bool = False
    average: bool = False
    max_ctas: int | None = None
    late: bool = True

    @property
    def layout(self) -> tuple[tuple[int, ...], str, bool, tuple[bool, ...]]:
        """What :class:`ovpatch.overlap.layout.Layout` is told of it."""
        return self.bucket_limits, self.granularity, self.in_fp32, self.sparse

    @property
    def reduction(self) -> dict[str, bool]:
        """What :class:`ovpatch.overlap.reduction.Reduction` is told of it."""
        return {"average": self.average, "skip_absent": self.skip_unused}

"""Counters of the feature in this process."""

from __future__ import annotations

from ovpatch.hookspecs import FeatureCounters
from ovpatch.overlap.tensor_parallel.operator_counts import report_counts_in


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        linears: Linears to which the feature is attached.
        gathers: Gathers of PrepareModuleInput, for several linears, to which the feature is attached.
        calls: Forward passes through attached linears that our operators computed, and ``compiled_calls``.
        shared_calls: Calls whose GEMM was computed together with a gather for several linears.
        compiled_calls: Operators that compiled graphs ran, forward and backward, with option ``compiled``.
        fused: GEMMs, forward and backward, by kernels of schedule ``fused``, also while ``auto`` measured.
        copied: Gathers and sums, forward and backward, whose rows copy engines moved, also while ``auto`` measured.
        stock_calls: Forward passes through attached linears that stock PyTorch computed.
        unused: GEMMs that were computed together with a gather, but that no linear used.
    """

    linears: int = 0
    gathers: int = 0
    calls: int = 0
    shared_calls: int = 0
    compiled_calls: int = 0
    fused: int = 0
    copied: int = 0
    stock_calls: int = 0
    unused: int = 0


COUNTERS = Counters()

# Operators of compiled graphs, and kernels, do not know this feature. They count here through the shared counters.
report_counts_in(COUNTERS)

"""Counters of the feature in this process."""

from __future__ import annotations

from ovpatch.hookspecs import FeatureCounters
from ovpatch.overlap.tensor_parallel.operator_counts import report_counts_in


class Counters(FeatureCounters):
    """Totals since the process started."""

    linears: int = 0  # linears whose forward was taken over
    gathers: int = 0  # gathers for several linears (PrepareModuleInput) that were taken over
    calls: int = 0  # forward passes through taken-over linears that our operators computed
    shared_calls: int = (
        0  # those of them whose product was computed together with a gather for several
    )
    compiled_calls: int = 0  # those that were part of a compiled graph
    fused: int = 0  # products that kernels of schedule ``fused`` computed, forward and backward
    stock_calls: int = 0  # forward passes through taken-over linears that were left to stock
    unused: int = 0  # products computed together with a gather that no linear asked for


COUNTERS = Counters()

# Operators of compiled graphs, and kernels, count there.
report_counts_in(COUNTERS)

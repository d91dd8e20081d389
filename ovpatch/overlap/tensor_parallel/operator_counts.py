"""The counters of the operators. A feature replaces them by its own counters, so that the report shows them."""

from __future__ import annotations

from typing import Protocol


class OperatorCounts(Protocol):
    """The counters that operators add to.

    Attributes:
        calls: Operators of compiled graphs that ran. The callers of eager operators count those.
        compiled_calls: The same operators of compiled graphs, forward and backward.
        fused: GEMMs that the kernels of schedule ``fused`` computed, forward and backward.
        copied: Gathers and sums whose rows copy engines moved, forward and backward.
    """

    calls: int
    compiled_calls: int
    fused: int
    copied: int


class _UnreportedCounts:
    """The counts of a process in which no feature reports them."""

    calls = 0
    compiled_calls = 0
    fused = 0
    copied = 0


counts: OperatorCounts = _UnreportedCounts()


def report_counts_in(counters: OperatorCounts) -> None:
    """Make all operators add to the counters of a feature."""
    global counts
    counts = counters

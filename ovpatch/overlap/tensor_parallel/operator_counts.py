"""Counters of the operators, which a feature replaces by its own so that the report shows them."""

from __future__ import annotations

from typing import Protocol


class OperatorCounts(Protocol):
    """The counters that operators add to.

    Attributes:
        calls: Forward passes through operators of compiled graphs; eager ones are counted by their caller.
        compiled_calls: The same forward passes.
        fused: GEMMs that the kernels of schedule ``fused`` computed, forward and backward.
    """

    calls: int
    compiled_calls: int
    fused: int


class _UnreportedCounts:
    """Counts of a process in which no feature reports them."""

    calls = 0
    compiled_calls = 0
    fused = 0


counts: OperatorCounts = _UnreportedCounts()


def report_counts_in(counters: OperatorCounts) -> None:
    """Add to the counters of a feature from the next call on."""
    global counts
    counts = counters

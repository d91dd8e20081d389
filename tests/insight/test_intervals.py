"""Intervals against sets of integers: every operation is what Python's set does point by point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovpatch.insight.timeline.trace import Intervals

POINTS = st.integers(-30, 30)
SPANS = st.lists(st.tuples(POINTS, POINTS), max_size=12)


def points(spans) -> set[int]:
    return {point for start, end in spans for point in range(start, end)}


def is_normal(intervals: Intervals) -> bool:
    """Ordered, not empty, and apart: two that touch would be one."""
    ends = [end for span in intervals for end in span]
    return ends == sorted(set(ends)) and len(ends) == 2 * len(intervals.spans)


def same(intervals: Intervals, expected: set[int]) -> None:
    assert points(intervals) == expected
    assert intervals.total == len(expected)
    assert bool(intervals) == bool(expected)
    assert is_normal(intervals)


@given(SPANS)
def test_of_is_the_union(a):
    same(Intervals.union_of(a), points(a))


@given(SPANS, SPANS)
def test_operators_are_those_of_sets(a, b):
    x, y, p, q = Intervals.union_of(a), Intervals.union_of(b), points(a), points(b)
    same(x | y, p | q)
    same(x & y, p & q)
    same(x - y, p - q)


@given(SPANS, POINTS, POINTS)
def test_windows_and_gaps(a, start, end):
    window = set(range(start, end))
    same(Intervals.union_of(a).clip(start, end), points(a) & window)
    same(Intervals.union_of(a).find_gaps(start, end), window - points(a))


@given(SPANS, SPANS)
def test_parts_add_up(a, b):
    x, y = Intervals.union_of(a), Intervals.union_of(b)
    assert (x & y).total + (x - y).total == x.total
    assert (x | y).total + (x & y).total == x.total + y.total


def test_equal_sets_are_equal_however_they_were_made():
    assert Intervals.union_of([(3, 5), (0, 2), (2, 3)]) == Intervals.union_of([(0, 5)])


@pytest.mark.parametrize(
    "start", [0, 1_795_261_711_000_000_000]
)  # nanoseconds since the epoch exceed a float's 53 bits
def test_a_nanosecond_counts_at_any_date(start):
    a, b = (
        Intervals.union_of([(start, start + 10)]),
        Intervals.union_of([(start + 1, start + 2), (start + 9, start + 20)]),
    )
    assert (a & b).spans == ((start + 1, start + 2), (start + 9, start + 10))
    assert (a - b).total == 8

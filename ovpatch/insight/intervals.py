"""Sets of time, exact: half-open intervals with integer ends, in nanoseconds.

Sums of durations count twice what happens twice at a time, and floats of microseconds since the epoch are only exact to
a quarter of one. Hence sets, and integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Intervals:
    """A set of points in time; make it with :meth:`of`.

    Attributes:
        spans: Disjoint ``(start, end)`` with ``start < end``, in order; no two of them touch.
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Intervals:
        """Return the union of spans in any order; one that ends where it starts, or before, holds nothing."""
        merged: list[Span] = []
        for start, end in sorted(spans):
            if start >= end:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return cls(tuple(merged))

    @property
    def total(self) -> int:
        """Nanoseconds in the set."""
        return sum(end - start for start, end in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.of((*self.spans, *other.spans))

    def __and__(self, other: Intervals) -> Intervals:
        return Intervals(tuple(_common(self.spans, other.spans)))

    def __sub__(self, other: Intervals) -> Intervals:
        if not self.spans:
            return self
        return self & other.gaps(self.spans[0][0], self.spans[-1][1])

    def within(self, start: int, end: int) -> Intervals:
        """Return the part from ``start`` up to ``end``."""
        return self & Intervals.of([(start, end)])

    def gaps(self, start: int, end: int) -> Intervals:
        """Return what of ``start`` up to ``end`` is not in the set."""
        inside = self.within(start, end).spans
        edges = [(start, start), *inside, (end, end)]
        return Intervals(tuple((a, b) for (_, a), (b, _) in pairwise(edges) if a < b))


def _common(left: Sequence[Span], right: Sequence[Span]) -> Iterator[Span]:
    """Yield what two ordered lists of disjoint spans share, in one pass over both."""
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            yield start, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1

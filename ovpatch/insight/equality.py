"""The one equality rule of the project, used by the tests and by ``ovpatch verify``.

Two runs are equal if every value is

- bitwise equal: same name, dtype, shape and layout, equal values, where NaN equals NaN and 0.0 equals -0.0; or
- equal within noise: the largest absolute difference of a tensor is at most ``max(1e-6, 2 * yardstick)``, where the
  yardstick is what stock differs from itself when only the order of its reductions changes. ``verify``, which sees
  every value of every step, asks for more, and measures noise better (``judging.py`` and ``noise.py`` there).

[Note: why the yardstick is a reordered run] Two identical stock runs are bitwise equal, so a rerun measures no noise at
all, while reordering alone moves some tensors by far more than any fixed tolerance: attention key biases have a true
gradient of zero, and AdamW turns the rounding error that is left into full-size steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ovpatch.insight.difference import Difference, Scalar, difference
from ovpatch.insight.flatten import Empty, Leaf, flatten, mismatch

#: Absolute difference that is always allowed.
FLOOR: Final = 1e-6

#: How many times the yardstick is allowed.
FACTOR: Final = 2.0

_NOTHING: Final = "empty on both sides"


class Verdict(str, Enum):
    """How two values compare, from best to worst."""

    BITWISE = "bitwise"
    WITHIN_NOISE = "within noise"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Row:
    """One value of the comparison.

    Attributes:
        name: Dotted name.
        verdict: How it compares.
        max_abs_diff: Largest absolute difference; infinite if a side is not finite where the other is; None if the
            values are no numbers or cannot be subtracted.
        allowed: Largest absolute difference that would have been within noise; None where no noise is tolerated or
            nothing differs.
        first_index: Index of the first value that differs.
        note: What differs, in words.
    """

    name: str
    verdict: Verdict
    max_abs_diff: float | None = None
    allowed: float | None = None
    first_index: tuple[int, ...] | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON types; an infinite difference becomes the text ``inf``."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "max_abs_diff": _json_number(self.max_abs_diff),
            "allowed": _json_number(self.allowed),
            "first_index": None if self.first_index is None else list(self.first_index),
            "note": self.note,
        }

    @property
    def excess(self) -> float:
        """How many times the allowed difference it is, to sort the worst first."""
        if self.verdict is Verdict.BITWISE:
            return -1.0
        if self.max_abs_diff is None or not self.allowed:
            return math.inf
        return self.max_abs_diff / self.allowed


@dataclass(frozen=True)
class Comparison:
    """The outcome of :func:`compare`; rows are in stock's order, extra names last."""

    rows: tuple[Row, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all rows."""
        return max((row.verdict for row in self.rows), key=list(Verdict).index, default=Verdict.BITWISE)

    def worst(self, count: int = 10) -> tuple[Row, ...]:
        """Return the rows that are not bitwise equal, worst first."""
        unequal = [row for row in self.rows if row.verdict is not Verdict.BITWISE]
        return tuple(sorted(unequal, key=lambda row: (row.verdict is not Verdict.DIFFERENT, -row.excess))[:count])

    def assert_bitwise(self) -> None:
        """Raise unless every value is bitwise equal.

        Raises:
            AssertionError: With a table of the worst values, or if nothing was compared.
        """
        self._require({Verdict.BITWISE}, "not bitwise equal")

    def assert_equal(self) -> None:
        """Raise unless every value is bitwise equal or equal within noise.

        Raises:
            AssertionError: With a table of the worst values, or if nothing was compared.
        """
        self._require({Verdict.BITWISE, Verdict.WITHIN_NOISE}, "different")

    def to_json(self) -> dict[str, Any]:
        """Return verdict, counts and rows as JSON types."""
        counts = {verdict.value: sum(row.verdict is verdict for row in self.rows) for verdict in Verdict}
        return {"verdict": self.verdict.value, "counts": counts, "rows": [row.to_json() for row in self.rows]}

    def table(self, count: int = 10) -> str:
        """Return the worst rows as a table in plain text."""
        head = ("name", "verdict", "max |diff|", "allowed", "first at", "what")
        cells = [head, *(_cells(row) for row in self.worst(count))]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def _require(self, accepted: set[Verdict], complaint: str) -> None:
        if not any(row.note != _NOTHING for row in self.rows):
            raise AssertionError("nothing was compared: the runs hold no values")
        bad = [row for row in self.rows if row.verdict not in accepted]
        if bad:
            values = f"{len(bad)} of {len(self.rows)} values"
            shown = "" if len(bad) <= 10 else "; the worst 10"
            raise AssertionError(f"{values} {'is' if len(bad) == 1 else 'are'} {complaint}{shown}:\n\n{self.table()}")


def compare(
    stock: Any, patched: Any, *, reordered: Any = None, reruns: Sequence[Any] = (), floor: float = FLOOR
) -> Comparison:
    """Compare a patched run with a stock one.

    Args:
        stock: What stock computed: nested mappings and sequences of tensors, numbers, text and None.
        patched: What the patched run computed.
        reordered: What stock computes with another order of reductions, for example another ``bucket_cap_mb``. It is
            the yardstick of noise; without it only differences up to 1e-6 are noise.
        reruns: What stock computed once more, or several times, for scripts that are not deterministic.
        floor: Absolute difference that is always allowed.

    Raises:
        TypeError: If a value cannot be compared (DTensor, meta device, unknown type).
        ValueError: If two values have one name.
    """
    expected, actual = flatten(stock), flatten(patched)
    yardsticks = [flatten(run) for run in (reordered, *reruns) if run is not None]
    rows = [_row(name, leaf, actual, yardsticks, floor) for name, leaf in expected.items()]
    rows += [_different(name, "extra: stock has no such value") for name in actual if name not in expected]
    return Comparison(tuple(rows))


def _row(
    name: str, stock: Leaf, patched: Mapping[str, Leaf], yardsticks: Sequence[Mapping[str, Leaf]], floor: float
) -> Row:
    if name not in patched:
        return _different(name, "missing in the patched run")
    if reason := mismatch(stock, patched[name]):
        return _different(name, reason)
    found = difference(stock, patched[name])
    if found is None or found.equal:
        note = _NOTHING if isinstance(stock, Empty) else ""
        return Row(name, Verdict.BITWISE, None if found is None else 0.0, note=note)
    noise = [_noise(stock, run.get(name)) for run in yardsticks]
    allowed = max([floor, *(FACTOR * size for size in noise)])
    verdict = Verdict.WITHIN_NOISE if found.finite and found.size <= allowed else Verdict.DIFFERENT
    return Row(name, verdict, found.size, allowed, found.first, _describe(found))


def _different(name: str, note: str) -> Row:
    return Row(name, Verdict.DIFFERENT, note=note)


def _noise(stock: Leaf, other: Leaf) -> float:
    """How far a yardstick run is from stock. Where it has no finite answer, it allows nothing."""
    if mismatch(stock, other):
        return 0.0
    found = difference(stock, other)
    return 0.0 if found is None else found.max_abs


def _describe(found: Difference) -> str:
    if found.values is None:
        return ""
    stock, patched = found.values
    return f"{_value(stock)} became {_value(patched)}"


def _value(value: Scalar) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _cells(row: Row) -> tuple[str, ...]:
    index = "" if row.first_index is None else str(list(row.first_index))
    return (row.name, row.verdict.value, _number(row.max_abs_diff), _number(row.allowed), index, row.note)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)

"""The one equality rule of the project, used by the tests and by ``ovpatch verify``.

A value is bitwise equal, where NaN equals NaN and 0.0 equals -0.0, or equal within noise: the largest absolute
difference is at most ``max(1e-6, 2 * noise)``. The noise is the difference between runs of stock
PyTorch with reductions in another order. ``verify`` sees every value of every step and has a stricter
rule (``verify/compare.py``).
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import torch

#: Elements that are widened to float64 at a time (32 MB for each side).
CHUNK: Final = 1 << 22

Scalar: TypeAlias = float | int | complex


@dataclass(frozen=True)
class Difference:
    """The outcome of comparing two numbers, or two tensors of one shape and dtype."""

    # Largest absolute difference between finite values, 0.0 if there is none.
    max_abs: float = 0.0
    # False if at some index only one side is NaN or infinite, or both are infinite with opposite signs.
    finite: bool = True
    # Index of the first difference, if any.
    first: tuple[int, ...] | None = None
    # The two values at that index.
    values: tuple[Scalar, Scalar] | None = None

    @property
    def size(self) -> float:
        """Largest absolute difference, infinite if it is not a finite number."""
        return self.max_abs if self.finite else math.inf


def measure_difference(a: Any, b: Any) -> Difference:
    """Compare two numbers of one type, or two strided tensors of one dtype and shape, perhaps on different devices.

    Complex values are compared component by component, integers exactly, whatever their size. Huge tensors are
    widened in chunks.
    """
    if isinstance(a, torch.Tensor):
        return _tensors(a, b)
    if isinstance(a, numbers.Integral):
        x, y = int(a), int(b)
        return Difference() if x == y else Difference(_distance(x, y), True, (), (x, y))
    p, q = complex(a), complex(b)
    pairs = [(p.real, q.real), (p.imag, q.imag)]
    unequal = [abs(x - y) for x, y in pairs if x != y and not (math.isnan(x) and math.isnan(y))]
    if not unequal:
        return Difference()
    finite = [size for size in unequal if math.isfinite(size)]
    values = (p.real, q.real) if isinstance(a, numbers.Real) else (p, q)
    return Difference(max(finite, default=0.0), len(finite) == len(unequal), (), values)


def _distance(a: int, b: int) -> float:
    try:
        return float(abs(a - b))
    except OverflowError:
        return sys.float_info.max


def _tensors(a: torch.Tensor, b: torch.Tensor) -> Difference:
    shape = a.shape
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if _same_at_once(a, b):
        return Difference()
    found = _by_chunks(a.reshape(-1), b.reshape(-1))
    if found.first is None:
        return found
    flat = found.first[0] // (2 if len(a.shape) > len(shape) else 1)
    return Difference(found.max_abs, found.finite, _unravel(flat, shape), found.values)


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of an element by its number, faster than ``torch.unravel_index``."""
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def _same_at_once(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether ``torch.equal`` finds two tensors equal; False proves nothing, as with NaNs."""
    if a.device != b.device:
        return False
    try:
        return torch.equal(a, b)
    # This dtype or layout has no `equal`, so the tensors are compared in chunks.
    except (RuntimeError, NotImplementedError):
        return False


def _by_chunks(a: torch.Tensor, b: torch.Tensor) -> Difference:
    total = Difference()
    for start in range(0, a.numel(), CHUNK):
        x, y = a[start : start + CHUNK], b[start : start + CHUNK].to(a.device)
        part = _compare_chunk(x, y)
        if part.first is None:
            continue
        first, values = (
            (total.first, total.values) if total.first else ((start + part.first[0],), part.values)
        )
        # There is no NaN here, which max() would keep or drop by the order of its arguments.
        total = Difference(
            max(total.max_abs, part.max_abs), total.finite and part.finite, first, values
        )
    return total


def _compare_chunk(a: torch.Tensor, b: torch.Tensor) -> Difference:
    # Exact for every narrower format; uint64 keeps its bits: a distance across 2**63 is just huge.
    wide = torch.float64 if a.is_floating_point() else torch.int64
    x, y = a.to(wide), b.to(wide)
    unequal = (x != y) & ~(x.isnan() & y.isnan())
    if not unequal.any():
        return Difference()
    distance = (x.to(torch.float64) - y.to(torch.float64)).abs_()
    # A distance is not finite if one side alone is NaN or infinite, for opposite infinities, and after an overflow.
    finite = distance.isfinite()
    all_finite = not bool((unequal & ~finite).any())
    # Where both are NaN or the same infinity, the distance is NaN, and the values are equal.
    largest = float(distance.masked_fill_(~(unequal & finite), 0.0).max().item())
    if wide is torch.int64:
        # Beyond 2**53, float64 can make neighbors equal.
        largest = max(1.0, largest)
        # The note shows values in their own type: True, and not 1.
        x, y = a, b
    index = int(unequal.to(torch.uint8).argmax().item())
    return Difference(largest, all_finite, (index,), (x[index].item(), y[index].item()))


#: Absolute difference that is always allowed.
FLOOR: Final = 1e-6

#: Allowed multiple of the noise.
FACTOR: Final = 2.0


class Verdict(str, Enum):
    """The result of comparing two values, from best to worst."""

    BITWISE = "bitwise"
    WITHIN_NOISE = "within noise"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Row:
    """One value of the comparison."""

    # The dotted name of the value.
    name: str
    verdict: Verdict
    # Largest absolute difference; infinite if a side is not finite where the other is; None if the values are no
    # numbers or cannot be subtracted.
    max_abs_diff: float | None = None
    # Largest difference within noise; None if none is tolerated or nothing differs.
    allowed: float | None = None
    # Index of the first value that differs.
    first_index: tuple[int, ...] | None = None
    # The difference in words.
    note: str = ""
    # Name of the rule that decided; "" if the verdict follows from the equality rule alone.
    rule: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON types; an infinite difference becomes the text ``inf``."""
        return vars(self) | {
            "verdict": self.verdict.value,
            "max_abs_diff": _json_number(self.max_abs_diff),
            "allowed": _json_number(self.allowed),
            "first_index": None if self.first_index is None else list(self.first_index),
        }

    @property
    def excess(self) -> float:
        """The multiple of the allowed difference, to sort the worst first."""
        if self.verdict is Verdict.BITWISE:
            return -1.0
        if self.max_abs_diff is None or not self.allowed:
            return math.inf
        return self.max_abs_diff / self.allowed


def make_different(name: str, note: str) -> Row:
    """Return the row of a value that differs other than by an amount."""
    return Row(name, Verdict.DIFFERENT, note=note)


def judge_difference(
    name: str, found: Difference, noise: Iterable[float] = (), floor: float = FLOOR
) -> Row:
    """Return the row of a value by its difference; ``noise`` has those of noise runs, ``floor`` is always allowed."""
    if found.values is None:
        return Row(name, Verdict.BITWISE, 0.0)
    allowed = max([floor, *(FACTOR * size for size in noise)])
    verdict = Verdict.WITHIN_NOISE if found.finite and found.size <= allowed else Verdict.DIFFERENT
    note = " became ".join(
        str(value) if isinstance(value, int) else f"{value:.9g}" for value in found.values
    )
    return Row(name, verdict, found.size, allowed, found.first, note)


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)

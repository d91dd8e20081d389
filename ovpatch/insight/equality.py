"""The one equality rule of the project, used by the tests and by ``ovpatch verify``.

Two runs are equal if every value is

- bitwise equal: same name, dtype, shape and layout, equal values; NaN equals NaN and 0.0 equals -0.0; or
- equal within noise: the largest absolute difference of a tensor is at most ``max(1e-6, 2 * noise)``. The noise
  is the difference of stock from itself with its reductions in another order. ``verify`` sees every value of every step
  and has a stricter rule (``verify/compare.py``).
"""

from __future__ import annotations

import enum
import math
import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import torch

#: A named value: a tensor, a number, or an object that is equal or not.
Leaf: TypeAlias = Any

#: Name of a value that stands alone.
ROOT: Final = "value"

_EXACT = (str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class EmptyContainer:
    """An empty container; a leaf of its own, so that its loss is a difference."""

    kind: str


def flatten(values: Any) -> dict[str, Leaf]:
    """Return the leaves of nested mappings and sequences by dotted name, for example ``state.0.exp_avg``.

    Lists and tuples count as the same. Array-likes of numpy become tensors that share their memory.

    Raises:
        TypeError: A leaf is no tensor, number, string, None, dtype, device or enum member.
        ValueError: Two leaves would have one name, for example ``{1: a, "1": b}``.
    """
    flat: dict[str, Leaf] = {}
    for name, leaf in _walk(values, ""):
        if name in flat:
            raise ValueError(f"two values are both called {name!r}; rename one of their keys")
        flat[name] = leaf
    return flat


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, Leaf]]:
    children: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        kind, children = "mapping", [(str(key), child) for key, child in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        kind, children = "sequence", [(str(index), child) for index, child in enumerate(value)]
    else:
        yield prefix or ROOT, _leaf(value, prefix or ROOT)
        return
    if not children:
        yield prefix or ROOT, EmptyContainer(kind)
    for key, child in children:
        yield from _walk(child, f"{prefix}.{key}" if prefix else key)


def _leaf(value: Any, name: str) -> Leaf:
    if isinstance(value, torch.Tensor):
        return _plain(value, name)
    if value is None or isinstance(value, (numbers.Number, *_EXACT)):
        return value
    if hasattr(value, "__array_interface__"):
        return torch.as_tensor(value)
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared; "
        "leave it out, or turn it into tensors, numbers or text"
    )


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor without its graph, or raise why its values cannot be compared."""
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError(f"{name} is a DTensor; compare its .full_tensor() or .to_local()")
    if tensor.is_meta:
        raise TypeError(f"{name} is on the meta device and has no values; compare it after materialisation")
    if tensor.is_quantized:
        raise TypeError(f"{name} is quantized; compare its .int_repr() and scales")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; compare its .unbind()")
    return tensor.detach()


def describe_mismatch(stock: Leaf, patched: Leaf) -> str:
    """Return how two leaves differ other than by an amount; "" if they are equal or can be subtracted."""
    if _kind(stock) != _kind(patched):
        return f"type {_kind(stock)} became {_kind(patched)}"
    if isinstance(stock, torch.Tensor):
        for what, a, b in (
            ("dtype", stock.dtype, patched.dtype),
            ("shape", list(stock.shape), list(patched.shape)),
            ("layout", stock.layout, patched.layout),
        ):
            if a != b:
                return f"{what} {a} became {b}"
    elif not isinstance(stock, numbers.Number) and stock != patched:
        return f"{stock!r} became {patched!r}"
    return ""


def _kind(leaf: Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    if isinstance(leaf, EmptyContainer):
        return f"empty {leaf.kind}"
    if isinstance(leaf, bool) or not isinstance(leaf, numbers.Number):
        return type(leaf).__name__
    if isinstance(leaf, numbers.Integral):  # numpy's scalars count as Python's
        return "int"
    return "float" if isinstance(leaf, numbers.Real) else "complex"


#: Elements that are widened to float64 at a time (32 MB for each side).
CHUNK: Final = 1 << 22

Scalar: TypeAlias = float | int | complex


@dataclass(frozen=True)
class Difference:
    """The outcome of comparing two numbers, or two tensors of one shape and dtype."""

    max_abs: float = 0.0  # largest absolute difference between finite values, 0.0 if there is none
    finite: bool = True  # False if one side is NaN or infinite where the other is not, or of the other sign
    first: tuple[int, ...] | None = None  # index of the first difference, if any; of sparse tensors, into the values
    values: tuple[Scalar, Scalar] | None = None  # the two values at that index

    @property
    def equal(self) -> bool:
        """Whether all values are equal; NaN equals NaN, and 0.0 equals -0.0."""
        return self.first is None

    @property
    def size(self) -> float:
        """Largest absolute difference, infinite if it is not a finite number."""
        return self.max_abs if self.finite else math.inf


def measure_difference(a: Leaf, b: Leaf) -> Difference | None:
    """Compare two values for which :func:`describe_mismatch` returns nothing; None if they are not numbers.

    Complex values are compared component by component, integers exactly, whatever their size. A stored zero of a sparse
    tensor equals an omitted one. No huge tensor is widened as a whole. Tensors may be on different devices.
    """
    if isinstance(a, torch.Tensor):
        return _tensors(a, b)
    if isinstance(a, numbers.Number):
        return _numbers(a, b)
    return None


def _numbers(a: Any, b: Any) -> Difference:
    """Compare Python numbers; its integers have no limit."""
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
    if a.layout is not torch.strided:
        a, b = _sparse_values(a, b)
    shape = a.shape
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if _same_at_once(a, b):
        return Difference()
    found = _by_chunks(a.reshape(-1), b.reshape(-1))
    if found.first is None:
        return found
    flat = found.first[0] // (2 if len(a.shape) > len(shape) else 1)
    index = tuple(int(position) for position in torch.unravel_index(torch.tensor(flat, device="cpu"), shape))
    return Difference(found.max_abs, found.finite, index, found.values)


def _same_at_once(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``torch.equal`` finds two tensors equal, without widening. False proves nothing, as with NaNs."""
    if a.device != b.device:
        return False
    try:
        return torch.equal(a, b)
    except (RuntimeError, NotImplementedError):  # no `equal` for this dtype or layout: compared in chunks instead
        return False


def _by_chunks(a: torch.Tensor, b: torch.Tensor) -> Difference:
    total = Difference()
    for start in range(0, a.numel(), CHUNK):
        x, y = a[start : start + CHUNK], b[start : start + CHUNK].to(a.device)
        part = _compare_chunk(x, y)
        if part.first is None:
            continue
        first, values = (total.first, total.values) if total.first else ((start + part.first[0],), part.values)
        # There is no NaN here, which max() would keep or drop by the order of its arguments.
        total = Difference(max(total.max_abs, part.max_abs), total.finite and part.finite, first, values)
    return total


def _compare_chunk(a: torch.Tensor, b: torch.Tensor) -> Difference:
    # Exact for every narrower format; uint64 keeps its bits: a distance across 2**63 is just huge.
    wide = torch.float64 if a.is_floating_point() else torch.int64
    x, y = a.to(wide), b.to(wide)
    unequal = (x != y) & ~(x.isnan() & y.isnan())
    if not unequal.any():
        return Difference()
    distance = (x.to(torch.float64) - y.to(torch.float64)).abs_()
    finite = distance.isfinite()  # NaN or infinite on one side only, opposite infinities, or an overflow
    all_finite = not bool((unequal & ~finite).any())
    # Where both are NaN or the same infinity, the distance is NaN, and the values are equal.
    largest = float(distance.masked_fill_(~(unequal & finite), 0.0).max().item())
    if wide is torch.int64:
        largest = max(1.0, largest)  # beyond 2**53, float64 can make neighbours equal
        x, y = a, b  # to show values as they are: True, and not 1
    index = int(unequal.to(torch.uint8).argmax().item())
    return Difference(largest, all_finite, (index,), (x[index].item(), y[index].item()))


def _sparse_values(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of both over the union of their sparsity patterns, with zeros for omitted ones."""
    x, y = _coo(a), _coo(b.to(a.device))
    if torch.equal(x.indices(), y.indices()):
        return x.values(), y.values()
    union = torch.cat([x.indices(), y.indices()], dim=1)
    zeros = torch.zeros((union.shape[1], *x.values().shape[1:]), dtype=x.dtype, device=x.device)
    pattern = torch.sparse_coo_tensor(union, zeros, x.shape)
    return (x + pattern).coalesce().values(), (y + pattern).coalesce().values()


def _coo(tensor: torch.Tensor) -> torch.Tensor:
    sparse: torch.Tensor = tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse(layout=torch.sparse_coo)
    return sparse.coalesce()


#: Absolute difference that is always allowed.
FLOOR: Final = 1e-6

#: Allowed multiple of the noise.
FACTOR: Final = 2.0

_NOTHING: Final = "empty on both sides"


class Verdict(str, Enum):
    """How two values compare, from best to worst."""

    BITWISE = "bitwise"
    WITHIN_NOISE = "within noise"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Row:
    """One value of the comparison."""

    name: str  # dotted name
    verdict: Verdict  # how it compares
    # Largest absolute difference; infinite if a side is not finite where the other is; None if the values are no
    # numbers or cannot be subtracted.
    max_abs_diff: float | None = None
    allowed: float | None = None  # largest difference within noise; None if none is tolerated or nothing differs
    first_index: tuple[int, ...] | None = None  # index of the first value that differs
    note: str = ""  # what differs, in words

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
        """Raise AssertionError, with a table of the worst values, unless every value is bitwise equal."""
        self._require({Verdict.BITWISE}, "not bitwise equal")

    def assert_equal(self) -> None:
        """Raise AssertionError, with a table of the worst values, unless every value is equal, perhaps within noise."""
        self._require({Verdict.BITWISE, Verdict.WITHIN_NOISE}, "different")

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

    Two identical stock runs are bitwise equal, so a rerun measures no
    noise. Reordering alone moves some tensors by far more than any fixed tolerance: attention key biases have a true
    gradient of zero, and AdamW turns its rounding error into full-size steps.

    Args:
        stock: Stock's results: nested mappings and sequences of tensors, numbers, text and None.
        patched: The patched run's results.
        reordered: Stock's results with another order of reductions, for example another ``bucket_cap_mb``. It is the
            measure of noise; without it only differences up to 1e-6 are noise.
        reruns: Further results of stock, for scripts that are not deterministic.
        floor: Absolute difference that is always allowed.

    Raises:
        TypeError: If a value cannot be compared (DTensor, meta device, unknown type).
        ValueError: If two values have one name.
    """
    expected, actual = flatten(stock), flatten(patched)
    noise_runs = [flatten(run) for run in (reordered, *reruns) if run is not None]
    rows = [_row(name, leaf, actual, noise_runs, floor) for name, leaf in expected.items()]
    rows += [make_different(name, "extra: stock has no such value") for name in actual if name not in expected]
    return Comparison(tuple(rows))


def _row(
    name: str, stock: Leaf, patched: Mapping[str, Leaf], noise_runs: Sequence[Mapping[str, Leaf]], floor: float
) -> Row:
    if name not in patched:
        return make_different(name, "missing in the patched run")
    if reason := describe_mismatch(stock, patched[name]):
        return make_different(name, reason)
    found = measure_difference(stock, patched[name])
    if found is None or found.equal:
        note = _NOTHING if isinstance(stock, EmptyContainer) else ""
        return Row(name, Verdict.BITWISE, None if found is None else 0.0, note=note)
    noise = [_measure_noise(stock, run.get(name)) for run in noise_runs]
    allowed = max([floor, *(FACTOR * size for size in noise)])
    verdict = Verdict.WITHIN_NOISE if found.finite and found.size <= allowed else Verdict.DIFFERENT
    note = "" if found.values is None else " became ".join(map(_value, found.values))
    return Row(name, verdict, found.size, allowed, found.first, note)


def make_different(name: str, note: str) -> Row:
    """Return the row of a value that differs other than by an amount."""
    return Row(name, Verdict.DIFFERENT, note=note)


def _measure_noise(stock: Leaf, other: Leaf) -> float:
    """Return the difference of a noise run from stock; 0 without a finite answer."""
    if describe_mismatch(stock, other):
        return 0.0
    found = measure_difference(stock, other)
    return 0.0 if found is None else found.max_abs


def _value(value: Scalar) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _cells(row: Row) -> tuple[str, ...]:
    index = "" if row.first_index is None else str(list(row.first_index))
    return (row.name, row.verdict.value, _number(row.max_abs_diff), _number(row.allowed), index, row.note)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)

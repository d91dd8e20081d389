"""Comparison of the nested results of two runs, by the rule of :mod:`ovpatch.insight.equality`.

Values are bitwise equal only with the same name, dtype, shape and layout.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ovpatch.insight.equality import (
    FLOOR,
    Difference,
    Row,
    Verdict,
    judge_difference,
    make_different,
    measure_difference,
)

#: A named value: a tensor, a number, or an object that is equal or not.
Leaf: TypeAlias = Any

#: Name of a value that is in no container.
ROOT: Final = "value"

_EXACT = (str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class EmptyContainer:
    """An empty container, which is a leaf, so that its loss is a difference."""

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
    # Most values are tensors, and the remaining checks take longer.
    if isinstance(value, torch.Tensor):
        yield prefix or ROOT, _plain(value, prefix or ROOT)
        return
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
    if value is None or isinstance(value, (numbers.Number, *_EXACT)):
        return value
    if hasattr(value, "__array_interface__"):
        return torch.as_tensor(value)
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "compared; "
        "leave it out, or turn it into tensors, numbers or text"
    )


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor without its graph, or raise why its values cannot be compared."""
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError(f"{name} is a DTensor; compare its .full_tensor() or .to_local()")
    if tensor.is_meta:
        raise TypeError(
            f"{name} is on the meta device and has no values; compare it after materialisation"
        )
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
    # Numpy's scalars count as Python's.
    if isinstance(leaf, numbers.Integral):
        return "int"
    return "float" if isinstance(leaf, numbers.Real) else "complex"


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
    sparse: torch.Tensor = (
        tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse(layout=torch.sparse_coo)
    )
    return sparse.coalesce()


_NOTHING: Final = "empty on both sides"


@dataclass(frozen=True)
class Comparison:
    """The outcome of :func:`compare`. Rows are in the order of the stock run, extra names last."""

    rows: tuple[Row, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all rows."""
        return max(
            (row.verdict for row in self.rows), key=list(Verdict).index, default=Verdict.BITWISE
        )

    def worst(self, count: int = 10) -> tuple[Row, ...]:
        """Return the rows that are not bitwise equal, worst first."""
        unequal = [row for row in self.rows if row.verdict is not Verdict.BITWISE]
        return tuple(
            sorted(unequal, key=lambda row: (row.verdict is not Verdict.DIFFERENT, -row.excess))[
                :count
            ]
        )

    def assert_bitwise(self) -> None:
        """Raise AssertionError, with the worst values, unless every value is bitwise equal."""
        self._require({Verdict.BITWISE}, "not bitwise equal")

    def assert_equal(self) -> None:
        """Raise AssertionError, with the worst values, unless every value is equal, perhaps within noise."""
        self._require({Verdict.BITWISE, Verdict.WITHIN_NOISE}, "different")

    def _require(self, accepted: set[Verdict], complaint: str) -> None:
        if not any(row.note != _NOTHING for row in self.rows):
            raise AssertionError("nothing was compared: the runs hold no values")
        bad = [row for row in self.rows if row.verdict not in accepted]
        if bad:
            lines = [
                f"{len(bad)} of {len(self.rows)} values {complaint}; the worst:",
                *map(str, self.worst()),
            ]
            raise AssertionError("\n".join(lines))


def compare(
    stock: Any,
    patched: Any,
    *,
    reordered: Any = None,
    reruns: Sequence[Any] = (),
    floor: float = FLOOR,
    noise_units: int = 0,
) -> Comparison:
    """Compare a patched run with a stock run.

    Two identical stock runs are bitwise equal, so a rerun measures no noise. Reordering alone moves some tensors by
    far more than any fixed tolerance: attention key biases have a true gradient of zero, and AdamW turns its rounding
    error into full-size steps.

    Args:
        stock: The results of the stock run: nested mappings and sequences of tensors, numbers, strings and None.
        patched: The results of the patched run.
        reordered: The results of a stock run with another order of reductions, for example another ``bucket_cap_mb``.
            They measure the noise. Without them only differences up to 1e-6 are noise.
        reruns: The results of further stock runs, for scripts that are not deterministic.
        floor: Absolute difference that is always allowed.
        noise_units: Units in the last place of the largest element of a value that are noise, also if no rerun shows
            them. A few reruns may miss a unit, which exceeds the floor if the value is large. Default: 0.

    Raises:
        TypeError: If a value cannot be compared (DTensor, meta device, unknown type).
        ValueError: If two values have one name.
    """
    expected, actual = flatten(stock), flatten(patched)
    noise_runs = [flatten(run) for run in (reordered, *reruns) if run is not None]
    rows = [
        _make_row(name, leaf, actual, noise_runs, floor, noise_units)
        for name, leaf in expected.items()
    ]
    rows += [
        make_different(name, "extra: stock has no such value")
        for name in actual
        if name not in expected
    ]
    return Comparison(tuple(rows))


def _make_row(
    name: str,
    stock: Leaf,
    patched: Mapping[str, Leaf],
    noise_runs: Sequence[Mapping[str, Leaf]],
    floor: float,
    noise_units: int,
) -> Row:
    if name not in patched:
        return make_different(name, "missing in the patched run")
    if reason := describe_mismatch(stock, patched[name]):
        return make_different(name, reason)
    if not isinstance(stock, (torch.Tensor, numbers.Number)):
        return Row(
            name, Verdict.BITWISE, note=_NOTHING if isinstance(stock, EmptyContainer) else ""
        )
    found = _measure(stock, patched[name])
    # Most values are equal, and noise does not matter to them.
    if found.first is None:
        return judge_difference(name, found)
    repeated = [
        run[name] for run in noise_runs if name in run and not describe_mismatch(stock, run[name])
    ]
    noise = [_measure(stock, value).max_abs for value in repeated]
    if noise_units:
        noise.append(noise_units * _last_unit(stock))
    return judge_difference(name, found, noise, floor)


def _last_unit(leaf: Leaf) -> float:
    """Return a unit in the last place of the largest element; 0.0 unless it has single or double precision.

    In low precision, a unit of the largest element would be a large part of the other elements.
    """
    if not isinstance(leaf, torch.Tensor):
        return math.ulp(abs(leaf)) if isinstance(leaf, (float, complex)) else 0.0
    if leaf.dtype not in (torch.float32, torch.float64):
        return 0.0
    # As in `_measure`, for sparse tensors.
    with torch.inference_mode():
        values = leaf.to_dense()
        largest = measure_difference(values, torch.zeros_like(values)).max_abs
    # The mantissa of frexp is below 1, so its exponent is one more than that of the unit.
    return math.ldexp(torch.finfo(leaf.dtype).eps, math.frexp(largest)[1] - 1) if largest else 0.0


def _measure(a: Leaf, b: Leaf) -> Difference:
    """Compare numbers or tensors; a stored zero of a sparse tensor equals an omitted one."""
    if not isinstance(a, torch.Tensor) or a.layout is torch.strided:
        return measure_difference(a, b)
    # Torch coalesces sparse tensors of a script's inference mode only in that mode.
    with torch.inference_mode():
        return measure_difference(*_sparse_values(a, b))

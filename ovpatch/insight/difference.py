"""How far two values are apart: exactly, on any device, and without a widened copy of a huge tensor."""

from __future__ import annotations

import math
import numbers
import sys
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ovpatch.insight.flatten import Leaf

#: Elements that are widened to float64 at a time (32 MB each for the two sides).
CHUNK: Final = 1 << 22

Scalar: TypeAlias = float | int | complex


@dataclass(frozen=True)
class Difference:
    """The outcome of comparing two numbers, or two tensors of one shape and dtype.

    Attributes:
        max_abs: Largest absolute difference between finite values, 0.0 if there is none.
        finite: False if one side is NaN or infinite where the other is not, or has the other sign of infinity.
        first: Index of the first value that differs, None if all are equal. For sparse tensors, an index into the
            values.
        values: The two values there.
    """

    max_abs: float = 0.0
    finite: bool = True
    first: tuple[int, ...] | None = None
    values: tuple[Scalar, Scalar] | None = None

    @property
    def equal(self) -> bool:
        """Whether all values are equal; NaN equals NaN, and 0.0 equals -0.0."""
        return self.first is None

    @property
    def size(self) -> float:
        """Largest absolute difference, infinite if it is not a finite number."""
        return self.max_abs if self.finite else math.inf


def difference(a: Leaf, b: Leaf) -> Difference | None:
    """Compare two values between which :func:`~ovpatch.insight.flatten.mismatch` finds nothing.

    Complex values are compared component by component, integers exactly, whatever their size. A zero that a sparse
    tensor stores equals one that it leaves out.

    Args:
        a: The one side.
        b: The other; a tensor may be on another device.

    Returns:
        None if the values are no numbers.
    """
    if isinstance(a, torch.Tensor):
        return _tensors(a, b)
    if isinstance(a, numbers.Number):
        return _numbers(a, b)
    return None


def _numbers(a: Any, b: Any) -> Difference:
    """Python's own arithmetic: its integers have no limit."""
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
    return Difference(found.max_abs, found.finite, _unravel(flat, shape), found.values)


def _same_at_once(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The common case needs no widening. False proves nothing: NaNs, or a dtype that ``equal`` does not know."""
    if a.device != b.device:
        return False
    try:
        return torch.equal(a, b)
    except (RuntimeError, NotImplementedError):  # no `equal` for this dtype or layout: compared in chunks instead
        return False


def _by_chunks(a: torch.Tensor, b: torch.Tensor) -> Difference:
    total = Difference()
    for start in range(0, a.numel(), CHUNK):
        part = _chunk(a[start : start + CHUNK], b[start : start + CHUNK].to(a.device))
        if part.first is None:
            continue
        first, values = (total.first, total.values) if total.first else ((start + part.first[0],), part.values)
        # Not max(): it would keep or drop a NaN by the order of its arguments; there is none here.
        total = Difference(max(total.max_abs, part.max_abs), total.finite and part.finite, first, values)
    return total


def _chunk(a: torch.Tensor, b: torch.Tensor) -> Difference:
    return _floats(a, b) if a.is_floating_point() else _integers(a, b)


def _floats(a: torch.Tensor, b: torch.Tensor) -> Difference:
    x, y = a.to(torch.float64), b.to(torch.float64)  # exact for every narrower format
    unequal = (x != y) & ~(x.isnan() & y.isnan())
    if not unequal.any():
        return Difference()
    distance = (x - y).abs_()
    finite = distance.isfinite()  # NaN or infinite on one side only, opposite infinities, or an overflow
    all_finite = not bool((unequal & ~finite).any())
    # Where both are NaN or the same infinity the distance is NaN too; those are equal.
    largest = distance.masked_fill_(~(unequal & finite), 0.0).max().item()
    index = _first(unequal)
    return Difference(float(largest), all_finite, (index,), (x[index].item(), y[index].item()))


def _integers(a: torch.Tensor, b: torch.Tensor) -> Difference:
    x, y = a.to(torch.int64), b.to(torch.int64)  # uint64 keeps its bits: a distance across 2**63 is merely huge
    unequal = x != y
    if not unequal.any():
        return Difference()
    distance = (x.to(torch.float64) - y.to(torch.float64)).abs_()
    largest = max(1.0, float(distance.max().item()))  # beyond 2**53, float64 can make neighbours equal
    index = _first(unequal)
    return Difference(largest, True, (index,), (a[index].item(), b[index].item()))


def _first(mask: torch.Tensor) -> int:
    return int(mask.to(torch.uint8).argmax().item())


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def _sparse_values(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored values of both over the union of their patterns; what one does not store is zero."""
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

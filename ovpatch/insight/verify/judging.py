"""Whether numbers of two runs are equal within noise.

[Note: one number is one draw] How far many elements move together is much the same in each run. A loss or a norm is one
number, whose noise in a yardstick is by chance next to nothing. So three times as much is allowed of it.

[Note: many elements] One element decides what the largest difference is, and single elements go far by chance: AdamW
makes a whole step of a gradient next to zero, whose sign is chance. So four times as much as noise moved is allowed of
it. A parameter that is late by a step is no farther off than that, but in all of its elements. The root of the mean
square, which many elements decide, has to be within twice that of the noise.

[Note: units in the last place] A bfloat16 number just below 1 is followed by one that is 0.0039 larger. What is rounded
otherwise moves by such a unit or not at all, and that no element happened to move in a yardstick, or by one unit and
not by two, says little. So where one moved anything of the event, the largest difference may be a unit of the largest
element more; and an eighth of a tensor's elements, or a single one, may each be a unit off whatever the mean is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.insight import equality
from ovpatch.insight.equality import Row, Verdict
from ovpatch.insight.verify.noise import Size, apart
from ovpatch.insight.verify.values import Kept

_SHARE: Final = 1 / 8

#: How many times noise is allowed.
_OF_MANY: Final = Size(2 * equality.FACTOR, equality.FACTOR)
_OF_ONE: Final = Size(3.0, 3.0)


def judge(
    name: str, stock: Kept, patched: Kept, yardsticks: Sequence[Kept], *, floor: float, noise: Size, moving: bool
) -> Row:
    """Return how two values of one form compare, which are numbers.

    Args:
        name: What they are called.
        stock: Stock's.
        patched: The patched run's.
        yardsticks: What further stock runs have there.
        floor: Absolute difference that is always allowed.
        noise: How far stock is from itself in what is like it.
        moving: Whether anything of the event is other in those runs.
    """
    far = reduce(Size.or_more, (apart(stock, other) for other in yardsticks), noise)
    factors = _OF_ONE if _is_one(stock) else _OF_MANY
    allowed = Size(*(max(floor, factor * size) for factor, size in zip(factors, far, strict=True)))
    rounded = moving and not stock.folded
    if rounded:
        allowed = allowed._replace(largest=allowed.largest + _unit(stock.values))
    row = _judged(name, stock, patched, allowed)
    if row.verdict is Verdict.DIFFERENT and rounded:
        nearer = _without_single_units(stock.values, patched.values)
        if (
            nearer is not None
            and _judged(name, stock, patched._replace(values=nearer), allowed).verdict is not row.verdict
        ):
            note = f"{row.note}; few of its elements, by a unit in the last place"
            return replace(row, verdict=Verdict.WITHIN_NOISE, allowed=row.max_abs_diff, note=note)
    return row


def _is_one(value: Kept) -> bool:
    return not isinstance(value.values, Tensor) or value.values.numel() == 1


def _judged(name: str, stock: Kept, patched: Kept, allowed: Size) -> Row:
    (row,) = equality.compare({name: stock.values}, {name: patched.values}, floor=allowed.largest).rows
    if row.verdict is not Verdict.WITHIN_NOISE:
        return row
    mean = apart(stock, patched).mean  # see [Note: many elements]
    if mean <= allowed.mean:
        return row
    note = f"{row.note}; many of its elements: this is the root of the mean square"
    return replace(row, verdict=Verdict.DIFFERENT, max_abs_diff=mean, allowed=allowed.mean, note=note)


def _without_single_units(stock: Any, patched: Any) -> Tensor | None:
    """Return a patched value without what [Note: units in the last place] allows; None if there is none, or more."""
    if not isinstance(stock, Tensor) or not stock.is_floating_point():
        return None
    ours, theirs = stock.to(torch.float64), patched.to(torch.float64)
    units = _units(torch.minimum(ours.abs(), theirs.abs()), stock.dtype)
    near = (ours != theirs) & ((ours - theirs).abs() <= units)
    if not 0 < int(near.sum()) <= max(1, int(_SHARE * stock.numel())):
        return None
    return torch.where(near, stock, patched)


def _unit(values: Any) -> float:
    """Return the unit in the last place of the largest element; 0 of what has none."""
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return 0.0
    sizes = values.to(torch.float64).abs()
    return float(_units(sizes.where(sizes.isfinite(), 0.0).max(), values.dtype))


def _units(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far the next numbers of a dtype are, for absolute numbers in float64."""
    facts = torch.finfo(dtype)
    normal = sizes.clamp(min=facts.smallest_normal)
    return torch.ldexp(torch.full_like(normal, facts.eps), torch.frexp(normal).exponent - 1)

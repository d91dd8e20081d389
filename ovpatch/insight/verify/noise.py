"""What stock differs from itself in a value and in its like.

[Note: few draws] How far a value moves from run to run is chance, and one or two further runs may by chance move it
little. So its noise is that of its like: of the values of one kind, dtype and shape whose names differ in numbers
alone, as those of a model's layers do, on all processes and in all steps so far. It is the largest of them all in
proportion to the values' own sizes, but no more than the largest as it is: a layer whose gradient is next to nothing
moves by much of it, and must not allow that to others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.insight.difference import difference
from ovpatch.insight.verify.records import Event, Run
from ovpatch.insight.verify.values import Kept

_Key = tuple[Hashable, str, str]  # which event, the value's name without numbers, and its form

_NUMBERS: Final = re.compile(r"\d+")


class Size(NamedTuple):
    """How large numbers are, or differences.

    Attributes:
        largest: Of the absolute numbers.
        mean: The root of their mean square.
    """

    largest: float = 0.0
    mean: float = 0.0

    def or_more(self, other: Size) -> Size:
        """Return the larger of each."""
        return Size(max(self.largest, other.largest), max(self.mean, other.mean))


class _Moved(NamedTuple):
    """How far values moved: as it is, and in proportion to their sizes."""

    absolute: Size = Size()
    relative: Size = Size()


class Noise:
    """The noise of values by their names; see [Note: few draws].

    Args:
        stock: What stock recorded.
        others: What further stock runs recorded, as long as they recorded the same events.
    """

    def __init__(self, stock: Run, others: Iterable[Run]) -> None:
        self._found: dict[_Key, dict[int, _Moved]] = {}
        for other in others:
            for process in stock.processes:
                for ours, theirs in zip(stock.events(process), other.events(process), strict=False):
                    if ours.signature != theirs.signature:
                        break
                    self._take(ours, theirs)

    def _take(self, ours: Event, theirs: Event) -> None:
        for name, value in ours.values.items():
            moved = apart(value, theirs.values.get(name))
            if moved.largest:
                steps, size = self._found.setdefault(_key(ours, name), {}), size_of(value)
                relative = Size(*(part / whole if whole else 0.0 for part, whole in zip(moved, size, strict=True)))
                before = steps.get(ours.step, _Moved())
                steps[ours.step] = _Moved(before.absolute.or_more(moved), before.relative.or_more(relative))

    def of(self, event: Event, name: str) -> Size:
        """Return how far stock was from itself in what is like a value, in its step or before."""
        absolute = relative = Size()
        for step, moved in self._found.get(_key(event, name), {}).items():
            if step <= event.step:
                absolute, relative = absolute.or_more(moved.absolute), relative.or_more(moved.relative)
        if not absolute.largest:
            return absolute
        size = size_of(event.values[name])
        return Size(*(min(far, share * whole) for far, share, whole in zip(absolute, relative, size, strict=True)))


def _key(event: Event, name: str) -> _Key:
    return event.signature, _NUMBERS.sub("*", name), event.values[name].form


def apart(one: Kept, other: Kept | None) -> Size:
    """Return how far apart two values are; 0 if they are no numbers of one form. What is not finite counts as 0."""
    if other is None or one[:2] == other[:2] or one.form != other.form or one.values is None:
        return Size()
    return _apart(one.values, other.values)


def size_of(value: Kept) -> Size:
    """Return how large the numbers of a value are."""
    return _apart(value.values, None if isinstance(value.values, Tensor) else 0)


def _apart(one: Any, other: Any) -> Size:
    """Return how far numbers are from others, or, of a tensor, from zero."""
    if not isinstance(one, Tensor):
        found = difference(one, other)
        return Size() if found is None else Size(found.max_abs, found.max_abs)
    if not one.numel():
        return Size()
    distances = _real(one) if other is None else _real(one) - _real(other)
    largest = float(torch.linalg.vector_norm(distances, math.inf))
    if not math.isfinite(largest):
        distances = distances.nan_to_num(0.0, 0.0, 0.0)
        largest = float(torch.linalg.vector_norm(distances, math.inf))
    return Size(largest, float(torch.linalg.vector_norm(distances)) / math.sqrt(distances.numel()))


def _real(numbers: Tensor) -> Tensor:
    numbers = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
    return numbers.to(torch.float64)

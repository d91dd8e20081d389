"""Two runs side by side: event by event in each process, value by value in each event.

[Note: side by side] Events are compared in their order, which stock and patched runs share: the same backwards, steps
and savings. Where the kinds of events differ, as when one run skips a step, that is the difference, and what follows in
this process cannot be compared. A run that failed or was ended may stop anywhere; what there is of it is compared.

[Note: saved as it was] Most of a checkpoint are parameters and states as the steps before left them, where they were
judged already. What is saved in both runs with the bits that one of those values had is not judged again.

[Note: small numbers] The difference that is always allowed, 1e-6, is meant for numbers around 1. Where all gradients
are smaller than that, it would allow any gradient. So it is at most a thousandth of the largest number of its family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.insight import equality
from ovpatch.insight.equality import Row, Verdict, difference
from ovpatch.insight.verify import recording
from ovpatch.insight.verify.recording import Event, Run
from ovpatch.insight.verify.values import UNREAD, Kept

# What stock differs from itself in a value and in its like.
#
# [Note: few draws] How far a value moves from run to run is chance, and one or two further runs may by chance move it
# little. So its noise is that of its like: of the values of one kind, dtype and shape whose names differ in numbers
# alone, as those of a model's layers do, on all processes and in all steps so far. It is the largest of them all in
# proportion to the values' own sizes, but no more than the largest as it is: a layer whose gradient is next to nothing
# moves by much of it, and must not allow that to others.

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


# Whether numbers of two runs are equal within noise.
#
# [Note: one number is one draw] How far many elements move together is much the same in each run. A loss or a norm is
# one number, whose noise in a yardstick is by chance next to nothing. So three times as much is allowed of it.
#
# [Note: many elements] One element decides what the largest difference is, and single elements go far by chance:
# AdamW makes a whole step of a gradient next to zero, whose sign is chance. So four times as much as noise moved is
# allowed of it. A parameter that is late by a step is no farther off than that, but in all of its elements. The root
# of the mean square, which many elements decide, has to be within twice that of the noise.
#
# [Note: units in the last place] A bfloat16 number just below 1 is followed by one that is 0.0039 larger. What is
# rounded otherwise moves by such a unit or not at all, and that no element happened to move in a yardstick, or by one
# unit and not by two, says little. So where one moved anything of the event, the largest difference may be a unit of
# the largest element more; and an eighth of a tensor's elements, or a single one, may each be a unit off whatever the
# mean is.

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


ORDER: Final = "order of events"
_OF_PARAMETERS: Final = ("gradient ", "parameter ", "state ", "buffer ", "frozen ")
_EXACT: Final = ("text", "none", UNREAD)
_SMALL: Final = 1e-3  # of the largest gradient, say: no more is always allowed, however small they all are


@dataclass(frozen=True)
class Finding:
    """A value that is not bitwise equal, and where.

    Attributes:
        row: Name, verdict and difference.
        process: For example ``rank 1``.
        step: From 1.
        order: Position of its event among those of the process.
        event: What happened, in words.
    """

    row: Row
    process: str
    step: int
    order: int
    event: str

    @property
    def different(self) -> bool:
        """Whether it is more than noise."""
        return self.row.verdict is Verdict.DIFFERENT


@dataclass
class Compared:
    """The outcome of :func:`compare`.

    Attributes:
        findings: What is not bitwise equal, by process and in order.
        processes: Those that were compared.
        values: How many values were.
        steps: The last step that was compared, 0 if none was.
        events: How many of each kind were.
        unread: Values that neither run could read, with what they are.
        finite: How many losses were finite in stock.
        parameters: How many values of parameters were compared.
        finite_parameters: How many of those were finite in stock.
    """

    findings: list[Finding] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    values: int = 0
    steps: int = 0
    events: dict[str, int] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    finite: int = 0
    parameters: int = 0
    finite_parameters: int = 0

    @property
    def different(self) -> list[Finding]:
        """What differs by more than noise, the earliest first."""
        found = [finding for finding in self.findings if finding.different]
        return sorted(found, key=lambda finding: (finding.step, finding.order))

    @property
    def first(self) -> Finding | None:
        """The earliest difference; where the first event has several, that of a parameter or of its gradient."""
        found = self.different
        if not found:
            return None
        together = [one for one in found if (one.step, one.order) == (found[0].step, found[0].order)]
        return next((one for one in together if one.row.name.startswith(_OF_PARAMETERS)), found[0])

    def worst(self, count: int) -> list[Finding]:
        """Return the findings with the largest excess, differences first."""

        def key(one: Finding) -> tuple[bool, float, int, int]:
            return not one.different, -one.row.excess, one.step, one.order

        return sorted(self.findings, key=key)[:count]

    def count(self, event: Event) -> None:
        """Count an event that both runs have."""
        unread = {name: value.digest for name, value in event.values.items() if value.form == UNREAD}
        self.unread |= unread
        self.values += len(event.values) - len(unread)
        self.events[event.kind] = self.events.get(event.kind, 0) + 1
        if event.kind == recording.BACKWARD:
            self.finite += all(map(_is_finite, event.values.values()))
        if event.kind == recording.STEP:
            self.steps = max(self.steps, event.step)
            found = [value for name, value in event.values.items() if name.startswith("parameter ")]
            self.parameters += len(found)
            self.finite_parameters += sum(map(_is_finite, found))


def _is_finite(value: Kept) -> bool:
    return not value.not_finite and (value.values is None or bool(torch.as_tensor(value.values).isfinite().all()))


def compare(stock: Run, patched: Run, yardsticks: Mapping[str, Run] | None = None) -> Compared:
    """Compare a patched run with a stock one, see [Note: side by side].

    Args:
        stock: What stock recorded.
        patched: What the patched run recorded.
        yardsticks: What stock recorded once more, as it was or with its reductions in another order, by a name.
    """
    compared = Compared()
    runs = yardsticks or {}
    noise = Noise(stock, runs.values())
    cut = stock.cut or patched.cut
    for process in dict.fromkeys([*stock.processes, *patched.processes]):
        if process in stock.processes and process in patched.processes:
            compared.processes.append(process)
            others = {name: run.events(process) for name, run in runs.items()}
            _side_by_side(process, stock.events(process), patched.events(process), others, noise, cut, compared)
        elif not cut:
            who = "the patched run" if process in stock.processes else "stock"
            row = Row(ORDER, Verdict.DIFFERENT, note=f"nothing happened here in {who}")
            compared.findings.append(Finding(row, process, 1, 0, "the whole run"))
    return compared


def _side_by_side(
    process: str,
    stock: Iterator[Event],
    patched: Iterator[Event],
    others: dict[str, Iterator[Event]],
    noise: Noise,
    cut: bool,
    compared: Compared,
) -> None:
    latest: dict[str, tuple[str, str]] = {}  # digests of both at the last steps, by name
    for order, (ours, theirs) in enumerate(zip_longest(stock, patched)):
        beside = {name: next(events, None) for name, events in others.items()}
        if ours is None or theirs is None or ours.signature != theirs.signature:
            if not (cut and (ours is None or theirs is None)):
                compared.findings.append(_out_of_step(process, order, ours, theirs, beside))
            return
        for name, event in beside.items():
            if event is None or event.signature != ours.signature:
                del others[name]  # from here on it is no yardstick
        compared.count(ours)
        yardsticks = {name: event.values for name, event in beside.items() if event is not None and name in others}
        rows = compare_values(ours.values, theirs.values, yardsticks, partial(noise.of, ours))
        if ours.kind == recording.STEP:
            both = ours.values.keys() & theirs.values.keys()
            latest |= {name: (ours.values[name].digest, theirs.values[name].digest) for name in both}
        if ours.kind == recording.CHECKPOINT and rows:
            known = {digests: name for name, digests in latest.items()}
            rows = [_unless_as_it_was(row, ours.values, theirs.values, known) for row in rows]
        compared.findings += [Finding(row, process, ours.step, order, str(ours)) for row in rows]


def _unless_as_it_was(
    row: Row, stock: Mapping[str, Kept], patched: Mapping[str, Kept], known: Mapping[tuple[str, str], str]
) -> Row:
    """Return the row of a saved value as noise if it is what a step had left, see [Note: saved as it was].

    Args:
        row: The value's.
        stock: What stock saved.
        patched: What the patched run saved.
        known: Names of the values of the last steps, by the digests that stock and the patched run had.
    """
    ours, theirs = stock.get(row.name), patched.get(row.name)
    if ours is None or theirs is None or ours.form != theirs.form:
        return row
    name = known.get((ours.digest, theirs.digest))
    if name is None:
        return row
    return replace(row, verdict=Verdict.WITHIN_NOISE, note=f"it is '{name}' of the step before")


def _out_of_step(
    process: str, order: int, stock: Event | None, patched: Event | None, beside: Mapping[str, Event | None]
) -> Finding:
    step = stock.step if stock is not None else patched.step if patched is not None else 1
    note = f"stock: {stock or 'the end'}; patched: {patched or 'the end'}"
    wanted = stock.signature if stock is not None else None
    if any((event.signature if event is not None else None) != wanted for event in beside.values()):
        row = Row(ORDER, Verdict.WITHIN_NOISE, note=f"{note}; stock does not repeat itself here either")
    else:
        row = Row(ORDER, Verdict.DIFFERENT, note=note)
    return Finding(row, process, step, order, str(stock or patched))


def compare_values(
    stock: Mapping[str, Kept],
    patched: Mapping[str, Kept],
    yardsticks: Mapping[str, Mapping[str, Kept]],
    noise_of: Callable[[str], Size] = lambda name: Size(),
) -> list[Row]:
    """Return a row for each value of an event that is not bitwise equal.

    Args:
        stock: Stock's values.
        patched: The patched run's.
        yardsticks: Those of further stock runs, by a name.
        noise_of: What is known of the noise in what is like a value, by name.
    """
    unequal = [
        name for name, value in stock.items() if patched.get(name, None) is None or patched[name][:2] != value[:2]
    ]
    scales = _scales(stock) if unequal else {}
    moving = bool(unequal) and any(_moved(stock, values) for values in yardsticks.values())
    rows = []
    for name in unequal:
        others = {arm: values.get(name) for arm, values in yardsticks.items()}
        floor = min(equality.FLOOR, _SMALL * scales.get(_family(name), 1.0))
        rows.append(_row(name, stock[name], patched.get(name), others, floor, noise_of, moving))
    changing = any(values.keys() - stock.keys() for values in yardsticks.values())  # as names with the time in them do
    extra = _unrepeated if changing else _different
    rows += [extra(name, "stock has no such value") for name in patched if name not in stock]
    return [row for row in rows if row.verdict is not Verdict.BITWISE]


def _moved(stock: Mapping[str, Kept], other: Mapping[str, Kept]) -> bool:
    return any(name in other and other[name][:2] != value[:2] for name, value in stock.items())


def _scales(values: Mapping[str, Kept]) -> dict[str, float]:
    """Return the largest finite size of any number in each family of values."""
    scales: dict[str, float] = {}
    for name, value in values.items():
        if value.values is not None:
            scales[_family(name)] = max(_largest(torch.as_tensor(value.values)), scales.get(_family(name), 0.0))
    return scales


def _largest(numbers: torch.Tensor) -> float:
    real = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
    sizes = real.to(torch.float64).abs().nan_to_num(0.0, posinf=0.0)
    return float(sizes.max()) if sizes.numel() else 0.0


def _family(name: str) -> str:
    """Return what a value is to be measured by.

    All gradients together, all states of one kind, what is saved under one key of the outermost; else by itself.
    """
    kind, _, rest = name.partition(" ")
    if kind == "state":
        return f"state {rest.rpartition('.')[2]}"
    if kind == "saved":
        return f"saved {rest.partition('.')[0]}"
    return kind if kind in ("gradient", "parameter", "buffer", "frozen") else name


def _row(
    name: str,
    stock: Kept,
    patched: Kept | None,
    yardsticks: Mapping[str, Kept | None],
    floor: float,
    noise_of: Callable[[str], Size],
    moving: bool,
) -> Row:
    if patched is None:
        missing = _unrepeated if None in yardsticks.values() else _different
        return missing(name, "missing in the patched run")
    if stock.form != patched.form or stock.form in _EXACT or stock.not_finite != patched.not_finite:
        return _exact(name, stock, patched, list(yardsticks.values()))
    comparable = [value for value in yardsticks.values() if value is not None and value.form == stock.form]
    row = judge(name, stock, patched, comparable, floor=floor, noise=noise_of(name), moving=moving)
    return _of_sums(row) if stock.folded else row


def _of_sums(row: Row) -> Row:
    """Return the row of a large tensor, whose digests differ; the index and the values are those of a sum."""
    _, mark, more = row.note.partition("; ")
    note = f"a large tensor: of sums over parts of it{mark}{more}"
    if row.verdict is not Verdict.BITWISE:
        return replace(row, first_index=None, note=note)
    return Row(row.name, Verdict.WITHIN_NOISE, 0.0, equality.FLOOR, None, "bits differ, but no sum over a part does")


def _exact(name: str, stock: Kept, patched: Kept, yardsticks: Sequence[Kept | None]) -> Row:
    if stock.form != patched.form:
        return _different(name, f"{stock.form} became {patched.form}")
    if stock.not_finite != patched.not_finite:  # as in the equality rule, no yardstick allows that
        return _different(name, f"{stock.not_finite or 'all finite'} became {patched.not_finite or 'all finite'}")
    if any(value is not None and value.digest != stock.digest for value in yardsticks):
        return Row(name, Verdict.WITHIN_NOISE, note="stock does not repeat it either")
    return _different(name, f"{stock.digest} became {patched.digest}")


def _unrepeated(name: str, note: str) -> Row:
    return Row(name, Verdict.WITHIN_NOISE, note=f"{note}; stock does not repeat it either")


def _different(name: str, note: str) -> Row:
    return Row(name, Verdict.DIFFERENT, note=note)

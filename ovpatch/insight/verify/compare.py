"""Comparison of two recorded runs: event by event in each process, value by value in each event."""

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
from ovpatch.insight.equality import (
    Row,
    Verdict,
    judge_difference,
    make_different,
    measure_difference,
)
from ovpatch.insight.verify import recording
from ovpatch.insight.verify.recording import UNREAD, KeptValue, RecordedEvent, RecordedRun

# The event, the value's name without numbers, and its form.
_Key = tuple[Hashable, str, str]

_NUMBERS: Final = re.compile(r"\d+")


class Size(NamedTuple):
    """The size of numbers or differences."""

    # Largest absolute number.
    largest: float = 0.0
    # Root mean square.
    mean: float = 0.0

    def max_with(self, size: Size) -> Size:
        """Return the larger of both, for each measure."""
        return Size(max(self.largest, size.largest), max(self.mean, size.mean))


class _Moved(NamedTuple):
    """Differences of values between runs: absolute, and relative to the values' sizes."""

    absolute: Size = Size()
    relative: Size = Size()


class Noise:
    """The noise of values: differences between stock runs, while these have the same events.

    One or two further runs may move a value little by chance, so values share their noise. Values of the
    same role, dtype and shape share it if their names differ in numbers only, as in a model's layers. Values of all
    processes and of all steps so far count. The noise is the largest relative noise of them, but at most the largest
    absolute noise: a layer with almost no gradient moves by much of it, and this must not count for other layers.
    """

    def __init__(self, stock: RecordedRun, noise_runs: Iterable[RecordedRun]) -> None:
        self._found: dict[_Key, dict[int, _Moved]] = {}
        for noise_run in noise_runs:
            for process in stock.processes:
                for expected, actual in zip(
                    stock.events(process), noise_run.events(process), strict=False
                ):
                    if expected.signature != actual.signature:
                        break
                    self._add_events(expected, actual)

    def _add_events(self, expected: RecordedEvent, actual: RecordedEvent) -> None:
        for name, value in expected.values.items():
            moved = measure_distance(value, actual.values.get(name))
            if moved.largest:
                steps, size = (
                    self._found.setdefault(_make_key(expected, name), {}),
                    measure_size(value),
                )
                relative = Size(
                    *(
                        distance / largest if largest else 0.0
                        for distance, largest in zip(moved, size, strict=True)
                    )
                )
                before = steps.get(expected.step, _Moved())
                steps[expected.step] = _Moved(
                    before.absolute.max_with(moved), before.relative.max_with(relative)
                )

    def get_noise(self, event: RecordedEvent, name: str) -> Size:
        """Return the noise of the values like this one, in its step and before."""
        absolute = relative = Size()
        for step, moved in self._found.get(_make_key(event, name), {}).items():
            if step <= event.step:
                absolute, relative = (
                    absolute.max_with(moved.absolute),
                    relative.max_with(moved.relative),
                )
        if not absolute.largest:
            return absolute
        size = measure_size(event.values[name])
        return Size(
            *(
                min(distance, share * largest)
                for distance, share, largest in zip(absolute, relative, size, strict=True)
            )
        )


def _make_key(event: RecordedEvent, name: str) -> _Key:
    return event.signature, _NUMBERS.sub("*", name), event.values[name].form


def measure_distance(value: KeptValue, reference: KeptValue | None) -> Size:
    """Return the distance of two values of one form, in which NaNs and infinities count as 0.

    The distance of values that are no numbers, or have different forms, is 0.
    """
    if (
        reference is None
        or value[:2] == reference[:2]
        or value.form != reference.form
        or value.values is None
    ):
        return Size()
    return _measure_apart(value.values, reference.values)


def measure_size(value: KeptValue) -> Size:
    """Return the size of a value's numbers."""
    return _measure_apart(value.values, None if isinstance(value.values, Tensor) else 0)


def _measure_apart(value: Any, reference: Any) -> Size:
    """Return the distance of numbers from a reference, or of a tensor from zero."""
    if not isinstance(value, Tensor):
        found = measure_difference(value, reference)
        return Size(found.max_abs, found.max_abs)
    if not value.numel():
        return Size()
    distances = _to_real(value) if reference is None else _to_real(value) - _to_real(reference)
    largest = float(torch.linalg.vector_norm(distances, math.inf))
    if not math.isfinite(largest):
        distances = distances.nan_to_num(0.0, 0.0, 0.0)
        largest = float(torch.linalg.vector_norm(distances, math.inf))
    return Size(largest, float(torch.linalg.vector_norm(distances)) / math.sqrt(distances.numel()))


def _to_real(numbers: Tensor) -> Tensor:
    numbers = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
    return numbers.to(torch.float64)


# The rules by which a value that is not bitwise equal may be equal. A different value exceeds the limit of its rule.
BY_FLOOR: Final = "floor"
BY_NOISE: Final = "noise"
BY_LAST_PLACE: Final = "last place"
BY_CHANCE: Final = "not repeated"
BY_LAST_STEP: Final = "the step before"

#: Each rule in words, after "2 values differ by no more than".
RULES: Final = {
    BY_FLOOR: f"{equality.FLOOR:g}, always allowed, or a thousandth of the largest of a family if that is less",
    BY_NOISE: "twice what stock moved values like it, four times for one element, three times for a single number",
    BY_LAST_PLACE: "that and one unit in the last place, where stock moved anything of the step",
    BY_CHANCE: "stock differs from itself: it does not repeat them",
    BY_LAST_STEP: "the parameters that they were saved from",
}

# The share of a tensor's elements that may be a unit in the last place off, whatever the mean.
_MAX_SHARE_OFF: Final = 1 / 8

# The allowed multiples of the noise. A single element may move far by chance, so it gets four times the noise: AdamW
# makes a full step of a gradient near zero, whose sign is chance. The mean depends on many elements and catches a
# parameter that is a step late.
_FACTORS_TENSOR: Final = Size(2 * equality.FACTOR, equality.FACTOR)
# A loss or a norm is one number, whose difference in a noise run may by chance be almost zero.
_FACTORS_NUMBER: Final = Size(3.0, 3.0)


def judge_value(
    name: str,
    stock: KeptValue,
    patched: KeptValue,
    noise_runs: Sequence[KeptValue],
    *,
    floor: float,
    noise: Size,
    moving: bool,
) -> Row:
    """Compare two numeric values of one form.

    A bf16 or fp16 number moves by a unit in the last place or not at all. So a noise run that moved
    it by no unit, or by one and not two, proves little. If a noise run moved anything of the event
    (``moving``), the largest difference may be one unit of the largest element more. Few elements
    may each be a unit off. ``floor`` is always allowed.
    """
    distances = (measure_distance(stock, repeated) for repeated in noise_runs)
    largest = reduce(Size.max_with, distances, noise)
    is_single = not isinstance(stock.values, Tensor) or stock.values.numel() == 1
    factors = _FACTORS_NUMBER if is_single else _FACTORS_TENSOR
    by_noise = Size(*(factor * size for factor, size in zip(factors, largest, strict=True)))
    allowed = by_noise.max_with(Size(floor, floor))
    # The elements of a sketch are sums, of which no unit in the last place is known.
    is_rounded = moving and not stock.folded
    if is_rounded:
        allowed = allowed._replace(largest=allowed.largest + _measure_unit(stock.values))
    row = _judge(name, stock, patched, allowed)
    row = replace(row, rule=_find_rule(row, by_noise, measure_distance(stock, patched).mean, floor))
    if row.verdict is Verdict.DIFFERENT and is_rounded:
        nearer = patched._replace(values=_remove_single_units(stock.values, patched.values))
        if (
            nearer.values is not None
            and _judge(name, stock, nearer, allowed).verdict is not row.verdict
        ):
            note = f"{row.note}; few of its elements, by a unit in the last place"
            return replace(
                row,
                verdict=Verdict.WITHIN_NOISE,
                allowed=row.max_abs_diff,
                note=note,
                rule=BY_LAST_PLACE,
            )
    return row


def _find_rule(row: Row, by_noise: Size, mean: float, floor: float) -> str:
    """Return the strictest rule by which a value is equal, or the most lenient rule that a different value exceeds."""
    if row.max_abs_diff is None or row.verdict is Verdict.BITWISE:
        return ""
    if row.verdict is Verdict.DIFFERENT:
        return BY_NOISE if by_noise.largest > floor else BY_FLOOR
    if row.max_abs_diff <= by_noise.largest and mean <= by_noise.mean:
        return BY_NOISE
    return BY_FLOOR if row.max_abs_diff <= floor else BY_LAST_PLACE


def _judge(name: str, stock: KeptValue, patched: KeptValue, allowed: Size) -> Row:
    row = judge_difference(
        name, measure_difference(stock.values, patched.values), floor=allowed.largest
    )
    if row.verdict is not Verdict.WITHIN_NOISE:
        return row
    mean = measure_distance(stock, patched).mean
    if mean <= allowed.mean:
        return row
    note = f"{row.note}; many of its elements: this is the root of the mean square"
    return replace(
        row, verdict=Verdict.DIFFERENT, max_abs_diff=mean, allowed=allowed.mean, note=note
    )


def _remove_single_units(stock: Any, patched: Any) -> Tensor | None:
    """Return the patched value without differences of one unit; None if there are none, or too many."""
    if not isinstance(stock, Tensor) or not stock.is_floating_point():
        return None
    expected, actual = stock.to(torch.float64), patched.to(torch.float64)
    units = _measure_units(torch.minimum(expected.abs(), actual.abs()), stock.dtype)
    near = (expected != actual) & ((expected - actual).abs() <= units)
    if not 0 < int(near.sum()) <= max(1, int(_MAX_SHARE_OFF * stock.numel())):
        return None
    return torch.where(near, stock, patched)


def _measure_unit(values: Any) -> float:
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return 0.0
    sizes = values.to(torch.float64).abs()
    return float(_measure_units(sizes.where(sizes.isfinite(), 0.0).max(), values.dtype))


def _measure_units(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the units in the last place of a dtype, for absolute numbers in float64."""
    facts = torch.finfo(dtype)
    normal = sizes.clamp(min=facts.smallest_normal)
    return torch.ldexp(torch.full_like(normal, facts.eps), torch.frexp(normal).exponent - 1)


ORDER: Final = "order of events"
_PARAMETER_PREFIXES: Final = ("gradient ", "parameter ", "state ", "buffer ", "frozen ")
_EXACT: Final = ("text", "none", UNREAD)
# The difference of 1e-6 that is always allowed suits numbers around 1. It is at most this share of the largest number
# of its family, because otherwise small gradients could be anything.
_MAX_FLOOR_SHARE: Final = 1e-3


@dataclass(frozen=True)
class Finding:
    """A value that is not bitwise equal, and its place."""

    # Name, verdict and difference.
    row: Row
    # For example ``rank 1``.
    process: str
    # The number of the step, from 1.
    step: int
    # Position of its event among those of the process.
    order: int
    # The event in words.
    event: str

    @property
    def different(self) -> bool:
        """True if the difference is more than noise."""
        return self.row.verdict is Verdict.DIFFERENT


@dataclass
class RunComparison:
    """The outcome of :func:`compare_runs`."""

    # Values that are not bitwise equal, by process and in order.
    findings: list[Finding] = field(default_factory=list)
    # Processes that were compared.
    processes: list[str] = field(default_factory=list)
    # Number of compared values of each role, such as ``gradient``.
    values_by_role: dict[str, int] = field(default_factory=dict)
    # Last compared step, 0 for none.
    steps: int = 0
    # Number of compared events of each type.
    events: dict[str, int] = field(default_factory=dict)
    # Unreadable values, with their classes.
    unread: dict[str, str] = field(default_factory=dict)
    # Number of losses that are finite in the stock run.
    finite: int = 0
    # Number of compared parameter values.
    parameters: int = 0
    # Number of compared parameter values that are finite in the stock run.
    finite_parameters: int = 0

    @property
    def values(self) -> int:
        """Number of compared values."""
        return sum(self.values_by_role.values())

    @property
    def different(self) -> list[Finding]:
        """Findings that differ by more than noise, the earliest first."""
        found = [finding for finding in self.findings if finding.different]
        return sorted(found, key=lambda finding: (finding.step, finding.order))

    def count_rules(self) -> dict[str, int]:
        """Return the number of values that are equal by each rule, of those that are not bitwise equal."""
        found = [finding.row.rule for finding in self.findings if not finding.different]
        return {rule: found.count(rule) for rule in RULES if rule in found}

    @property
    def first(self) -> Finding | None:
        """The earliest difference; of several in one event, the difference of a parameter or its gradient."""
        found = self.different
        if not found:
            return None
        together = [
            finding
            for finding in found
            if (finding.step, finding.order) == (found[0].step, found[0].order)
        ]
        return next(
            (finding for finding in together if finding.row.name.startswith(_PARAMETER_PREFIXES)),
            found[0],
        )

    def worst(self, count: int) -> list[Finding]:
        """Return the findings with the largest excess, differences first."""

        def key(finding: Finding) -> tuple[bool, float, int, int]:
            return not finding.different, -finding.row.excess, finding.step, finding.order

        return sorted(self.findings, key=key)[:count]

    def count_event(self, event: RecordedEvent) -> None:
        """Count an event of both runs."""
        unread = {
            name: value.digest for name, value in event.values.items() if value.form == UNREAD
        }
        self.unread |= unread
        for role in map(recording.get_role, event.values.keys() - unread.keys()):
            self.values_by_role[role] = self.values_by_role.get(role, 0) + 1
        self.events[event.event_type] = self.events.get(event.event_type, 0) + 1
        if event.event_type == recording.BACKWARD:
            self.finite += all(map(_is_finite, event.values.values()))
        if event.event_type == recording.STEP:
            self.steps = max(self.steps, event.step)
            found = [value for name, value in event.values.items() if name.startswith("parameter ")]
            self.parameters += len(found)
            self.finite_parameters += sum(map(_is_finite, found))


def _is_finite(value: KeptValue) -> bool:
    return not value.not_finite and (
        value.values is None or bool(torch.as_tensor(value.values).isfinite().all())
    )


def compare_runs(
    stock: RecordedRun, patched: RecordedRun, noise_runs: Mapping[str, RecordedRun] | None = None
) -> RunComparison:
    """Compare a patched run with a stock run.

    Events are compared in order. If their types differ, for example because one run skips a step, this is a
    difference, and the rest of the process is not compared. A run that failed or was ended may stop anywhere. Its
    events so far are compared.

    Args:
        stock: The stock run.
        patched: The patched run.
        noise_runs: Further stock runs by name, repeated or reordered.
    """
    compared = RunComparison()
    runs = noise_runs or {}
    noise = Noise(stock, runs.values())
    cut = stock.cut or patched.cut
    for process in dict.fromkeys([*stock.processes, *patched.processes]):
        if process in stock.processes and process in patched.processes:
            compared.processes.append(process)
            noise_events = {name: run.events(process) for name, run in runs.items()}
            _compare_process(
                process,
                stock.events(process),
                patched.events(process),
                noise_events,
                noise,
                cut,
                compared,
            )
        elif not cut:
            missing_run = "the patched run" if process in stock.processes else "stock"
            row = make_different(ORDER, f"nothing happened here in {missing_run}")
            compared.findings.append(Finding(row, process, 1, 0, "the whole run"))
    return compared


def _compare_process(
    process: str,
    stock: Iterator[RecordedEvent],
    patched: Iterator[RecordedEvent],
    noise_events: dict[str, Iterator[RecordedEvent]],
    noise: Noise,
    cut: bool,
    compared: RunComparison,
) -> None:
    # The digests of each value at the last steps, stock and patched, by name.
    latest: dict[str, tuple[str, str]] = {}
    for order, (expected, actual) in enumerate(zip_longest(stock, patched)):
        repeated = {name: next(events, None) for name, events in noise_events.items()}
        if expected is None or actual is None or expected.signature != actual.signature:
            if not (cut and (expected is None or actual is None)):
                compared.findings.append(
                    _make_order_finding(process, order, expected, actual, repeated)
                )
            return
        for name, event in repeated.items():
            if event is None or event.signature != expected.signature:
                # The run is out of step, so it no longer measures noise.
                del noise_events[name]
        compared.count_event(expected)
        noise_runs = {
            name: event.values
            for name, event in repeated.items()
            if event is not None and name in noise_events
        }
        rows = compare_values(
            expected.values, actual.values, noise_runs, partial(noise.get_noise, expected)
        )
        if expected.event_type == recording.STEP:
            both = expected.values.keys() & actual.values.keys()
            latest |= {
                name: (expected.values[name].digest, actual.values[name].digest) for name in both
            }
        if expected.event_type == recording.CHECKPOINT and rows:
            known = {digests: name for name, digests in latest.items()}
            rows = [_allow_if_unchanged(row, expected.values, actual.values, known) for row in rows]
        compared.findings += [
            Finding(row, process, expected.step, order, str(expected)) for row in rows
        ]


def _allow_if_unchanged(
    row: Row,
    stock: Mapping[str, KeptValue],
    patched: Mapping[str, KeptValue],
    known: Mapping[tuple[str, str], str],
) -> Row:
    """Return a saved value as noise if, in both runs, it has the bits that the last steps left.

    The comparison of these steps has judged the value already.
    """
    expected, actual = stock.get(row.name), patched.get(row.name)
    if expected is None or actual is None or expected.form != actual.form:
        return row
    name = known.get((expected.digest, actual.digest))
    note = f"it is '{name}' of the step before"
    return (
        row
        if name is None
        else replace(row, verdict=Verdict.WITHIN_NOISE, note=note, rule=BY_LAST_STEP)
    )


def _make_order_finding(
    process: str,
    order: int,
    stock: RecordedEvent | None,
    patched: RecordedEvent | None,
    repeated: Mapping[str, RecordedEvent | None],
) -> Finding:
    step = stock.step if stock is not None else patched.step if patched is not None else 1
    row = make_different(ORDER, f"stock: {stock or 'the end'}; patched: {patched or 'the end'}")
    wanted = stock.signature if stock is not None else None
    signatures = (event.signature if event is not None else None for event in repeated.values())
    if any(signature != wanted for signature in signatures):
        note = f"{row.note}; stock does not repeat itself here either"
        row = replace(row, verdict=Verdict.WITHIN_NOISE, note=note, rule=BY_CHANCE)
    return Finding(row, process, step, order, str(stock or patched))


def compare_values(
    stock: Mapping[str, KeptValue],
    patched: Mapping[str, KeptValue],
    noise_runs: Mapping[str, Mapping[str, KeptValue]],
    noise_of: Callable[[str], Size] = lambda name: Size(),
) -> list[Row]:
    """Return a row for each value of an event that is not bitwise equal; ``noise_of`` takes the value's name."""
    unequal = [
        name
        for name, value in stock.items()
        if name not in patched or patched[name][:2] != value[:2]
    ]
    scales = _measure_scales(stock) if unequal else {}
    moving = bool(unequal) and any(
        name in values and values[name][:2] != value[:2]
        for values in noise_runs.values()
        for name, value in stock.items()
    )
    rows = []
    for name in unequal:
        expected, actual = stock[name], patched.get(name)
        repeated = [values.get(name) for values in noise_runs.values()]
        if actual is None:
            make_missing = _make_unrepeated if None in repeated else make_different
            rows.append(make_missing(name, "missing in the patched run"))
        elif (
            expected.form != actual.form
            or expected.form in _EXACT
            or expected.not_finite != actual.not_finite
        ):
            rows.append(_judge_exact(name, expected, actual, repeated))
        else:
            comparable = [
                value for value in repeated if value is not None and value.form == expected.form
            ]
            floor = min(equality.FLOOR, _MAX_FLOOR_SHARE * scales.get(_get_family(name), 1.0))
            row = judge_value(
                name,
                expected,
                actual,
                comparable,
                floor=floor,
                noise=noise_of(name),
                moving=moving,
            )
            rows.append(_make_row_of_sums(row) if expected.folded else row)
    # Names that contain the time change in each run.
    changing = any(values.keys() - stock.keys() for values in noise_runs.values())
    extra = _make_unrepeated if changing else make_different
    rows += [extra(name, "stock has no such value") for name in patched if name not in stock]
    return [row for row in rows if row.verdict is not Verdict.BITWISE]


def _measure_scales(values: Mapping[str, KeptValue]) -> dict[str, float]:
    """Return the largest finite size of any number in each family of values."""
    scales: dict[str, float] = {}
    for name, value in values.items():
        if value.values is not None:
            scales[_get_family(name)] = max(
                measure_size(value).largest, scales.get(_get_family(name), 0.0)
            )
    return scales


def _get_family(name: str) -> str:
    """Return the family of a value: gradients, states of one name, values saved under one outermost key, and so on."""
    role, _, rest = name.partition(" ")
    if role == "state":
        return f"state {rest.rpartition('.')[2]}"
    if role == "saved":
        return f"saved {rest.partition('.')[0]}"
    return role if role in ("gradient", "parameter", "buffer", "frozen") else name


def _make_row_of_sums(row: Row) -> Row:
    """Return the row of a large tensor with different digests; its values are sums of a sketch."""
    _, mark, more = row.note.partition("; ")
    note = f"a large tensor: of sums over parts of it{mark}{more}"
    if row.verdict is not Verdict.BITWISE:
        return replace(row, first_index=None, note=note)
    note = "bits differ, but no sum over a part does"
    return Row(row.name, Verdict.WITHIN_NOISE, 0.0, equality.FLOOR, None, note, BY_FLOOR)


def _judge_exact(
    name: str, stock: KeptValue, patched: KeptValue, noise_runs: Sequence[KeptValue | None]
) -> Row:
    if stock.form != patched.form:
        return make_different(name, f"{stock.form} became {patched.form}")
    # As in the equality rule, no noise run excuses another set of NaNs and infinities.
    if stock.not_finite != patched.not_finite:
        return make_different(
            name, f"{stock.not_finite or 'all finite'} became {patched.not_finite or 'all finite'}"
        )
    if any(value is not None and value.digest != stock.digest for value in noise_runs):
        return Row(
            name, Verdict.WITHIN_NOISE, note="stock does not repeat it either", rule=BY_CHANCE
        )
    return make_different(name, f"{stock.digest} became {patched.digest}")


def _make_unrepeated(name: str, note: str) -> Row:
    return Row(
        name, Verdict.WITHIN_NOISE, note=f"{note}; stock does not repeat it either", rule=BY_CHANCE
    )

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Final

import torch

from ovpatch.insight import equality
from ovpatch.insight.equality import Row, Verdict
from ovpatch.insight.verify import recording
from ovpatch.insight.verify.judging import judge
from ovpatch.insight.verify.noise import Noise, Size
from ovpatch.insight.verify.records import Event, Run
from ovpatch.insight.verify.values import UNREAD, Kept

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

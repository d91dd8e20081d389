"""The numbers: what each step of each rank consists of, and what of its communication is hidden.

[Note: parts of a step] Every nanosecond of a step is in exactly one of: compute; exposed communication (no compute at
the time); copies only (neither of the two); idle (nothing). Hidden communication is the part of compute under which
something communicates, so compute + exposed + copies + idle is the step.

[Note: the step that is shown] The slowest rank decides, and one step is no measurement: of each step, the rank with
most exposed communication counts, and the step that is the median by that is shown, on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ovpatch.insight.timeline.trace import TraceError
from ovpatch.insight.timeline.tracks import Communication, Lanes, Step, step_of, union
from ovpatch.session.report import render_table

FEWEST_STEPS: Final = 3  # of each run, for a ratio between runs


@dataclass(frozen=True)
class Parts:
    """Nanoseconds of one step of one rank; see [Note: parts of a step]."""

    step: int
    compute: int
    hidden: int
    exposed: int
    copies: int
    idle: int

    @property
    def hidden_share(self) -> float | None:
        """Hidden communication by all communication, None without any (metric 5 of the project's list)."""
        communication = self.hidden + self.exposed
        return self.hidden / communication if communication else None


@dataclass(frozen=True)
class Group:
    """Communications of one collective under one label, in one step of one rank.

    Attributes:
        collective: For example ``nccl all_reduce``.
        phase: ``ovpatch::<feature>::<phase>``, "" for what none of ovpatch's features launched.
        calls: How many.
        hidden: Nanoseconds in which at least one of them ran, under compute.
        exposed: Likewise, without compute.
    """

    collective: str
    phase: str
    calls: int
    hidden: int
    exposed: int


@dataclass(frozen=True)
class Run:
    """One arm: the lanes of all its ranks, over the steps that all of them have.

    Attributes:
        name: ``stock``, ``patched`` or another.
        ranks: By rank.
        steps: Numbers of the steps, in order.
        shown: Number of the step that stands for all; see [Note: the step that is shown].
    """

    name: str
    ranks: tuple[Lanes, ...]
    steps: tuple[int, ...]
    shown: int

    @property
    def remarks(self) -> list[str]:
        """What a reader should know about how the ranks were read, each once."""
        return list(dict.fromkeys(remark for lanes in self.ranks for remark in lanes.remarks))

    def parts(self, lanes: Lanes, number: int) -> Parts:
        """Return the parts of a step of a rank."""
        return parts_of(lanes, step_of(lanes, number))

    def worst(self, number: int) -> tuple[Lanes, Parts]:
        """Return the rank with most exposed communication in a step, and its parts."""
        return max(((lanes, self.parts(lanes, number)) for lanes in self.ranks), key=lambda pair: pair[1].exposed)


def run_of(name: str, ranks: Sequence[Lanes]) -> Run:
    """Gather the ranks of an arm.

    Raises:
        TraceError: There is no step that all ranks have.
    """
    if not ranks:
        raise TraceError(f"{name}: there is no trace. Give at least one.")
    common = set.intersection(*({step.number for step in lanes.steps} for lanes in ranks))
    if not common:
        had = "; ".join(f"rank {lanes.rank}: {[step.number for step in lanes.steps]}" for lanes in ranks)
        raise TraceError(
            f"{name}: no step is in the traces of all ranks ({had}). Record the same steps on all of them."
        )
    steps = tuple(sorted(common))
    exposed = {n: max(parts_of(lanes, step_of(lanes, n)).exposed for lanes in ranks) for n in steps}
    return Run(name, tuple(ranks), steps, _median(steps, lambda number: exposed[number]))


def _median(values: Sequence[int], key: Callable[[int], int]) -> int:
    """Return the one in the middle, the lower of two."""
    return sorted(values, key=key)[(len(values) - 1) // 2]


def parts_of(lanes: Lanes, step: Step) -> Parts:
    """Return the parts of a step; see [Note: parts of a step]."""
    compute, communication, copies = (
        part.within(step.start, step.end) for part in (lanes.compute, lanes.communication, lanes.copies)
    )
    busy = compute | communication | copies
    return Parts(
        step=step.end - step.start,
        compute=compute.total,
        hidden=(communication & compute).total,
        exposed=(communication - compute).total,
        copies=(copies - (compute | communication)).total,
        idle=busy.gaps(step.start, step.end).total,
    )


def groups_of(lanes: Lanes, step: Step) -> tuple[Group, ...]:
    """Return a step's communication by collective and label, the most exposed first.

    Where two groups run at once, that time counts in both: the groups do not add up to the whole.
    """
    members: dict[tuple[str, str], list[Communication]] = defaultdict(list)
    for one in lanes.communications:
        if one.start < step.end and one.end > step.start:
            members[one.collective, one.phase].append(one)
    groups = []
    for (collective, phase), some in members.items():
        busy = union(some).within(step.start, step.end)
        hidden = (busy & lanes.compute).total
        groups.append(Group(collective, phase, len(some), hidden, busy.total - hidden))
    return tuple(sorted(groups, key=lambda group: (-group.exposed, -group.hidden)))


class Efficiency(NamedTuple):
    """Overlap efficiency against a stock run: 1 - exposed, patched / exposed, stock.

    0 is as exposed as stock, 1 is all hidden, negative is worse.

    Attributes:
        median: Of the steps that are shown.
        low: The lowest that any step of each run makes.
        high: The highest.
    """

    median: float
    low: float
    high: float


def efficiency(stock: Run, patched: Run) -> Efficiency | None:
    """Return overlap efficiency; None if a run has fewer than :data:`FEWEST_STEPS`, or stock exposes nothing."""
    before, after = ([run.worst(number)[1].exposed for number in run.steps] for run in (stock, patched))
    if min(len(before), len(after)) < FEWEST_STEPS or not min(before):
        return None
    shown = [run.worst(run.shown)[1].exposed for run in (stock, patched)]
    return Efficiency(1 - shown[1] / shown[0], 1 - max(after) / min(before), 1 - min(after) / max(before))


def to_json(run: Run) -> dict[str, Any]:
    """Return all numbers of a run as JSON types; times are nanoseconds."""
    return {
        "name": run.name,
        "shown": run.shown,
        "ranks": [
            {
                "rank": lanes.rank,
                "device": lanes.device,
                "host": lanes.host,
                "trace": str(lanes.path),
                "remarks": list(lanes.remarks),
                "steps": [_step_to_json(lanes, step_of(lanes, number)) for number in run.steps],
            }
            for lanes in run.ranks
        ],
    }


def _step_to_json(lanes: Lanes, step: Step) -> dict[str, Any]:
    parts = parts_of(lanes, step)
    return {
        "number": step.number,
        **vars(parts),
        "hidden_share": parts.hidden_share,
        "collectives": [vars(group) for group in groups_of(lanes, step)],
    }


# The result as text: a row a rank, and a row for each collective and label.

_HEADS = ("run", "rank", "step", "compute", "hidden", "exposed", "copies", "idle", "hidden share")
_GROUP_HEADS = ("run", "collective", "launched by", "calls", "hidden", "exposed")


def milliseconds(nanoseconds: int) -> str:
    """Return a time in milliseconds with as many digits as one can tell apart."""
    value = nanoseconds / 1e6
    if not nanoseconds:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """Return a share for a table."""
    return "n/a" if share is None else f"{share:.0%}"


def report(runs: Sequence[Run], *, colour: bool = False) -> str:
    """Return the tables and the verdict of one run, or of a stock and a patched one."""
    tables = [
        render_table("Milliseconds of a step, by rank", _HEADS, _rows(runs), colour=colour),
        render_table("Communication of the rank that exposes most", _GROUP_HEADS, _group_rows(runs), colour=colour),
    ]
    return "\n".join([*(table.rstrip() for table in tables), *verdict(runs)])


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        worst, _ = run.worst(run.shown)
        for lanes in run.ranks:
            mark = " <- most exposed" if lanes is worst and len(run.ranks) > 1 else ""
            yield run.name, f"{lanes.rank}{mark}", *_cells(run.parts(lanes, run.shown))


def _cells(parts: Parts) -> tuple[str, ...]:
    times = (parts.step, parts.compute, parts.hidden, parts.exposed, parts.copies, parts.idle)
    return *map(milliseconds, times), percent(parts.hidden_share)


def _group_rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        lanes, _ = run.worst(run.shown)
        for group in groups_of(lanes, step_of(lanes, run.shown)):
            times = milliseconds(group.hidden), milliseconds(group.exposed)
            yield run.name, group.collective, group.phase or "unlabelled", str(group.calls), *times


def verdict(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what the numbers come to, a line each, with the definition of each ratio."""
    for run in runs:
        yield f"{run.name}: {_exposure(run)}{_spread(run)}"
    if len(runs) == 2:
        yield f"overlap efficiency: {_efficiency(*runs)} (1 - exposed {runs[1].name} / exposed {runs[0].name})"
    yield "hidden share: communication under compute / all communication; compute + exposed + copies + idle = step"
    yield "Where the time goes, not how fast it is: compare speed without a profiler."


def _efficiency(stock: Run, patched: Run) -> str:
    found = efficiency(stock, patched)
    if found is not None:
        return f"{found.median:.0%}, {found.low:.0%} to {found.high:.0%} over the recorded steps"
    fewest = min(len(stock.steps), len(patched.steps))
    if fewest < FEWEST_STEPS:
        return f"too few steps to tell ({fewest}; record {FEWEST_STEPS} or more by --steps)"
    return "n/a, stock exposes nothing"


def _exposure(run: Run) -> str:
    lanes, parts = run.worst(run.shown)
    if parts.hidden_share is None:
        return f"no communication in step {run.shown}"
    return (
        f"{milliseconds(parts.exposed)} of {milliseconds(parts.step)} ms are exposed communication "
        f"(rank {lanes.rank}, step {run.shown}); hidden share {percent(parts.hidden_share)}"
    )


def _spread(run: Run) -> str:
    if len(run.steps) < 2:
        return ""
    exposed = [run.worst(number)[1].exposed for number in run.steps]
    first, last = milliseconds(min(exposed)), milliseconds(max(exposed))
    return f"; {first} to {last} ms over steps {run.steps[0]} to {run.steps[-1]}"

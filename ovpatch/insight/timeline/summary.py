"""The numbers of a timeline: the parts of each step of each rank, and the share of hidden communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ovpatch.insight.timeline.trace import TraceError
from ovpatch.insight.timeline.tracks import Communication, RankTracks, Step, get_step, merge_communications
from ovpatch.session.report import render_table

MIN_STEPS: Final = 3  # of each run, for a ratio between runs


@dataclass(frozen=True)
class StepParts:
    """Nanoseconds of one step of one rank.

    Every nanosecond of a step is in exactly one of: compute; exposed communication (no compute
    at the time); copies only (neither of the two); idle. Hidden communication is the part of compute under which
    something communicates, so compute + exposed + copies + idle is the step.
    """

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
class CollectiveGroup:
    """Communications of one collective under one label, in one step of one rank.

    Attributes:
        collective: For example ``nccl all_reduce``.
        phase: ``ovpatch::<feature>::<phase>``, "" outside of ovpatch's features.
        calls: Number of communications.
        hidden: Nanoseconds in which at least one of them runs, under compute.
        exposed: Nanoseconds in which at least one of them runs, without compute.
    """

    collective: str
    phase: str
    calls: int
    hidden: int
    exposed: int


@dataclass(frozen=True)
class TimelineRun:
    """One arm: the tracks of all its ranks, over their common steps.

    Attributes:
        name: ``stock``, ``patched`` or another.
        ranks: Tracks by rank.
        steps: Numbers of the steps, in order.
        shown: Number of the step to show: the median by the exposed communication of the rank with most.
    """

    name: str
    ranks: tuple[RankTracks, ...]
    steps: tuple[int, ...]
    shown: int

    @property
    def remarks(self) -> list[str]:
        """Remarks about how the traces were read, each once."""
        return list(dict.fromkeys(remark for tracks in self.ranks for remark in tracks.remarks))

    def get_parts(self, tracks: RankTracks, number: int) -> StepParts:
        """Return the parts of a step of a rank."""
        return split_step(tracks, get_step(tracks, number))

    def find_worst_rank(self, number: int) -> tuple[RankTracks, StepParts]:
        """Return the rank with most exposed communication in a step, and its parts."""
        return max(
            ((tracks, self.get_parts(tracks, number)) for tracks in self.ranks), key=lambda pair: pair[1].exposed
        )


def make_run(name: str, ranks: Sequence[RankTracks]) -> TimelineRun:
    """Return an arm from the tracks of its ranks.

    Raises:
        TraceError: The ranks have no common step.
    """
    if not ranks:
        raise TraceError(f"{name}: there is no trace. Give at least one.")
    common = set.intersection(*({step.number for step in tracks.steps} for tracks in ranks))
    if not common:
        had = "; ".join(f"rank {tracks.rank}: {[step.number for step in tracks.steps]}" for tracks in ranks)
        raise TraceError(
            f"{name}: no step is in the traces of all ranks ({had}). Record the same steps on all of them."
        )
    steps = tuple(sorted(common))
    exposed = {n: max(split_step(tracks, get_step(tracks, n)).exposed for tracks in ranks) for n in steps}
    return TimelineRun(name, tuple(ranks), steps, _median(steps, lambda number: exposed[number]))


def _median(values: Sequence[int], key: Callable[[int], int]) -> int:
    """Return the value in the middle by a key, the lower of two."""
    return sorted(values, key=key)[(len(values) - 1) // 2]


def split_step(tracks: RankTracks, step: Step) -> StepParts:
    """Return the parts of a step."""
    compute, communication, copies = (
        part.clip(step.start, step.end) for part in (tracks.compute, tracks.communication, tracks.copies)
    )
    busy = compute | communication | copies
    return StepParts(
        step=step.end - step.start,
        compute=compute.total,
        hidden=(communication & compute).total,
        exposed=(communication - compute).total,
        copies=(copies - (compute | communication)).total,
        idle=busy.find_gaps(step.start, step.end).total,
    )


def group_communications(tracks: RankTracks, step: Step) -> tuple[CollectiveGroup, ...]:
    """Return a step's communication by collective and label, the most exposed first.

    Time in which two groups run counts in both: the groups do not add up to the whole.
    """
    members: dict[tuple[str, str], list[Communication]] = defaultdict(list)
    for one in tracks.communications:
        if one.start < step.end and one.end > step.start:
            members[one.collective, one.phase].append(one)
    groups = []
    for (collective, phase), some in members.items():
        busy = merge_communications(some).clip(step.start, step.end)
        hidden = (busy & tracks.compute).total
        groups.append(CollectiveGroup(collective, phase, len(some), hidden, busy.total - hidden))
    return tuple(sorted(groups, key=lambda group: (-group.exposed, -group.hidden)))


class Efficiency(NamedTuple):
    """Overlap efficiency against a stock run: 1 - exposed, patched / exposed, stock.

    0 is as exposed as stock, 1 is all hidden, negative is worse.

    Attributes:
        median: Of the shown steps.
        low: Lowest over the steps of both runs.
        high: Highest over the steps of both runs.
    """

    median: float
    low: float
    high: float


def compute_efficiency(stock: TimelineRun, patched: TimelineRun) -> Efficiency | None:
    """Return overlap efficiency; None if a run has fewer than :data:`MIN_STEPS`, or stock exposes nothing."""
    before, after = ([run.find_worst_rank(number)[1].exposed for number in run.steps] for run in (stock, patched))
    if min(len(before), len(after)) < MIN_STEPS or not min(before):
        return None
    shown = [run.find_worst_rank(run.shown)[1].exposed for run in (stock, patched)]
    return Efficiency(1 - shown[1] / shown[0], 1 - max(after) / min(before), 1 - min(after) / max(before))


def run_to_json(run: TimelineRun) -> dict[str, Any]:
    """Return all numbers of a run as JSON types; times are nanoseconds."""
    return {
        "name": run.name,
        "shown": run.shown,
        "ranks": [
            {
                "rank": tracks.rank,
                "device": tracks.device,
                "host": tracks.host,
                "trace": str(tracks.path),
                "remarks": list(tracks.remarks),
                "steps": [_step_to_json(tracks, get_step(tracks, number)) for number in run.steps],
            }
            for tracks in run.ranks
        ],
    }


def _step_to_json(tracks: RankTracks, step: Step) -> dict[str, Any]:
    parts = split_step(tracks, step)
    return {
        "number": step.number,
        **vars(parts),
        "hidden_share": parts.hidden_share,
        "collectives": [vars(group) for group in group_communications(tracks, step)],
    }


_HEADS = ("run", "rank", "step", "compute", "hidden", "exposed", "copies", "idle", "hidden share")
_GROUP_HEADS = ("run", "collective", "launched by", "calls", "hidden", "exposed")


def format_ms(nanoseconds: int) -> str:
    """Return a time in milliseconds with up to three significant digits."""
    value = nanoseconds / 1e6
    if not nanoseconds:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_percent(share: float | None) -> str:
    """Return a share for a table."""
    return "n/a" if share is None else f"{share:.0%}"


def format_tables(runs: Sequence[TimelineRun], *, colour: bool = False) -> str:
    """Return the tables and the verdict of one run, or of a stock and a patched one."""
    tables = [
        render_table("Milliseconds of a step, by rank", _HEADS, _rows(runs), colour=colour),
        render_table("Communication of the rank that exposes most", _GROUP_HEADS, _group_rows(runs), colour=colour),
    ]
    return "\n".join([*(table.rstrip() for table in tables), *list_conclusions(runs)])


def _rows(runs: Sequence[TimelineRun]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        worst, _ = run.find_worst_rank(run.shown)
        for tracks in run.ranks:
            mark = " <- most exposed" if tracks is worst and len(run.ranks) > 1 else ""
            yield run.name, f"{tracks.rank}{mark}", *_cells(run.get_parts(tracks, run.shown))


def _cells(parts: StepParts) -> tuple[str, ...]:
    times = (parts.step, parts.compute, parts.hidden, parts.exposed, parts.copies, parts.idle)
    return *map(format_ms, times), format_percent(parts.hidden_share)


def _group_rows(runs: Sequence[TimelineRun]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        tracks, _ = run.find_worst_rank(run.shown)
        for group in group_communications(tracks, get_step(tracks, run.shown)):
            times = format_ms(group.hidden), format_ms(group.exposed)
            yield run.name, group.collective, group.phase or "unlabelled", str(group.calls), *times


def list_conclusions(runs: Sequence[TimelineRun]) -> Iterator[str]:
    """Yield the conclusions, a line each, with the definition of each ratio."""
    for run in runs:
        yield f"{run.name}: {_exposure(run)}{_spread(run)}"
    if len(runs) == 2:
        yield f"overlap efficiency: {_efficiency(*runs)} (1 - exposed {runs[1].name} / exposed {runs[0].name})"
    yield "hidden share: communication under compute / all communication; compute + exposed + copies + idle = step"
    yield "Where the time goes, not how fast it is: compare speed without a profiler."


def _efficiency(stock: TimelineRun, patched: TimelineRun) -> str:
    found = compute_efficiency(stock, patched)
    if found is not None:
        return f"{found.median:.0%}, {found.low:.0%} to {found.high:.0%} over the recorded steps"
    fewest = min(len(stock.steps), len(patched.steps))
    if fewest < MIN_STEPS:
        return f"too few steps to tell ({fewest}; record {MIN_STEPS} or more by --steps)"
    return "n/a, stock exposes nothing"


def _exposure(run: TimelineRun) -> str:
    tracks, parts = run.find_worst_rank(run.shown)
    if parts.hidden_share is None:
        return f"no communication in step {run.shown}"
    return (
        f"{format_ms(parts.exposed)} of {format_ms(parts.step)} ms are exposed communication "
        f"(rank {tracks.rank}, step {run.shown}); hidden share {format_percent(parts.hidden_share)}"
    )


def _spread(run: TimelineRun) -> str:
    if len(run.steps) < 2:
        return ""
    exposed = [run.find_worst_rank(number)[1].exposed for number in run.steps]
    first, last = format_ms(min(exposed)), format_ms(max(exposed))
    return f"; {first} to {last} ms over steps {run.steps[0]} to {run.steps[-1]}"

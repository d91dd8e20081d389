"""The numbers of a timeline: the parts of each rank's steps, hidden communication, and the cost of recording."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from ovpatch.insight.timeline.pipelines import (
    has_pipeline,
    list_parts,
    measure_bubble,
    parts_to_json,
)
from ovpatch.insight.timeline.trace import Intervals, Span, TraceError
from ovpatch.insight.timeline.tracks import RankTracks, Step, get_step, read_all_ranks
from ovpatch.insight.variants import describe_node
from ovpatch.session.report_table import render_table

# A ratio between runs of fewer steps would be noise.
MIN_STEPS: Final = 3


@dataclass(frozen=True)
class StepParts:
    """Nanoseconds of one step of one rank.

    The step is compute + exposed communication (without compute) + copies (without the two) + idle. Hidden
    communication is the part of compute under which something communicates.
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
    """Communications of one collective under one label, in one step of one rank."""

    # For example ``nccl all_reduce``.
    collective: str
    # ``ovpatch::<feature>::<phase>``, "" outside of ovpatch's features.
    phase: str
    # Number of communications.
    calls: int
    # Nanoseconds under compute.
    hidden: int
    # Nanoseconds without compute.
    exposed: int


@dataclass(frozen=True)
class TimelineRun:
    """One variant: the tracks of all its ranks, over their common steps."""

    # ``stock``, ``patched`` or another name.
    name: str
    # Tracks by rank.
    ranks: tuple[RankTracks, ...]
    # Numbers of the steps, in order.
    steps: tuple[int, ...]
    # Number of the step to show, the nearest to the medians.
    shown: int
    # Numbers of the steps of the medians; of two runs the steps that both have.
    counted: tuple[int, ...]

    @property
    def remarks(self) -> list[str]:
        """Remarks about how the traces were read, each once."""
        return list(dict.fromkeys(remark for tracks in self.ranks for remark in tracks.remarks))

    def get_parts(self, tracks: RankTracks, number: int) -> StepParts:
        """Return the parts of a step of a rank."""
        return split_step(tracks, get_step(tracks, number))

    def list_worst_parts(self) -> list[StepParts]:
        """Return the parts of each counted step on the rank with most exposed communication."""
        return [self.find_worst_rank(number)[1] for number in self.counted]

    @property
    def median_exposed(self) -> int:
        """Nanoseconds of exposed communication on the rank with most, the median of the counted steps."""
        return int(median(parts.exposed for parts in self.list_worst_parts()))

    @property
    def median_step(self) -> int:
        """Nanoseconds of a step on the rank with most exposed communication, the median of the counted steps."""
        return int(median(parts.step for parts in self.list_worst_parts()))

    @property
    def counted_in_words(self) -> str:
        """The counted steps for the user."""
        first, last = self.counted[0], self.counted[-1]
        return f"step {first}" if first == last else f"the median of steps {first} to {last}"

    def find_worst_rank(self, number: int) -> tuple[RankTracks, StepParts]:
        """Return the rank with most exposed communication in a step, and its parts."""
        return max(
            ((tracks, self.get_parts(tracks, number)) for tracks in self.ranks),
            key=lambda pair: pair[1].exposed,
        )


def make_run(name: str, ranks: Sequence[RankTracks]) -> TimelineRun:
    """Return a variant from the tracks of its ranks; raise TraceError if they have no common step."""
    if not ranks:
        raise TraceError(f"{name}: there is no trace. Give at least one.")
    common = set.intersection(*({step.number for step in tracks.steps} for tracks in ranks))
    if not common:
        had = "; ".join(
            f"rank {tracks.rank}: {[step.number for step in tracks.steps]}" for tracks in ranks
        )
        raise TraceError(
            f"{name}: no step is in the traces of all ranks ({had}). Record the same steps on all "
            "of them."
        )
    steps = tuple(sorted(common))
    run = TimelineRun(name, tuple(ranks), steps, steps[0], steps)
    return replace(run, shown=_choose_shown([run]))


def align_runs(runs: Sequence[TimelineRun]) -> list[TimelineRun]:
    """Return the runs with medians over the steps that all of them have, and with one step to show.

    The script does different work in each step, so medians over different steps would compare different work. Runs
    without a common step, as traces of different origin, stay as they are.
    """
    common = set.intersection(*(set(run.steps) for run in runs))
    if not common:
        return list(runs)
    aligned = [replace(run, counted=tuple(sorted(common))) for run in runs]
    shown = _choose_shown(aligned)
    return [replace(run, shown=shown) for run in aligned]


def _choose_shown(runs: Sequence[TimelineRun]) -> int:
    """Return the counted step whose exposed communication is the nearest to the medians of all runs."""
    distances = dict.fromkeys(runs[0].counted, 0.0)
    for run in runs:
        exposed = [parts.exposed for parts in run.list_worst_parts()]
        middle = median(exposed)
        for number, time in zip(run.counted, exposed, strict=True):
            distances[number] += abs(time - middle) / max(middle, 1)
    return min(distances, key=distances.__getitem__)


def split_step(tracks: RankTracks, step: Step) -> StepParts:
    """Return the parts of a step."""
    compute, communication, copies = (
        part.clip(step.start, step.end)
        for part in (tracks.compute, tracks.communication, tracks.copies)
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

    Time in which several communications run belongs to the one that began first, so that groups add up to the step's
    communication: receives that wait at once for one sender would otherwise count its delay several times.
    """
    members: dict[tuple[str, str], list[Span]] = defaultdict(list)
    covered = step.start
    for communication in sorted(tracks.communications, key=lambda found: (found.start, found.end)):
        if communication.start < step.end and communication.end > step.start:
            end = min(communication.end, step.end)
            members[communication.collective, communication.phase].append(
                (max(communication.start, covered), end)
            )
            covered = max(covered, end)
    groups = []
    for (collective, phase), spans in members.items():
        busy = Intervals.union_of(spans)
        hidden = (busy & tracks.compute).total
        groups.append(CollectiveGroup(collective, phase, len(spans), hidden, busy.total - hidden))
    return tuple(sorted(groups, key=lambda group: (-group.exposed, -group.hidden)))


class Efficiency(NamedTuple):
    """Overlap efficiency: 1 - exposed, patched / exposed, stock. 1: all is hidden. 0: no gain."""

    median: float
    # Lowest over the counted steps of both runs.
    low: float
    # Highest over the counted steps of both runs.
    high: float


def compute_efficiency(stock: TimelineRun, patched: TimelineRun) -> Efficiency | None:
    """Return overlap efficiency; None for pipelines, for fewer than :data:`MIN_STEPS`, or if stock exposes nothing.

    A pipeline's ranks mostly wait for each other, in receives that look like transfers in a trace.
    """
    before, after = (
        [parts.exposed for parts in run.list_worst_parts()] for run in (stock, patched)
    )
    if (
        has_pipeline([stock, patched])
        or min(len(before), len(after)) < MIN_STEPS
        or not min(before)
    ):
        return None
    middle = 1 - median(after) / median(before)
    return Efficiency(middle, 1 - max(after) / min(before), 1 - min(after) / max(before))


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
        **parts_to_json(tracks, step),
    }


_HEADS = ("run", "rank", "step", "compute", "hidden", "exposed", "copies", "idle", "hidden share")
_PIPELINE_HEADS = ("run", "rank", "F", "B", "W", "other compute", "waits", "bubble")
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
    pipeline = "Milliseconds of a step in the pipeline, by rank"
    tables = [
        *(
            [render_table(pipeline, _PIPELINE_HEADS, _pipeline_rows(runs), colour=colour)]
            * has_pipeline(runs)
        ),
        render_table("Milliseconds of a step, by rank", _HEADS, _rows(runs), colour=colour),
        render_table(
            "Communication of the rank that exposes most",
            _GROUP_HEADS,
            _group_rows(runs),
            colour=colour,
        ),
    ]
    return "\n".join([*(table.rstrip() for table in tables), *list_conclusions(runs)])


def _rows(runs: Sequence[TimelineRun]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        worst, _ = run.find_worst_rank(run.shown)
        for tracks in run.ranks:
            mark = " <- most exposed" if tracks is worst and len(run.ranks) > 1 else ""
            parts = run.get_parts(tracks, run.shown)
            times = (
                parts.step,
                parts.compute,
                parts.hidden,
                parts.exposed,
                parts.copies,
                parts.idle,
            )
            yield (
                run.name,
                f"{tracks.rank}{mark}",
                *map(format_ms, times),
                format_percent(parts.hidden_share),
            )


def _pipeline_rows(runs: Sequence[TimelineRun]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        for tracks, parts in list_parts(run, run.shown):
            times = (parts.F, parts.B, parts.W, parts.other, parts.wait)
            yield run.name, str(tracks.rank), *map(format_ms, times), format_percent(parts.bubble)


def _group_rows(runs: Sequence[TimelineRun]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        tracks, _ = run.find_worst_rank(run.shown)
        for group in group_communications(tracks, get_step(tracks, run.shown)):
            times = format_ms(group.hidden), format_ms(group.exposed)
            yield run.name, group.collective, group.phase or "unlabelled", str(group.calls), *times


def list_conclusions(runs: Sequence[TimelineRun]) -> Iterator[str]:
    """Yield the conclusions, a line each, with the definition of each ratio."""
    is_pipeline = has_pipeline(runs)
    for run in runs:
        yield f"{run.name}: {_exposure(run)}"
        if has_pipeline([run]):
            bubble, several = format_percent(measure_bubble(run)), len(run.counted) > 1
            where = (
                f"a step is bubble, {run.counted_in_words}"
                if several
                else f"{run.counted_in_words} is bubble"
            )
            yield f"{run.name}: {bubble} of {where}, the mean of ranks"
    if len(runs) == 2 and runs[0].counted != runs[1].counted:
        yield "The runs have no step in common, so medians are over different steps."
    if len(runs) == 2 and not is_pipeline:
        yield f"overlap efficiency: {_efficiency(*runs)} (1 - exposed {runs[1].name} / exposed {runs[0].name})"
    yield "hidden share: communication under compute / all communication; compute + exposed + copies + idle = step"
    yield "Where the time goes, not how fast it is: compare speed without a profiler."


def _efficiency(stock: TimelineRun, patched: TimelineRun) -> str:
    found = compute_efficiency(stock, patched)
    if found is not None:
        if found.high < 0:
            return "more exposed than stock in all recorded steps"
        middle, low, high = map(_format_efficiency, found)
        return f"{middle}, {low} to {high} over the recorded steps"
    fewest = min(len(stock.counted), len(patched.counted))
    if fewest < MIN_STEPS:
        return f"too few steps to judge ({fewest}; record {MIN_STEPS} or more by --steps)"
    return "n/a, stock exposes nothing"


def _format_efficiency(share: float) -> str:
    return f"{share:.0%}" if share >= 0 else "more exposed than stock"


def _exposure(run: TimelineRun) -> str:
    tracks, _ = run.find_worst_rank(run.shown)
    every = run.list_worst_parts()
    exposed = [parts.exposed for parts in every]
    first, last = run.counted[0], run.counted[-1]
    least, most = format_ms(min(exposed)), format_ms(max(exposed))
    spread = f"; {least} to {most} ms over steps {first} to {last}" if len(exposed) > 1 else ""
    shares = [parts.hidden_share for parts in every if parts.hidden_share is not None]
    if not shares:
        return f"no communication in {f'step {first}' if first == last else f'steps {first} to {last}'}"
    where = (
        f"rank {tracks.rank}, {run.counted_in_words}" if len(exposed) == 1 else run.counted_in_words
    )
    return (
        f"{format_ms(run.median_exposed)} of {format_ms(run.median_step)} ms are exposed "
        "communication "
        f"({where}); hidden share {format_percent(median(shares))}{spread}"
    )


#: Share of a step that recording may cost.
LIMIT: Final = 0.03


@dataclass(frozen=True)
class Cost:
    """The cost of recording: seconds per step of the slowest rank, with and without it."""

    # The time of the recorded steps.
    recorded: float
    # The time of the steps before and after the recorded ones.
    unrecorded: float
    # The numbers of recorded and of unrecorded steps.
    counts: tuple[int, int]
    # Shortest and longest unrecorded step, on a GPU of blocks of steps.
    spread: tuple[float, float]

    @property
    def notable(self) -> bool:
        """True if the cost exceeds :data:`LIMIT` and the spread of the steps."""
        return self.share > LIMIT and self.recorded > self.spread[1]

    @property
    def share(self) -> float:
        """Cost as a share of an unrecorded step."""
        return self.recorded / self.unrecorded - 1

    def __str__(self) -> str:
        shortest, longest = (f"{time * 1e3:.1f}" for time in self.spread)
        steps = [f"{count} step{'s' if count > 1 else ''}" for count in self.counts]
        recorded = f"{self.recorded * 1e3:.1f} ms recorded ({steps[0]})"
        unrecorded = (
            f"{self.unrecorded * 1e3:.1f} ms beside ({steps[1]}, {shortest} to {longest} ms)"
        )
        return f"recording cost {self.share:+.1%}: a step took {recorded}, {unrecorded}"


@dataclass(frozen=True)
class Recording:
    """One recorded variant."""

    # The tracks of the variant.
    run: TimelineRun
    # Cost of recording; None without unrecorded steps.
    cost: Cost | None = None
    # Missing steps and ranks, and other remarks.
    remarks: tuple[str, ...] = ()


def read_recording(
    name: str, folder: Path, wanted: range, also: re.Pattern[str] | None = None
) -> Recording:
    """Read the recording of a variant from the folder of its processes' files; raise TraceError if there is none.

    ``wanted`` are the requested steps, and ``also`` is the user's pattern of further communication kernels.
    """
    facts = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("recording-rank*.json"))
    ]
    traces = sorted(folder.glob("trace-rank*.json*"))
    if not traces:
        raise TraceError(f"{name}: nothing was recorded. {_why(facts, wanted)}")
    run = make_run(name, read_all_ranks(traces, also))
    cost = measure_cost(facts)
    remarks = [
        *_missing(facts, run, wanted, describe_node(folder)),
        *run.remarks,
        *([_DEAR.format(cost.share)] if cost and cost.notable else []),
    ]
    return Recording(run, cost, tuple(f"{name}: {text}" for text in remarks))


_DEAR: Final = (
    "recording cost {:.1%} of a step, so that short operators look longer than they are. Trust "
    "shares more than times, "
    "or record a step with more work in it."
)


def _why(facts: Sequence[Mapping[str, Any]], wanted: range) -> str:
    yielded = next((fact["yielded"] for fact in facts if fact["yielded"]), "")
    if yielded:
        return f"{yielded[:1].upper()}{yielded[1:]}, and ours gave way. Choose other steps with --step, or turn it off."
    if not facts:
        return (
            "No process made a step of an optimizer of torch.optim. Look with `ovpatch run -- …` "
            "whether the command's "
            "processes import torch, and whether ovpatch is installed for their Python."
        )
    last = max(fact["last"] for fact in facts)
    return (
        f"The command ended after step {last}, and step {wanted[0]} was requested. Lower "
        "--step, or let it run longer."
    )


def _missing(
    facts: Sequence[Mapping[str, Any]], run: TimelineRun, wanted: range, node: str
) -> Iterator[str]:
    if list(run.steps) != list(wanted):
        had = f"{run.steps[0]} to {run.steps[-1]}" if len(run.steps) > 1 else f"{run.steps[0]}"
        yield f"steps {wanted[0]} to {wanted[-1]} were requested, recorded was {had}: the command ended earlier"
    if node:
        yield node
        return
    there = {tracks.rank for tracks in run.ranks}
    yielded = {fact["rank"]: fact["yielded"] for fact in facts if fact["yielded"]}
    for rank in range(max((fact["world"] for fact in facts), default=0)):
        if rank not in there:
            yield f"rank {rank} left no trace: {yielded.get(rank, 'it took none of these steps, or was killed')}"


def measure_cost(facts: Sequence[Mapping[str, Any]]) -> Cost | None:
    """Compare recorded steps with as many before and after, without the steps between, in which the recorder works.

    A host runs ahead of its GPU, so single steps by its clock mean nothing: the means of blocks between
    synchronisations count, on each rank. On a CPU the median counts, which tolerates one odd step.
    """
    recorded = {number for fact in facts for number in fact["recorded"]}
    if not recorded:
        return None
    on_gpu = facts[0]["device"] == "gpu"
    middle: Callable[[list[float]], float] = fmean if on_gpu else median
    first, last, count = min(recorded), max(recorded), max(recorded) - min(recorded) + 1
    blocks = range(first - 1 - count, first - 1), range(last + 2, last + 2 + count)
    ranks = []
    singles: list[float] = []
    for fact in facts:
        seconds = {int(number): duration / 1e9 for number, duration in fact["durations"].items()}
        inside = [time for number, time in seconds.items() if number in recorded]
        around = [[seconds[number] for number in block if number in seconds] for block in blocks]
        outside = [time for times in around for time in times]
        if inside and outside:
            ranks.append((inside, outside))
            singles += [fmean(times) for times in around if times] if on_gpu else outside
    if not ranks:
        return None
    return Cost(
        max(middle(inside) for inside, _ in ranks),
        max(middle(outside) for _, outside in ranks),
        (max(len(inside) for inside, _ in ranks), max(len(outside) for _, outside in ranks)),
        (min(singles), max(singles)),
    )

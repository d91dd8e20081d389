"""The recording of an arm: its traces, missing ranks, and the cost of recording."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from ovpatch.insight.timeline.summary import TimelineRun, make_run
from ovpatch.insight.timeline.trace import TraceError
from ovpatch.insight.timeline.tracks import read_all_ranks

#: Share of a step that recording may cost.
LIMIT: Final = 0.03


@dataclass(frozen=True)
class Cost:
    """The cost of recording: seconds per step of the slowest rank, with and without it."""

    recorded: float  # of the recorded steps
    beside: float  # of the steps before and after them
    counts: tuple[int, int]  # numbers of steps of the two
    # Shortest and longest step beside, on a GPU block of steps; smaller differences mean nothing.
    spread: tuple[float, float]

    @property
    def notable(self) -> bool:
        """Whether the cost exceeds :data:`LIMIT` and the spread of the steps."""
        return self.share > LIMIT and self.recorded > self.spread[1]

    @property
    def share(self) -> float:
        """Cost as a share of an unrecorded step."""
        return self.recorded / self.beside - 1

    def __str__(self) -> str:
        shortest, longest = (f"{time * 1e3:.1f}" for time in self.spread)
        recorded = f"{self.recorded * 1e3:.1f} ms recorded ({self.counts[0]} steps)"
        beside = f"{self.beside * 1e3:.1f} ms beside ({self.counts[1]} steps, {shortest} to {longest} ms)"
        return f"recording cost {self.share:+.1%}: a step took {recorded}, {beside}"


@dataclass(frozen=True)
class Recording:
    """One recorded arm."""

    run: TimelineRun  # its tracks
    cost: Cost | None = None  # cost of recording; None without steps beside the recorded ones
    remarks: tuple[str, ...] = ()  # missing steps and ranks, and other remarks


def read_recording(name: str, folder: Path, wanted: range, also: re.Pattern[str] | None = None) -> Recording:
    """Read the recording of an arm from the folder of its processes' files.

    ``wanted`` are the requested steps, and ``also`` is the user's pattern of further communication kernels.

    Raises:
        TraceError: Nothing was recorded; the text has the reason and the remedy.
    """
    facts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("recording-rank*.json"))]
    traces = sorted(folder.glob("trace-rank*.json*"))
    if not traces:
        raise TraceError(f"{name}: nothing was recorded. {_why(facts, wanted)}")
    run = make_run(name, read_all_ranks(traces, also))
    cost = measure_cost(facts)
    remarks = [
        *_missing(facts, run, wanted),
        *run.remarks,
        *([_DEAR.format(cost.share)] if cost and cost.notable else []),
    ]
    return Recording(run, cost, tuple(f"{name}: {text}" for text in remarks))


_DEAR: Final = (
    "recording cost {:.1%} of a step, so that short operators look longer than they are. Trust shares more than times, "
    "or record a step with more work in it."
)


def _why(facts: Sequence[Mapping[str, Any]], wanted: range) -> str:
    yielded = next((one["yielded"] for one in facts if one["yielded"]), "")
    if yielded:
        return f"{yielded[:1].upper()}{yielded[1:]}, and ours gave way. Choose other steps with --step, or turn it off."
    if not facts:
        return (
            "No process made a step of an optimizer of torch.optim. Is torch imported by the command's processes, and "
            "is ovpatch installed for their Python? `ovpatch run -- …` tells."
        )
    last = max(one["last"] for one in facts)
    return (
        f"The command ended after step {last}, and step {wanted[0]} was asked for. Lower --step, or let it run longer."
    )


def _missing(facts: Sequence[Mapping[str, Any]], run: TimelineRun, wanted: range) -> Iterator[str]:
    if list(run.steps) != list(wanted):
        had = f"{run.steps[0]} to {run.steps[-1]}" if len(run.steps) > 1 else f"{run.steps[0]}"
        yield f"steps {wanted[0]} to {wanted[-1]} were asked for, recorded was {had}: the command ended earlier"
    there = {tracks.rank for tracks in run.ranks}
    yielded = {one["rank"]: one["yielded"] for one in facts if one["yielded"]}
    for rank in range(max((one["world"] for one in facts), default=0)):
        if rank not in there:
            yield f"rank {rank} left no trace: {yielded.get(rank, 'it took none of these steps, or was killed')}"


def measure_cost(facts: Sequence[Mapping[str, Any]]) -> Cost | None:
    """Compare recorded steps with as many before and after, without the steps between, in which the recorder works.

    A host runs ahead of its GPU, so single steps by its clock mean nothing: the means of blocks between
    synchronisations count, on each rank. On a CPU the median counts, which tolerates one odd step.
    """
    recorded = {number for one in facts for number in one["recorded"]}
    if not recorded:
        return None
    on_gpu = facts[0]["device"] == "gpu"
    middle: Callable[[list[float]], float] = fmean if on_gpu else median
    first, last, count = min(recorded), max(recorded), max(recorded) - min(recorded) + 1
    blocks = range(first - 1 - count, first - 1), range(last + 2, last + 2 + count)
    ranks = []
    singles: list[float] = []
    for one in facts:
        seconds = {int(number): duration / 1e9 for number, duration in one["durations"].items()}
        inside = [time for number, time in seconds.items() if number in recorded]
        around = [[seconds[number] for number in block if number in seconds] for block in blocks]
        beside = [time for times in around for time in times]
        if inside and beside:
            ranks.append((inside, beside))
            singles += [fmean(times) for times in around if times] if on_gpu else beside
    if not ranks:
        return None
    return Cost(
        max(middle(inside) for inside, _ in ranks),
        max(middle(beside) for _, beside in ranks),
        (max(len(inside) for inside, _ in ranks), max(len(beside) for _, beside in ranks)),
        (min(singles), max(singles)),
    )

"""The result as text: a row a rank, and a row for each collective and label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ovpatch.insight.timeline.lanes import step_of
from ovpatch.insight.timeline.summary import FEWEST_STEPS, Parts, Run, efficiency, groups_of
from ovpatch.reports.reporting import render

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
        render("Milliseconds of a step, by rank", _HEADS, _rows(runs), colour=colour),
        render("Communication of the rank that exposes most", _GROUP_HEADS, _group_rows(runs), colour=colour),
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

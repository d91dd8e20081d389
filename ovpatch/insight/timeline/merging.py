"""One trace of all ranks and arms, for Perfetto: the recorded events on common clocks, and tracks for what was exposed.

[Note: common clocks] The first steps of all arms begin at the same time, so that arms that ran one after the other
stand above each other. Nothing is before zero: Perfetto drops such events, and on a GPU all launches of the first step
may come before it. Within an arm ranks keep their distance by the clocks of their machines, unless these are more than
a step apart: several machines are together only as well as their clocks are.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from ovpatch.insight.intervals import Intervals, Span
from ovpatch.insight.timeline.lanes import Lanes, step_of
from ovpatch.insight.timeline.summary import Run
from ovpatch.insight.timeline.trace import MERGED, base_of, load, nanoseconds

_Json = dict[str, Any]
#: Phases of events that belong together by an id, which is unique in one trace only.
_WITH_ID: Final = frozenset("stfbenOND")


def write(runs: Sequence[Run], path: Path) -> None:
    """Write the merged trace, packed by gzip. One recorded trace at a time is in memory.

    Args:
        runs: The arms.
        path: Ends with ``.json.gz``.
    """
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(f'{{"displayTimeUnit": "ms", "{MERGED}": true, "traceEvents": [')
        separator = "\n"
        for event in _events(runs):
            file.write(separator + json.dumps(event, default=_number))
            separator = ",\n"
        file.write("\n]}\n")


def _number(value: object) -> float:
    """Numbers that were read exactly, other than times, are written as any."""
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"a trace cannot hold a {type(value).__name__}")


def _events(runs: Sequence[Run]) -> Iterator[_Json]:
    names = _Numbers()
    starts = [min(step_of(lanes, run.steps[0]).start for lanes in run.ranks) for run in runs]
    lead = max(start - lanes.first for run, start in zip(runs, starts, strict=True) for lanes in run.ranks)
    for run, start in zip(runs, starts, strict=True):
        zero = start - max(lead, 0)
        for lanes in run.ranks:
            who = f"{run.name} rank {lanes.rank}"
            yield from _tracks(run, lanes, zero, names, who)
            yield from _recorded(lanes, zero, names, who)


class _Numbers:
    """Numbers of processes, threads and ids that are unique in the merged trace; threads are counted with processes."""

    def __init__(self) -> None:
        self._given: dict[tuple[object, ...], int] = {}

    def of(self, *what: object) -> int:
        return self._given.setdefault(what, len(self._given) + 1)


def _tracks(run: Run, lanes: Lanes, zero: int, names: _Numbers, who: str) -> Iterator[_Json]:
    """Yield our own tracks of a rank, which stand above what was recorded."""
    pid = names.of(who, "ovpatch")
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"{who}: summary"}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    start, end = (step_of(lanes, run.steps[0]).start, step_of(lanes, run.steps[-1]).end)
    busy = lanes.compute | lanes.communication | lanes.copies
    steps = [(f"step {number}", Intervals.of([_span(lanes, number)])) for number in run.steps]
    tracks = [
        ("steps", steps),
        ("exposed", [("exposed communication", lanes.exposed)]),
        ("hidden", [("hidden communication", lanes.communication & lanes.compute)]),
        ("idle", [("idle", busy.gaps(start, end))]),
    ]
    for title, slices in tracks:
        tid = names.of(who, "ovpatch", title)
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for name, intervals in slices:
            for one in intervals.within(start, end):
                times = {"ts": _microseconds(one[0] - zero), "dur": _microseconds(one[1] - one[0])}
                yield {"ph": "X", "cat": "ovpatch", "name": name, "pid": pid, "tid": tid, **times}


def _span(lanes: Lanes, number: int) -> Span:
    step = step_of(lanes, number)
    return step.start, step.end


def _recorded(lanes: Lanes, zero: int, names: _Numbers, who: str) -> Iterator[_Json]:
    """Yield the recorded events of a rank with numbers and times of the merged trace."""
    data = load(lanes.path)
    base = base_of(data) + lanes.moved
    for event in data["traceEvents"]:
        moved = {**event, "pid": names.of(who, event.get("pid"))}
        moved["tid"] = names.of(who, event.get("pid"), event.get("tid")) if event.get("tid") else 0
        if "ts" in event:
            moved["ts"] = _microseconds(base + nanoseconds(event["ts"]) - zero)
        if "id" in event and event.get("ph") in _WITH_ID:
            moved["id"] = names.of(who, "id", event.get("cat"), event["id"])
        if event.get("ph") == "M":
            moved.pop("ts", None)
            moved["args"] = _metadata(event, moved["pid"], who)
        yield moved


def _metadata(event: _Json, pid: int, who: str) -> _Json:
    """Names say whose they are, and processes are sorted by rank, not by their old numbers."""
    args = dict(event.get("args") or {})
    if event.get("name") == "process_name":
        args["name"] = f"{who}: {args.get('name', '')}"
    if event.get("name") == "process_sort_index":
        args["sort_index"] = pid
    return args


def _microseconds(ns: int) -> float:
    """Exact here, since it is counted from a near zero."""
    return ns / 1000

"""From a trace to the lanes of its rank."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from ovpatch.insight.timeline.trace import (
    DEVICE,
    Event,
    Intervals,
    Kind,
    Launches,
    Span,
    Trace,
    TraceError,
    collective_of,
    collective_on_cpu,
    compute,
    kind_of,
    labels_on_cpu,
    read,
)

# What one rank did, in the terms of this tool: the lanes from which everything else is computed and drawn.


@dataclass(frozen=True)
class Communication:
    """One kernel, copy or collective that talks to other ranks.

    Attributes:
        collective: For example ``nccl all_reduce``.
        label: What launched it, ``ovpatch::<feature>::<phase> (<name>)``; "" if that was none of ovpatch's features.
        start: Nanoseconds since the epoch.
        end: Likewise.
    """

    collective: str
    label: str
    start: int
    end: int

    @property
    def phase(self) -> str:
        """The label without the name of what it was done to."""
        return self.label.partition(" (")[0]


@dataclass(frozen=True)
class Step:
    """A training step, as a window of the device's time in nanoseconds since the epoch."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Lanes:
    """One rank of one run.

    Attributes:
        rank: Its number.
        device: ``cpu``, or ``gpu`` and its number.
        host: Name of the machine.
        path: The trace it was read from.
        compute: When the device computed.
        copies: When it copied from or to the host.
        communications: What talked to other ranks, by start.
        steps: The steps that are whole in the trace.
        first: When the first event of the trace was, nanoseconds since the epoch.
        remarks: What a reader should know about how it was read.
        moved: Nanoseconds by which all of these times are later than those in the trace.
    """

    rank: int
    device: str
    host: str
    path: Path
    compute: Intervals
    copies: Intervals
    communications: tuple[Communication, ...]
    steps: tuple[Step, ...]
    first: int
    remarks: tuple[str, ...] = ()
    moved: int = 0

    @property
    def communication(self) -> Intervals:
        """When the device communicated."""
        return union(self.communications)

    @property
    def exposed(self) -> Intervals:
        """When it communicated and did not compute."""
        return self.communication - self.compute


def move(lanes: Lanes, by: int, remark: str) -> Lanes:
    """Return a rank with all its times later by some nanoseconds."""
    return replace(
        lanes,
        compute=_moved(lanes.compute, by),
        copies=_moved(lanes.copies, by),
        communications=tuple(replace(one, start=one.start + by, end=one.end + by) for one in lanes.communications),
        steps=tuple(Step(step.number, step.start + by, step.end + by) for step in lanes.steps),
        first=lanes.first + by,
        remarks=(*lanes.remarks, remark),
        moved=lanes.moved + by,
    )


def _moved(intervals: Intervals, by: int) -> Intervals:
    return Intervals(tuple((start + by, end + by) for start, end in intervals))


def union(communications: Iterable[Communication]) -> Intervals:
    """Return when at least one of them ran."""
    return Intervals.of((one.start, one.end) for one in communications)


def step_of(lanes: Lanes, number: int) -> Step:
    """Return a step of a rank by its number."""
    return next(step for step in lanes.steps if step.number == number)


# Where steps begin and end: on the host by what the profiler noted, on a device by the work launched until then.
#
# [Note: borders on a device] A device lags behind its host. So a step of the device ends when it has finished the
# compute that was launched before the host's border, or at that border if it was idle by then. Communication does not
# move the border: what still runs then (a parameter gather under the next forward) is split between the two steps.

#: Our own mark of the end of a step, see ``recorder.BORDER``; not imported from there, where torch is needed.
_MARK: Final = re.compile(r"^ovpatch::timeline::border \((\d+)\)$")
_PROFILER_STEP: Final = re.compile(r"^ProfilerStep#?\s*(\d+)$")
_BEFORE: Final = -1  # earlier than every time of a trace
_OPTIMIZER_STEP: Final = re.compile(r"^Optimizer\.step#")


def steps_on_host(trace: Trace) -> tuple[tuple[Step, ...], str]:
    """Find the steps by the host's clock.

    Returns:
        The steps, none if there are no borders, and a remark on that, "" where the profiler was told of steps.
    """
    annotations = list(trace.of("user_annotation"))
    marks = [(int(found[1]), event.start) for event in annotations if (found := _MARK.match(event.name))]
    if marks:
        return tuple(Step(number, before, at) for (_, before), (number, at) in pairwise(marks)), ""
    marked = [(found, event) for event in annotations if (found := _PROFILER_STEP.match(event.name))]
    if marked:
        return tuple(Step(int(found[1]), event.start, event.end) for found, event in marked), ""
    optimizer = [event for event in annotations if _OPTIMIZER_STEP.match(event.name)]
    if optimizer:
        last = max(optimizer, key=lambda event: event.end).name
        ends = sorted(event.end for event in optimizer if event.name == last)
        if len(ends) > 1:
            steps = tuple(Step(number, *span) for number, span in enumerate(pairwise(ends), 1))
            return steps, f"no steps are marked: a step is from the end of one {last} to the next"
    return (), "no steps are marked: all of it counts as one step (call the profiler's step())"


def everything(events: Sequence[Event]) -> tuple[Step, ...]:
    """Return one step that holds all events; for a trace in which the host marked none."""
    return (Step(1, min(event.start for event in events), max(event.end for event in events)),)


def on_device(steps: Iterable[Step], compute: Sequence[tuple[int | None, Span]]) -> tuple[Step, ...]:
    """Move steps from the host's clock to a device's progress; see [Note: borders on a device].

    Args:
        steps: By the host.
        compute: When each piece of the device's compute was launched (None: before the trace), and its span.
    """
    ordered = sorted((_BEFORE if launched is None else launched, span[1]) for launched, span in compute)
    launches = [launched for launched, _ in ordered]
    finished = list(accumulate((end for _, end in ordered), max))

    def border(time: int) -> int:
        count = bisect_left(launches, time)
        return max(time, finished[count - 1]) if count else time

    return tuple(Step(step.number, border(step.start), border(step.end)) for step in steps)


def whole(steps: Iterable[Step], events: Sequence[Event]) -> tuple[Step, ...]:
    """Keep the steps in which anything happened at all."""
    spans = [(event.start, event.end) for event in events]
    return tuple(step for step in steps if any(start < step.end and end > step.start for start, end in spans))


def read_run(paths: Iterable[Path], also: re.Pattern[str] | None = None) -> tuple[Lanes, ...]:
    """Read the traces of all ranks of one run, one after the other, and return their lanes by rank.

    Args:
        paths: One file a rank.
        also: Kernels whose names it finds communicate, too.

    Raises:
        TraceError: A file cannot be used, or two are of one rank.
    """
    run: dict[int, Lanes] = {}
    paths = list(paths)
    for path in paths:
        trace = read(path)
        rank = trace.rank if trace.rank is not None else (0 if len(paths) == 1 else None)
        if rank is None:
            raise TraceError(f"{path} does not say its rank. Put it into the file's name: rank0.json, rank1.json, …")
        if rank in run:
            raise TraceError(f"{run[rank].path} and {path} are both of rank {rank}. Name traces of one run.")
        run[rank] = lanes_of(trace, rank, also)
    return _together([run[rank] for rank in sorted(run)])


def _together(run: Sequence[Lanes]) -> tuple[Lanes, ...]:
    """Put ranks above each other whose clocks are so far apart that not even their first common step is at one time."""
    common = set.intersection(*({step.number for step in lanes.steps} for lanes in run)) if run else set()
    if not common:
        return tuple(run)
    firsts = [step_of(lanes, min(common)) for lanes in run]
    if max(step.start for step in firsts) < min(step.end for step in firsts):
        return tuple(run)
    remark = f"the ranks' clocks differ by more than a step, so step {min(common)} was made to begin at once on all"
    return tuple(move(lanes, firsts[0].start - step.start, remark) for lanes, step in zip(run, firsts, strict=True))


def lanes_of(trace: Trace, rank: int, also: re.Pattern[str] | None = None) -> Lanes:
    """Classify a trace: by its device where there is one, else by its training thread."""
    on_device = list(trace.of(*DEVICE))
    return _of_device(trace, rank, on_device, also) if on_device else _of_cpu(trace, rank)


def _of_device(trace: Trace, rank: int, events: Sequence[Event], also: re.Pattern[str] | None) -> Lanes:
    device, mine, remarks = _busiest(events)
    launches = Launches(trace)
    kinds = [(kind_of(event, also), event) for event in mine]
    computing = [event for kind, event in kinds if kind is Kind.COMPUTE]
    steps, how = steps_on_host(trace)
    progress = [(launches.time_of(event), (event.start, event.end)) for event in computing]
    steps = on_device(steps, progress) if steps else everything(mine)
    return Lanes(
        rank,
        f"gpu {device}",
        trace.host,
        trace.path,
        _spans(computing),
        _spans(event for kind, event in kinds if kind is Kind.COPY),
        tuple(
            Communication(collective_of(event), launches.label_of(event), event.start, event.end)
            for kind, event in kinds
            if kind is Kind.COMMUNICATION
        ),
        whole(steps, mine),
        trace.first,
        (*remarks, *filter(None, [how])),
    )


def _busiest(events: Sequence[Event]) -> tuple[int | str, list[Event], list[str]]:
    """Return the device with most work, its events, and a remark if the process used others as well."""
    by_device: dict[int | str, list[Event]] = {}
    for event in events:
        by_device.setdefault(event.args.get("device", event.pid), []).append(event)
    device = max(by_device, key=lambda name: _spans(by_device[name]).total)
    others = sorted(str(name) for name in by_device if name != device)
    remark = f"the process used several devices: gpu {device} is shown, {', '.join(others)} not"
    return device, by_device[device], [remark] if others else []


def _of_cpu(trace: Trace, rank: int) -> Lanes:
    collectives = [event for event in trace.of("user_annotation") if collective_on_cpu(event)]
    labels = labels_on_cpu(trace, collectives)
    steps, how = steps_on_host(trace)
    return Lanes(
        rank,
        "cpu",
        trace.host,
        trace.path,
        compute(trace),
        Intervals(),
        tuple(
            Communication(collective_on_cpu(event), label, event.start, event.end)
            for event, label in zip(collectives, labels, strict=True)
        ),
        whole(steps or everything(trace.events), trace.events),
        trace.first,
        (how,) if how else (),
    )


def _spans(events: Iterable[Event]) -> Intervals:
    return Intervals.of((event.start, event.end) for event in events)

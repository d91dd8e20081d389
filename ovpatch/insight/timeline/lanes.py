"""What one rank did, in the terms of this tool: the lanes from which everything else is computed and drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ovpatch.insight.intervals import Intervals


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

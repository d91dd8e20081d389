"""The tracks of a rank: its compute, copies, communication and steps, from its trace."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from ovpatch.insight.timeline.pipelines import PipelineAction, find_actions
from ovpatch.insight.timeline.trace import (
    DEVICE,
    DeviceTimeKind,
    Intervals,
    Launches,
    Span,
    Trace,
    TraceError,
    TraceEvent,
    classify_event,
    find_cpu_compute,
    find_cpu_labels,
    find_training_thread,
    name_collective,
    name_cpu_collective,
    read_trace,
)


@dataclass(frozen=True)
class Communication:
    """One kernel, copy or collective that communicates with other ranks."""

    # For example ``nccl all_reduce``.
    collective: str
    # Label of its launch, ``ovpatch::<feature>::<phase> (<name>)``; "" outside of ovpatch's
    # features.
    label: str
    # Nanoseconds since the epoch.
    start: int
    end: int

    @property
    def phase(self) -> str:
        """The label without the name in parentheses."""
        return self.label.partition(" (")[0]


@dataclass(frozen=True)
class Step:
    """A training step, as a window of the device's time in nanoseconds since the epoch."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class RankTracks:
    """One rank of one run."""

    # Number of the rank.
    rank: int
    # ``cpu``, or ``gpu`` and its number.
    device: str
    # Name of the machine.
    host: str
    # File of the trace.
    path: Path
    # Compute time of the device.
    compute: Intervals
    # Time of copies from and to the host.
    copies: Intervals
    # Communications with other ranks, by start.
    communications: tuple[Communication, ...]
    # The complete steps of the trace.
    steps: tuple[Step, ...]
    # Start of the first event of the trace, nanoseconds since the epoch.
    first: int
    # Remarks about how the trace was read.
    remarks: tuple[str, ...] = ()
    # Nanoseconds by which these times are later than those in the trace.
    moved: int = 0
    # Computations of a pipeline, by start.
    actions: tuple[PipelineAction, ...] = ()

    @property
    def communication(self) -> Intervals:
        """Communication time of the device."""
        return merge_spans(self.communications)

    @property
    def exposed(self) -> Intervals:
        """Communication time without compute."""
        return self.communication - self.compute


def shift_tracks(tracks: RankTracks, by: int, remark: str) -> RankTracks:
    """Return the tracks with all times later by some nanoseconds."""
    return replace(
        tracks,
        compute=_moved(tracks.compute, by),
        copies=_moved(tracks.copies, by),
        communications=tuple(
            replace(span, start=span.start + by, end=span.end + by)
            for span in tracks.communications
        ),
        steps=tuple(Step(step.number, step.start + by, step.end + by) for step in tracks.steps),
        first=tracks.first + by,
        remarks=(*tracks.remarks, remark),
        moved=tracks.moved + by,
        actions=tuple(
            replace(span, start=span.start + by, end=span.end + by) for span in tracks.actions
        ),
    )


def _moved(intervals: Intervals, by: int) -> Intervals:
    return Intervals(tuple((start + by, end + by) for start, end in intervals))


def merge_spans(spans: Iterable[Communication | TraceEvent]) -> Intervals:
    """Return the time in which at least one of them runs."""
    return Intervals.union_of((span.start, span.end) for span in spans)


def get_step(tracks: RankTracks, number: int) -> Step:
    """Return a step of a rank by its number."""
    return next(step for step in tracks.steps if step.number == number)


#: ovpatch's mark of the end of a step, ``timeline_worker.BORDER``; that module needs torch and is not imported here.
_MARK: Final = re.compile(r"^ovpatch::timeline::border \((\d+)\)$")
_PROFILER_STEP: Final = re.compile(r"^ProfilerStep#?\s*(\d+)$")
# A time that is earlier than all times of a trace.
_BEFORE: Final = -1
_OPTIMIZER_STEP: Final = re.compile(r"^Optimizer\.step#")


def find_host_steps(trace: Trace) -> tuple[tuple[Step, ...], str]:
    """Return the steps by the host's clock, none without boundaries, and a remark, "" if steps are marked."""
    annotations = list(trace.select_events("user_annotation"))
    marks = [
        (int(found[1]), event.start) for event in annotations if (found := _MARK.match(event.name))
    ]
    if marks:
        return tuple(Step(number, before, at) for (_, before), (number, at) in pairwise(marks)), ""
    marked = [
        (found, event) for event in annotations if (found := _PROFILER_STEP.match(event.name))
    ]
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


def make_single_step(events: Sequence[TraceEvent]) -> tuple[Step, ...]:
    """Return one step of all events, for a trace without boundaries."""
    return (Step(1, min(event.start for event in events), max(event.end for event in events)),)


def move_to_device(
    steps: Iterable[Step], compute: Sequence[tuple[int | None, Span]]
) -> tuple[Step, ...]:
    """Move steps from the host's clock to a device's progress.

    A device is later than its host. Its step ends when it has finished the compute that was
    launched before the host's boundary, or at it if the device is idle by then. Communication does
    not move the boundary:
    what still runs then, such as a parameter all-gather under the next forward, is split between the two steps.

    ``compute`` has the launch time (None: before the trace) and the span of each piece of the device's compute.
    """
    ordered = sorted(
        (_BEFORE if launched is None else launched, span[1]) for launched, span in compute
    )
    launches = [launched for launched, _ in ordered]
    finished = list(accumulate((end for _, end in ordered), max))

    def border(time: int) -> int:
        count = bisect_left(launches, time)
        return max(time, finished[count - 1]) if count else time

    return tuple(Step(step.number, border(step.start), border(step.end)) for step in steps)


def drop_empty_steps(steps: Iterable[Step], events: Sequence[TraceEvent]) -> tuple[Step, ...]:
    """Return the steps with at least one event."""
    spans = [(event.start, event.end) for event in events]
    return tuple(
        step for step in steps if any(start < step.end and end > step.start for start, end in spans)
    )


def read_all_ranks(
    paths: Iterable[Path], also: re.Pattern[str] | None = None
) -> tuple[RankTracks, ...]:
    """Return the tracks of all ranks of one run; raise TraceError if a file cannot be used, or two are of one rank.

    ``also`` is the user's pattern of further communication kernels.
    """
    run: dict[int, RankTracks] = {}
    paths = list(paths)
    for path in paths:
        trace = read_trace(path)
        rank = trace.rank if trace.rank is not None else (0 if len(paths) == 1 else None)
        if rank is None:
            raise TraceError(
                f"{path} does not say its rank. Put it into the file's name: rank0.json, "
                "rank1.json, …"
            )
        if rank in run:
            raise TraceError(
                f"{run[rank].path} and {path} are both of rank {rank}. Name traces of one run."
            )
        run[rank] = build_tracks(trace, rank, also)
    return _align_ranks([run[rank] for rank in sorted(run)])


def _align_ranks(run: Sequence[RankTracks]) -> tuple[RankTracks, ...]:
    """Align the ranks' first common step if their clocks are so far apart that it does not overlap on all."""
    common = (
        set.intersection(*({step.number for step in tracks.steps} for tracks in run))
        if run
        else set()
    )
    if not common:
        return tuple(run)
    firsts = [get_step(tracks, min(common)) for tracks in run]
    if max(step.start for step in firsts) < min(step.end for step in firsts):
        return tuple(run)
    remark = f"the ranks' clocks differ by more than a step, so step {min(common)} was made to begin at once on all"
    return tuple(
        shift_tracks(tracks, firsts[0].start - step.start, remark)
        for tracks, step in zip(run, firsts, strict=True)
    )


def build_tracks(trace: Trace, rank: int, also: re.Pattern[str] | None = None) -> RankTracks:
    """Return the tracks of a trace: of its device if there is one, else of its training thread."""
    on_device = list(trace.select_events(*DEVICE))
    steps, how = find_host_steps(trace)
    remarks, nothing = (how,) if how else (), Intervals()
    tracks = RankTracks(
        rank, "cpu", trace.host, trace.path, nothing, nothing, (), steps, trace.first, remarks
    )
    return _add_device(tracks, trace, on_device, also) if on_device else _add_cpu(tracks, trace)


def _add_device(
    tracks: RankTracks, trace: Trace, events: Sequence[TraceEvent], also: re.Pattern[str] | None
) -> RankTracks:
    device, mine, remarks = _busiest(events)
    launches = Launches(trace)
    kinds = [(classify_event(event, also), event) for event in mine]
    computing = [event for kind, event in kinds if kind is DeviceTimeKind.COMPUTE]
    progress = [(launches.find_launch_time(event), (event.start, event.end)) for event in computing]
    steps = move_to_device(tracks.steps, progress) if tracks.steps else make_single_step(mine)
    return replace(
        tracks,
        device=f"gpu {device}",
        compute=merge_spans(computing),
        copies=merge_spans(event for kind, event in kinds if kind is DeviceTimeKind.COPY),
        communications=tuple(
            Communication(
                name_collective(event), launches.find_launch_label(event), event.start, event.end
            )
            for kind, event in kinds
            if kind is DeviceTimeKind.COMMUNICATION
        ),
        steps=drop_empty_steps(steps, mine),
        remarks=(*remarks, *tracks.remarks),
        actions=find_actions(trace, _find_compute_stream(computing)),
    )


def _find_compute_stream(computing: Sequence[TraceEvent]) -> tuple[int | str, int | str]:
    """Return the device and the stream with most compute."""
    spent: dict[tuple[int | str, int | str], int] = {}
    for event in computing:
        spent[event.pid, event.tid] = spent.get((event.pid, event.tid), 0) + event.end - event.start
    return max(spent, key=spent.__getitem__, default=("", ""))


def _busiest(events: Sequence[TraceEvent]) -> tuple[int | str, list[TraceEvent], list[str]]:
    """Return the device with most work, its events, and a remark if the process used others."""
    by_device: dict[int | str, list[TraceEvent]] = {}
    for event in events:
        by_device.setdefault(event.args.get("device", event.pid), []).append(event)
    device = max(by_device, key=lambda name: merge_spans(by_device[name]).total)
    rest = sorted(str(name) for name in by_device if name != device)
    remark = f"the process used several devices: gpu {device} is shown, {', '.join(rest)} not"
    return device, by_device[device], [remark] if rest else []


def _add_cpu(tracks: RankTracks, trace: Trace) -> RankTracks:
    collectives = [
        event for event in trace.select_events("user_annotation") if name_cpu_collective(event)
    ]
    labelled = zip(collectives, find_cpu_labels(trace, collectives), strict=True)
    return replace(
        tracks,
        compute=find_cpu_compute(trace),
        communications=tuple(
            Communication(name_cpu_collective(event), label, event.start, event.end)
            for event, label in labelled
        ),
        steps=drop_empty_steps(tracks.steps or make_single_step(trace.events), trace.events),
        actions=find_actions(trace, find_training_thread(trace)),
    )

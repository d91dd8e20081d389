"""From a trace to the lanes of its rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ovpatch.insight.intervals import Intervals
from ovpatch.insight.timeline import borders, cpu
from ovpatch.insight.timeline.kinds import Kind, collective_of, collective_on_cpu, kind_of
from ovpatch.insight.timeline.lanes import Communication, Lanes, move, step_of
from ovpatch.insight.timeline.launches import Launches, labels_on_cpu
from ovpatch.insight.timeline.trace import DEVICE, Event, Trace, TraceError, read


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
    steps, how = borders.steps_on_host(trace)
    progress = [(launches.time_of(event), (event.start, event.end)) for event in computing]
    steps = borders.on_device(steps, progress) if steps else borders.everything(mine)
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
        borders.whole(steps, mine),
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
    steps, how = borders.steps_on_host(trace)
    return Lanes(
        rank,
        "cpu",
        trace.host,
        trace.path,
        cpu.compute(trace),
        Intervals(),
        tuple(
            Communication(collective_on_cpu(event), label, event.start, event.end)
            for event, label in zip(collectives, labels, strict=True)
        ),
        borders.whole(steps or borders.everything(trace.events), trace.events),
        trace.first,
        (how,) if how else (),
    )


def _spans(events: Iterable[Event]) -> Intervals:
    return Intervals.of((event.start, event.end) for event in events)

"""Where steps begin and end: on the host by what the profiler noted, on a device by the work launched until then.

[Note: borders on a device] A device lags behind its host. So a step of the device ends when it has finished the compute
that was launched before the host's border, or at that border if it was idle by then. Communication does not move the
border: what still runs then (a parameter gather under the next forward) is split between the two steps.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from ovpatch.insight.intervals import Span
from ovpatch.insight.timeline.lanes import Step
from ovpatch.insight.timeline.trace import Event, Trace

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

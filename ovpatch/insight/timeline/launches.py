"""Which feature's label stands over the launch of an event on a device, or of a collective on a CPU thread."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from ovpatch.insight.timeline.kinds import shape_of
from ovpatch.insight.timeline.trace import LAUNCHES, OPS, Event, Trace

_PREFIX: Final = "ovpatch::"
_COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::")


class Labels:
    """The ranges of ovpatch's features in a trace, on each thread of the host and each stream of the device."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._ranges: dict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
        for event in events:
            if event.name.startswith(_PREFIX):
                self._ranges[event.pid, event.tid].append(event)
        self._starts = {where: [event.start for event in ranges] for where, ranges in self._ranges.items()}

    def at(self, pid: int | str, tid: int | str, time: int) -> str:
        """Return the innermost label that stands over a time of a thread or stream, "" if none does."""
        ranges = self._ranges.get((pid, tid), [])
        for index in range(bisect_right(self._starts.get((pid, tid), []), time) - 1, -1, -1):
            if time < ranges[index].end:  # ranges of a thread nest: of those around a time, the last to start is inside
                return ranges[index].name
        return ""


class Launches:
    """What the host did to have the device do something.

    [Note: launches that are not in the trace] The profiler leaves out some calls, such as the driver's memsets, though
    what they launched is there. Numbers are given out in the order of calls, so such a call was made after the
    recorded one with the number before its own. Where nothing has a number, a launch was at its event's start at the
    latest.
    """

    def __init__(self, trace: Trace) -> None:
        self._calls = {event.args["correlation"]: event for event in trace.of(*LAUNCHES) if "correlation" in event.args}
        self._numbers = sorted(number for number in self._calls if isinstance(number, int))
        self._host, self._device = Labels(trace.of("user_annotation")), Labels(trace.of("gpu_user_annotation"))

    def time_of(self, event: Event) -> int | None:
        """Return when an event of the device was launched, None if that was before the trace began.

        See [Note: launches that are not in the trace].
        """
        number = event.args.get("correlation")
        if number in self._calls:
            return self._calls[number].start
        if not self._numbers or not isinstance(number, int):
            return event.start
        before = bisect_left(self._numbers, number)
        return self._calls[self._numbers[before - 1]].start if before else None

    def label_of(self, event: Event) -> str:
        """Return the label over the launch, or else over the event on its stream; "" if there is none."""
        call = self._calls.get(event.args.get("correlation"))
        over_launch = "" if call is None else self._host.at(call.pid, call.tid, call.start)
        return over_launch or self._device.at(event.pid, event.tid, event.start)


def labels_on_cpu(trace: Trace, collectives: Iterable[Event]) -> list[str]:
    """Find the label over the call of each collective that ran on a backend's own thread.

    Nothing in the trace ties the two together. A backend takes its calls in their order, so the first of a kind that
    ran belongs to the first of that kind that was called, and not before that.

    Args:
        trace: The whole.
        collectives: The annotations of the backend's threads, by start.
    """
    waiting: dict[str, list[Event]] = defaultdict(list)
    for event in trace.of(*OPS):
        if event.name.startswith(_COLLECTIVES):
            waiting[shape_of(event.name.partition("::")[2])].append(event)
    labels, found = Labels(trace.of("user_annotation")), []
    for event in collectives:
        calls = waiting[shape_of(event.name.partition(":")[2])]
        call = calls.pop(0) if calls and calls[0].start <= event.start else None
        found.append("" if call is None else labels.at(call.pid, call.tid, call.start))
    return found

"""Clocks that measure computations and steps: the host's, or that of the device's stream.

A device runs behind its host, which issues work and goes on. Its clock records events around each computation, behind
the wait for the message that the computation reads, and looks at them in a later step, without waiting.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ovpatch.overlap.pipelining.ir import Kind


class StepTimes:
    """Durations of a rank's computations and steps, in seconds; the last :attr:`WINDOW` of each kind."""

    WINDOW = 64

    def __init__(self) -> None:
        self._costs: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
        self._steps: list[float] = []
        self._overheads: list[float] = []

    def add_action(self, stage: int, kind: Kind, seconds: float) -> None:
        """Add a computation."""
        _append(self._costs[stage, kind], seconds)

    def add_step(self, seconds: float) -> None:
        """Add a step."""
        _append(self._steps, seconds)

    def add_overhead(self, seconds: float) -> None:
        """Add what a step took beside its computations and waits."""
        _append(self._overheads, seconds)

    @property
    def overhead(self) -> float:
        """Median of what a step takes beside its computations and waits; 0 where that is not known, as on a device."""
        return statistics.median(self._overheads) if self._overheads else 0.0

    def clear(self) -> None:
        """Forget all durations."""
        self._costs.clear()
        self._steps.clear()
        self._overheads.clear()

    def stages(self) -> set[int]:
        """Return the stages with costs."""
        return {stage for stage, _ in self._costs}

    def cost(self, stage: int, kind: Kind) -> float:
        """Return the median cost; 0 without one."""
        costs = self._costs.get((stage, kind))
        return statistics.median(costs) if costs else 0.0

    def mean(self, stage: int, kind: Kind) -> float:
        """Return the mean cost; 0 without one. Where costs scatter, a step takes about the sum of means."""
        return statistics.fmean(self._costs.get((stage, kind)) or [0.0])

    def bubble(self, microbatches: int) -> float | None:
        """Return ``1 - m (F + B + W) / T`` over all stages of the rank; None before the first step."""
        if not self._steps:
            return None
        work = sum(self.cost(stage, kind) for stage, kind in self._costs)
        return 1 - microbatches * work / statistics.median(self._steps)


def _append(values: list[float], value: float) -> None:
    if len(values) >= StepTimes.WINDOW:
        del values[0]
    values.append(value)


class Clock(Protocol):
    """Measures what a rank does in a step, and adds it to its :class:`StepTimes`, in seconds."""

    def start_step(self) -> None:
        """Start the time of a step, and add what is known of earlier ones."""

    def end_step(self) -> None:
        """End the time of a step."""

    def drop_step(self) -> None:
        """Forget the computations of a step that failed."""

    def now(self) -> Any:
        """Return the start of a computation."""

    def add_action(self, stage: int, kind: Kind, started: Any) -> None:
        """Take the time since ``started`` as that of a computation."""

    def begin_wait(self) -> float:
        """Return the start of a wait for other ranks."""

    def end_wait(self, started: float) -> None:
        """Take the time since ``started`` as that of a wait."""


class HostClock:
    """The host's clock, where a computation has ended when its call returns.

    Args:
        times: Gets the durations.

    Attributes:
        read: Returns the time in seconds; replaced by benchmarks.
    """

    read: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._started = self._counted = 0.0

    def start_step(self) -> None:
        """Start the time of a step."""
        self._started, self._counted = self.read(), 0.0

    def end_step(self) -> None:
        """End the time of a step; what is no computation and no wait in it is what the engine takes."""
        seconds = self.read() - self._started
        self._times.add_step(seconds)
        self._times.add_overhead(max(0.0, seconds - self._counted))

    def drop_step(self) -> None:
        """Do nothing: computations before the failure are as good as others."""

    def now(self) -> float:
        """Return the start of a computation."""
        return self.read()

    def add_action(self, stage: int, kind: Kind, started: float) -> None:
        """Take the time since ``started`` as that of a computation."""
        seconds = self.read() - started
        self._counted += seconds
        self._times.add_action(stage, kind, seconds)

    def begin_wait(self) -> float:
        """Return the start of a wait for other ranks."""
        return self.read()

    def end_wait(self, started: float) -> None:
        """Take the time since ``started`` as that of a wait."""
        self._counted += self.read() - started


class DeviceClock:
    """Events on the current stream of a CUDA device. A computation whose work is issued too late takes longer there.

    Args:
        times: Gets the durations, one step later.
        device: The device.
        make_event: Makes an event; replaced by tests without a device.
    """

    def __init__(self, times: StepTimes, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        self._times = times
        self._device = device
        self._make_event = make_event or _make_event
        self._free: list[Any] = []
        self._started: Any = None
        # Of computations and, without a stage, of steps, in the order in which they end.
        self._measured: deque[tuple[int | None, Kind, Any, Any]] = deque()

    def start_step(self) -> None:
        """Start the time of a step, and add what is known of earlier ones."""
        self._collect()
        self._started = self.now()

    def end_step(self) -> None:
        """End the time of a step."""
        self._measured.append((None, Kind.F, self._started, self.now()))

    def drop_step(self) -> None:
        """Forget the computations of a step that failed."""
        self._measured.clear()

    def now(self) -> Any:
        """Record an event."""
        event = self._free.pop() if self._free else self._make_event()
        event.record(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)
        return event

    def add_action(self, stage: int, kind: Kind, started: Any) -> None:
        """Take the time since ``started`` as that of a computation."""
        self._measured.append((stage, kind, started, self.now()))

    def begin_wait(self) -> float:
        """Do nothing: the host's waits are no part of the device's time."""
        return 0.0

    def end_wait(self, started: float) -> None:
        """Do nothing."""

    def _collect(self) -> None:
        """Add the durations of what has ended on the device."""
        while self._measured and self._measured[0][3].query():
            stage, kind, started, ended = self._measured.popleft()
            seconds = started.elapsed_time(ended) / 1000
            if stage is None:
                self._times.add_step(seconds)
            else:
                self._times.add_action(stage, kind, seconds)
            self._free += [started, ended]


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def make_clock(times: StepTimes, device: torch.device) -> Clock:
    """Return the clock for stages on a device."""
    return DeviceClock(times, device) if device.type == "cuda" else HostClock(times)

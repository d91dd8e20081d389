"""Clocks that measure computations and steps: the host's clock, or events of the device's stream.

The host runs ahead of a device and only issues its work. The clock of a device records events around each computation,
after the wait for the message that the computation reads. It reads them in a later step, without waiting.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import torch

from ovpatch.overlap.pipelining.ir import Kind

# The number of durations that a median or mean is taken of.
_MAX_DURATIONS: Final = 64


class StepTimes:
    """The last durations of a rank's computations and steps, in seconds.

    Attributes:
        actions: Durations of computations by stage and kind.
        steps: Durations of steps.
        overheads: Parts of steps that are neither a computation nor a wait.
    """

    def __init__(self) -> None:
        make: partial[deque[float]] = partial(deque, maxlen=_MAX_DURATIONS)
        self.actions: Final[defaultdict[tuple[int, Kind], deque[float]]] = defaultdict(make)
        self.steps: Final = make()
        self.overheads: Final = make()

    @property
    def overhead(self) -> float:
        """Median of the part of a step outside computations and waits; 0 if unknown, as on a device."""
        return statistics.median(self.overheads) if self.overheads else 0.0

    def clear(self) -> None:
        """Forget all durations."""
        self.actions.clear()
        self.steps.clear()
        self.overheads.clear()

    def stages(self) -> set[int]:
        """Return the stages with costs."""
        return {stage for stage, _ in self.actions}

    def cost(self, stage: int, kind: Kind) -> float:
        """Return the median cost; 0 without one."""
        costs = self.actions.get((stage, kind))
        return statistics.median(costs) if costs else 0.0

    def mean(self, stage: int, kind: Kind) -> float:
        """Return the mean cost; 0 without one. If costs scatter, a step takes about the sum of means."""
        return statistics.fmean(self.actions.get((stage, kind)) or [0.0])

    def bubble(self, microbatches: int) -> float | None:
        """Return ``1 - m (F + B + W) / T`` over all stages of the rank; None before the first step."""
        if not self.steps:
            return None
        work = sum(self.cost(stage, kind) for stage, kind in self.actions)
        return 1 - microbatches * work / statistics.median(self.steps)


class Clock(Protocol):
    """A clock that measures the work of a rank in a step and adds it to :class:`StepTimes`, in seconds."""

    def start_step(self) -> None:
        """Start the time of a step, and add the known times of earlier ones."""

    def end_step(self) -> None:
        """End the time of a step."""

    def drop_step(self) -> None:
        """Forget the computations of a failed step."""

    def now(self) -> Any:
        """Return the start of a computation."""

    def add_action(self, stage: int, kind: Kind, started: Any) -> None:
        """Add the time since ``started`` as the duration of a computation."""

    def begin_wait(self) -> float:
        """Return the start of a wait for other ranks."""

    def end_wait(self, started: float) -> None:
        """Count the time since ``started`` as a wait."""


class HostClock:
    """The host's clock: a computation has ended when its call returns.

    Args:
        times: Gets the durations.

    Attributes:
        read: Returns the time in seconds. Benchmarks replace it.
    """

    read: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._started = 0.0
        # Seconds of computations and waits in the step.
        self._counted = 0.0

    def start_step(self) -> None:
        """Start the time of a step."""
        self._started = self.read()
        self._counted = 0.0

    def end_step(self) -> None:
        """End the time of a step; the part of it that is no computation and no wait is overhead."""
        seconds = self.read() - self._started
        self._times.steps.append(seconds)
        self._times.overheads.append(max(0.0, seconds - self._counted))

    def drop_step(self) -> None:
        """Do nothing, because computations before the failure were measured like any others."""

    def now(self) -> float:
        """Return the start of a computation."""
        return self.read()

    def add_action(self, stage: int, kind: Kind, started: float) -> None:
        """Add the time since ``started`` as the duration of a computation."""
        seconds = self.read() - started
        self._counted += seconds
        self._times.actions[stage, kind].append(seconds)

    def begin_wait(self) -> float:
        """Return the start of a wait for other ranks."""
        return self.read()

    def end_wait(self, started: float) -> None:
        """Count the time since ``started`` as a wait."""
        self._counted += self.read() - started


class DeviceClock:
    """Events on the current stream of a CUDA device. If the host issues work too late, durations are too long.

    Args:
        times: Gets the durations, one step later.
        device: The device.
        make_event: Makes an event. Tests without a device replace it.
    """

    def __init__(
        self, times: StepTimes, device: torch.device, make_event: Callable[[], Any] | None = None
    ) -> None:
        self._times = times
        self._device = device
        self._make_event = make_event or _make_event
        # Events that can be used again.
        self._free: list[Any] = []
        self._started: Any = None
        # Computations and, with None as the stage, steps, with their events, in the order in which they end.
        self._measured: deque[tuple[int | None, Kind, Any, Any]] = deque()

    def start_step(self) -> None:
        """Start the time of a step, and add the known times of earlier ones."""
        # Events complete in the order of the stream, so none after the first incomplete one needs a query.
        while self._measured and self._measured[0][3].query():
            stage, kind, started, ended = self._measured.popleft()
            seconds = started.elapsed_time(ended) / 1000
            (self._times.steps if stage is None else self._times.actions[stage, kind]).append(
                seconds
            )
            self._free += [started, ended]
        self._started = self.now()

    def end_step(self) -> None:
        """End the time of a step."""
        # The kind of a step means nothing; start_step() reads only that it has no stage.
        self._measured.append((None, Kind.F, self._started, self.now()))

    def drop_step(self) -> None:
        """Forget the computations of a failed step."""
        self._measured.clear()

    def now(self) -> Any:
        """Record an event."""
        event = self._free.pop() if self._free else self._make_event()
        event.record(
            torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )
        return event

    def add_action(self, stage: int, kind: Kind, started: Any) -> None:
        """Take the time since ``started`` as that of a computation."""
        self._measured.append((stage, kind, started, self.now()))

    def begin_wait(self) -> float:
        """Do nothing, because the host's waits are no part of the device's time."""
        return 0.0

    def end_wait(self, started: float) -> None:
        """Do nothing."""


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def make_clock(times: StepTimes, device: torch.device) -> Clock:
    """Return the clock for stages on a device."""
    return DeviceClock(times, device) if device.type == "cuda" else HostClock(times)

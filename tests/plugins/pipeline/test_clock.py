"""Devices time computations by events, which are read after they have passed; hosts also time their own overhead."""

from __future__ import annotations

import torch

from ovpatch.overlap.pipelining.ir import Kind
from ovpatch_plugins.pipeline.runtime.step_clock import DeviceClock, HostClock, StepTimes


class Device:
    """A stream whose events have passed up to number :attr:`passed`."""

    def __init__(self) -> None:
        self.recorded = self.passed = self.made = 0

    def make_event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    """An event whose time is its number, in milliseconds."""

    def __init__(self, device: Device) -> None:
        self.device, self.number = device, 0

    def record(self, stream: None) -> None:
        self.device.recorded += 1
        self.number = self.device.recorded

    def query(self) -> bool:
        return self.number <= self.device.passed

    def elapsed_time(self, end: Event) -> float:
        return float(end.number - self.number)


def test_durations_come_when_the_device_has_passed_them() -> None:
    times, device = StepTimes(), Device()
    clock = DeviceClock(times, torch.device("cpu"), device.make_event)
    clock.start_step()  # event 1
    clock.add_action(0, Kind.F, clock.now())  # 2 and 3
    clock.add_action(0, Kind.B, clock.now())  # 4 and 5
    clock.end_step()  # 6
    device.passed = 4
    clock.start_step()
    assert times.cost(0, Kind.F) == 0.001
    assert times.cost(0, Kind.B) == 0
    assert times.bubble(1) is None
    device.passed = 100
    # Computations of a failed step do not count.
    clock.drop_step()
    clock.start_step()
    assert times.cost(0, Kind.B) == 0


def test_events_are_used_again() -> None:
    times, device = StepTimes(), Device()
    clock = DeviceClock(times, torch.device("cpu"), device.make_event)
    for _ in range(5):
        clock.start_step()
        clock.add_action(1, Kind.W, clock.now())
        clock.end_step()
        device.passed = device.recorded
    assert device.made <= 5
    assert times.bubble(1) == 1 - 1 / 3


def test_time_outside_of_computations_and_waits_is_the_overhead_of_the_engine() -> None:
    times, read = StepTimes(), iter([10.0, 11.0, 13.0, 14.0, 18.0, 19.0, 20.0, 22.0])
    clock = HostClock(times)
    clock.read = lambda: next(read)  # type: ignore[method-assign]
    assert times.overhead == 0
    clock.start_step()  # at 10
    clock.add_action(0, Kind.F, clock.now())  # 11 to 13
    clock.end_wait(clock.begin_wait())  # 14 to 18
    clock.add_action(0, Kind.B, clock.now())  # 19 to 20
    clock.end_step()  # at 22
    assert times.overhead == 12 - 2 - 4 - 1
    times.clear()
    assert times.overhead == 0

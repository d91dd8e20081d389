"""Costs on a device are those between its events, read once they have passed."""

from __future__ import annotations

import torch

from ovpatch_plugins.pipeline.actions import Kind
from ovpatch_plugins.pipeline.clock import DeviceClock
from ovpatch_plugins.pipeline.report import StepTimes


class Device:
    """A stream on which a recorded event passes when :attr:`passed` reaches its number."""

    def __init__(self) -> None:
        self.recorded = self.passed = self.made = 0

    def make_event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    """An event; its time is its number, in milliseconds."""

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
    clock.drop_step()  # a failed step's computations count for nothing
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

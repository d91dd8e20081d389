"""Kernels on symmetric memory take turns, whatever their streams; on streams that stand for a GPU's."""

from __future__ import annotations

import pytest
import torch

from ovpatch.overlap.symm_mem import memory as order

DEVICE = torch.device("cuda", 0)


class Stream:
    """Notes for whom it waits."""

    def __init__(self, handle: int, *, capturing: bool = False) -> None:
        self.handle, self.capturing = handle, capturing
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@pytest.fixture
def on(monkeypatch):
    """Take a turn on a stream, and return for whom it waited then."""
    current: list[Stream] = []
    monkeypatch.setattr(order, "_last", {})
    monkeypatch.setattr(order, "_is_capturing", lambda stream: stream.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[-1].handle, raising=False)

    def take(stream: Stream) -> list[Stream]:
        current.append(stream)
        order.take_turn(DEVICE, stream.capturing)
        found, stream.waited_for = stream.waited_for, []
        return found

    return take


def test_who_comes_from_another_stream_waits_for_the_one_before(on):
    first, second = Stream(0), Stream(7)
    assert on(first) == []
    assert on(first) == []
    assert on(second) == [first]
    assert on(second) == []
    assert on(first) == [second]


def test_what_is_captured_waits_for_nothing_that_runs(on):
    eager, one, other = Stream(0), Stream(1, capturing=True), Stream(2, capturing=True)
    on(eager)
    assert on(one) == []
    assert on(other) == [one]
    assert on(eager) == []


def test_a_capture_waits_for_no_stream_of_one_that_has_ended(on):
    first, second = Stream(1, capturing=True), Stream(2, capturing=True)
    on(first)
    first.capturing = False
    assert on(second) == []


def test_devices_without_streams_are_left_alone():
    order.take_turn(torch.device("cpu"), False)

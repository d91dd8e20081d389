"""Labels, streams, ballots."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm.step_flags import Ballots
from ovpatch.overlap.comm.streams import ProducerStreams, profiler_label, profiler_span


def test_labels_show_in_the_profile_and_cost_nothing_without_one():
    text = profiler_label("ddp", "all_reduce", "bucket 3")
    assert text == "ovpatch::ddp::all_reduce (bucket 3)"
    assert profiler_label("ddp", "recover") == "ovpatch::ddp::recover"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, profiler_span(text):
        torch.zeros(1)
    assert text in {event.name for event in profile.events()}
    assert profiler_span(text) is profiler_span(text)


def test_producers_do_nothing_without_streams():
    producers = ProducerStreams()
    producers.wait_for_producers(torch.device("cpu"), [torch.zeros(1)])
    producers.wait_for_producers(torch.device("cuda", 0), [torch.zeros(1)])  # from which no gradient came
    producers.clear()


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited_for = number, []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.cuda_stream)


class Read:
    """Stands in for a tensor that a stream will read."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream.cuda_stream)


def test_the_current_stream_waits_for_each_other_producer_once(monkeypatch):
    streams = {number: Stream(number) for number in range(4)}
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    producers, read = ProducerStreams(), Read()
    for current[0] in (1, 2, 1, 3, 2):
        producers.record_current(0)
    producers.wait_for_producers(torch.device("cuda", 1), [read])
    assert streams[2].waited_for == read.recorded == []
    producers.wait_for_producers(torch.device("cuda", 0), [read])
    assert sorted(streams[2].waited_for) == [1, 3]
    assert read.recorded == [2]
    producers.clear()
    producers.wait_for_producers(torch.device("cuda", 0), [read])
    assert len(streams[2].waited_for) == 2
    producers.record_current(0)
    producers.wait_for_producers(torch.device("cuda", 0), [read])
    assert read.recorded == [2], "what one stream makes and reads needs no waiting"


def vote(failing: list[int], failed_steps: list[int]) -> list[list[int]]:
    ballots = Ballots(dist.distributed_c10d._get_default_group(), torch.device("cpu"), "test")
    found = []
    for step in range(6):
        ballots.count(step, failed=dist.get_rank() in failing and step in failed_steps)
        if step % 2:
            found += [list(steps) for steps in ballots.losses()]
    return found


@pytest.mark.parametrize("failed_steps", [[2], [0, 1, 5]])
@pytest.mark.parametrize("failing", [[], [1], [0, 2], [0, 1, 2]])
def test_ballots_tell_those_that_went_well_and_only_them(ranks, failing, failed_steps):
    for rank, found in enumerate(ranks(3)(vote, failing, failed_steps)):
        assert found == ([[step] for step in failed_steps] if failing and rank not in failing else [])


def vote_now_and_then(failing: int, failed: list[int]) -> list[list[int]]:
    """As on CUDA, where one ballot stands for several steps once the first ones are over."""
    ballots = Ballots(dist.distributed_c10d._get_default_group(), torch.device("cpu"), "test")
    ballots._period = 4
    for step in range(15):
        ballots.count(step, failed=dist.get_rank() == failing and step in failed)
    return [list(steps) for steps in ballots.losses()]


def test_a_ballot_for_several_steps_names_them_all(ranks):
    well, bad = ranks(2)(vote_now_and_then, 1, [3, 5, 6, 11, 14])
    assert bad == []
    assert well == [[3], [4, 5, 6, 7], [8, 9, 10, 11]]  # the ballot on step 14 is still to be cast

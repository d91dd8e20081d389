"""Labels, streams, step flags."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm.step_flags import StepFlags
from ovpatch.overlap.comm.streams import ProducerStreams, profiler_label, profiler_span


def test_labels_show_in_the_profile_and_cost_nothing_without_one():
    text = profiler_label("ddp", "all_reduce", "bucket 3")
    assert text == "ovpatch::ddp::all_reduce (bucket 3)"
    assert profiler_label("ddp", "recover") == "ovpatch::ddp::recover"
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        profiler_span(text),
    ):
        torch.zeros(1)
    assert text in {event.name for event in profile.events()}
    assert profiler_span(text) is profiler_span(text)


def test_producers_do_nothing_without_streams():
    producers = ProducerStreams()
    producers.wait_for_producers(torch.device("cpu"), [torch.zeros(1)])
    # No gradient came from this device.
    producers.wait_for_producers(torch.device("cuda", 0), [torch.zeros(1)])
    producers.clear()


class Stream:
    """A fake CUDA stream."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited_for = number, []

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream.cuda_stream)


class Read:
    """A fake tensor that a stream will read."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream.cuda_stream)


def test_the_current_stream_waits_for_each_other_producer_once(monkeypatch):
    streams = {number: Stream(number) for number in range(4)}
    current = [0]
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: current[0], raising=False
    )
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
    assert read.recorded == [2], "a stream that reads its own tensors need not wait"


def raise_flags(failing: list[int], failed_steps: list[int]) -> list[list[int]]:
    flags = StepFlags(dist.distributed_c10d._get_default_group(), torch.device("cpu"), "test")
    found = []
    for step in range(6):
        flags.start_all_reduce(step, failed=dist.get_rank() in failing and step in failed_steps)
        if step % 2:
            found += [list(steps) for steps in flags.failed_steps()]
    return found


@pytest.mark.parametrize("failed_steps", [[2], [0, 1, 5]])
@pytest.mark.parametrize("failing", [[], [1], [0, 2], [0, 1, 2]])
def test_failures_reach_the_ranks_that_did_not_fail(ranks, failing, failed_steps):
    for rank, found in enumerate(ranks(3)(raise_flags, failing, failed_steps)):
        assert found == (
            [[step] for step in failed_steps] if failing and rank not in failing else []
        )


def raise_flags_now_and_then(failing: int, failed: list[int]) -> list[list[int]]:
    """Raise flags as on CUDA, where one sum covers several steps after the first steps."""
    flags = StepFlags(dist.distributed_c10d._get_default_group(), torch.device("cpu"), "test")
    flags._period, flags._is_in_every_step = 4, False
    for step in range(15):
        flags.start_all_reduce(step, failed=dist.get_rank() == failing and step in failed)
    return [list(steps) for steps in flags.failed_steps()]


def test_a_sum_for_several_steps_names_them_all(ranks):
    well, bad = ranks(2)(raise_flags_now_and_then, 1, [3, 5, 6, 11, 14])
    assert bad == []
    # The sum that covers step 14 has not been started.
    assert well == [[3], [4, 5, 6, 7], [8, 9, 10, 11]]


def sum_flags_of_ranks() -> tuple[list[int], list[int]]:
    flags = StepFlags(dist.distributed_c10d._get_default_group(), torch.device("cpu"), "test")
    own = [0, 1, 1, dist.get_rank(), 0, 2, 0]
    flags.start_all_reduce(0, get_flags=lambda: own)
    return flags.result(0), flags.result(1)


def test_flags_of_the_caller_are_summed_separately_and_act_in_the_next_step(ranks):
    assert ranks(3)(sum_flags_of_ranks) == [([], [0, 3, 3, 3, 0, 6, 0])] * 3

"""Reasons against shared memory, and workspaces that grow with the requested size."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import drop_values, group_values
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels import symmetric_memory as order
from ovpatch.overlap.kernels.symmetric_memory import Memory

CPU = torch.device("cpu")


def objections() -> list[str]:
    group, rank = dist.group.WORLD, dist.get_rank()
    found = [memory.unsupported_reason(group, CPU)]
    memory.kernels_unsupported_reason = lambda device: "it has a cold" if rank == 1 else ""
    found.append(memory.unsupported_reason(group, CPU))
    memory.kernels_unsupported_reason = lambda device: ""
    found.append(memory.unsupported_reason(group, CPU))
    memory.rendezvous_count += rank
    found.append(memory.unsupported_reason(group, CPU))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if rank:
            patch.setenv("TMPDIR", folder)
        found.append(memory.unsupported_reason(group, CPU))
    memory.rendezvous_count -= rank
    memory.identify_host = lambda: f"host {rank}"
    found.append(memory.unsupported_reason(group, CPU))
    memory.MOST_RANKS = 1
    found.append(memory.unsupported_reason(group, CPU))
    return found


def test_all_ranks_get_the_same_reasons(ranks):
    first, second = ranks(2)(in_a_copy, "objections")
    assert first == second
    on_cpu, cold, none, often, folders, hosts, many = first
    assert on_cpu == "tensors are on cpu, not on CUDA devices (rank 0, 1)"
    assert cold == "it has a cold (rank 1)"
    assert none == ""
    assert (
        often
        == "it has shared memory another number of times than rank 0, in other groups (rank 1)"
    )
    assert folders == "it runs in another container than rank 0, or with another TMPDIR (rank 1)"
    assert hosts == "it runs on another host than rank 0 (rank 1)"
    assert many == "2 ranks, and kernels are made for 1 at most"


def test_folders_with_names_too_long_for_sockets_are_refused(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setenv("TMPDIR", "/" + 89 * "d")
    assert memory.memory_unsupported_reason(cuda) == ""
    monkeypatch.setenv("TMPDIR", "/" + 90 * "d")
    assert "set a shorter TMPDIR" in memory.memory_unsupported_reason(cuda)


def in_a_copy(name: str) -> Any:
    """Run one of the functions above, and restore the module afterwards."""
    before = dict(vars(memory))
    try:
        return globals()[name]()
    finally:
        vars(memory).update(before)


class Group:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_a_workspace_grows_and_starts_counting_over():
    made = []

    def allocate(size: int, group: Any, device: torch.device, prepare: Any) -> Memory:
        own = torch.full((size,), 255, dtype=torch.uint8)
        prepare(own)
        made.append(own)
        return Memory(own, [own.data_ptr()])

    space = memory.Workspace(Group(), CPU, allocate)
    assert space.begin_operator(1000, 10)
    first = space.half_bytes
    assert first >= 1000
    assert first % 512 == 0, "descriptors need aligned halves"
    assert not made[0][: memory.HEADER].any(), "no rank may read old memory as a signal"
    space.state[0] = 7
    assert space.begin_operator(first, 1024)
    assert len(made) == 1
    assert space.begin_operator(first + 1, 10)
    assert space.half_bytes > first
    assert space.peers.tolist() == [made[1].data_ptr()]
    assert space.state.tolist()[0] == 1
    assert space.begin_operator(10, 100_000)
    assert len(space.counts) >= 100_000
    assert space.half_bytes > first, "the existing memory is large enough"


def test_workspaces_of_destroyed_groups_are_dropped(ranks):
    assert ranks(2)(regrouped) == [True, True]


def regrouped() -> bool:
    first = dist.new_group([0, 1])
    workspace = memory.get_workspace(first, CPU)
    again = memory.get_workspace(first, CPU) is workspace
    dist.destroy_process_group(first)
    second = dist.new_group([0, 1])
    second_workspace = memory.get_workspace(second, CPU)
    kept = [found for _, found in group_values(memory.Workspace)]
    drop_values(memory.Workspace)
    is_new = second_workspace is not workspace and kept == [second_workspace]
    return again and is_new and not group_values(memory.Workspace)


def allocations(lacking: dict[int, int]) -> tuple[list[str], str]:
    """Allocate on all ranks; return the calls of this rank, and the error.

    Args:
        lacking: The number of allocations that fail for lack of memory, by rank.
    """
    import torch.distributed._symmetric_memory as torchs

    calls, full = [], lacking.get(dist.get_rank(), 0)

    def empty(size: int, **_: Any) -> torch.Tensor:
        calls.append("empty")
        if calls.count("empty") <= full:
            raise RuntimeError("CUDA driver error: out of memory\nmore")
        return torch.zeros(size, dtype=torch.uint8)

    class Handle:
        @staticmethod
        def get_buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype)

    def rendezvous(own: torch.Tensor, group: Any) -> type[Handle]:
        dist.barrier(group)
        return Handle

    before = torchs.empty, torchs.rendezvous, torch.cuda.synchronize, torch.cuda.empty_cache
    torchs.empty, torchs.rendezvous, torch.cuda.synchronize = empty, rendezvous, lambda device: None
    torch.cuda.empty_cache = lambda: calls.append("cache")
    try:
        memory.allocate_on_all(2**20, dist.group.WORLD, CPU, lambda own: calls.append("prepared"))
        return calls, ""
    except RuntimeError as error:
        return calls, str(error)
    finally:
        torchs.empty, torchs.rendezvous, torch.cuda.synchronize, torch.cuda.empty_cache = before


def rendezvous_so_far() -> int:
    return memory.rendezvous_count


def test_memory_is_allocated_on_all_ranks_or_on_none(ranks):
    before = ranks(2)(rendezvous_so_far)
    assert ranks(2)(allocations, {}) == [(["empty", "prepared"], "")] * 2
    assert ranks(2)(rendezvous_so_far) == [count + 1 for count in before]
    assert ranks(2)(allocations, {1: 1}) == [
        (["empty", "prepared"], ""),
        (["empty", "cache", "empty", "prepared"], ""),
    ]
    (first, why), (second, also) = ranks(2)(allocations, {1: 2})
    assert (first, second) == (["empty", "prepared"], ["empty", "cache", "empty"])
    assert why == also == "1 MiB of symmetric memory: CUDA driver error: out of memory (rank 1)"


# --- kernels on any streams run sequentially; on fake streams ---


DEVICE = torch.device("cuda", 0)


class Stream:
    """A fake stream that records the streams for which it waits."""

    def __init__(self, handle: int, *, capturing: bool = False) -> None:
        self.handle, self.capturing = handle, capturing
        self.waited_for: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream)


@pytest.fixture
def on(monkeypatch):
    """Return a function that takes a turn on a stream, and returns the streams for which it waited."""
    current: list[Stream] = []
    monkeypatch.setattr(order, "_last", {})
    monkeypatch.setattr(order, "_is_capturing", lambda stream: stream.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current[-1].handle, raising=False
    )

    def take(stream: Stream) -> list[Stream]:
        current.append(stream)
        order.take_turn(DEVICE, stream.capturing)
        found, stream.waited_for = stream.waited_for, []
        return found

    return take


def test_a_stream_waits_for_another_stream_that_had_the_last_turn(on):
    first, second = Stream(0), Stream(7)
    assert on(first) == []
    assert on(first) == []
    assert on(second) == [first]
    assert on(second) == []
    assert on(first) == [second]


def test_a_capturing_stream_waits_for_no_running_stream(on):
    eager, first, second = Stream(0), Stream(1, capturing=True), Stream(2, capturing=True)
    on(eager)
    assert on(first) == []
    assert on(second) == [first]
    assert on(eager) == []


def test_a_capture_waits_for_no_stream_of_an_ended_capture(on):
    first, second = Stream(1, capturing=True), Stream(2, capturing=True)
    on(first)
    first.capturing = False
    assert on(second) == []


def test_devices_without_streams_need_no_turns():
    order.take_turn(torch.device("cpu"), False)

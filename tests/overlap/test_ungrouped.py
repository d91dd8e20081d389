"""Collectives on a backend without grouped launches: large tensors are sent directly, small ones in one copy."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm import collectives
from ovpatch.overlap.comm.collectives import (
    AllGather,
    AllReduce,
    BufferPool,
    ReduceScatter,
    Work,
    WorkWithEpilogue,
    _partition_by_size,
)
from tests.overlap.test_collectives import for_each, group

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int32]

# Elements per rank, of tensors that are sent in one copy, directly, and in both ways.
SIZES = [[3, 5, 1], [300, 200], [3, 300, 5, 200], [300, 3]]


def drawn(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    # Sums of small integers are exact in any order.
    return torch.randint(-8, 8, (size,), generator=generator).to(dtype)


def finish(works: Any) -> list[type]:
    for work in works:
        work.wait()
    return [type(work) for work in works]


def three_times(sizes: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Run all collectives three times, the last two times with memory from the pool."""
    rank, world = dist.get_rank(), dist.get_world_size()
    full_sizes = [size * world for size in sizes]
    found = []
    with mock.patch.object(collectives, "_LARGE_BYTES", 200 * world * dtype.itemsize):
        all_reduce, scatter, gather = (
            AllReduce(group(), CPU),
            ReduceScatter(group(), CPU),
            AllGather(group(), CPU),
        )
        for _ in range(3):
            summed = [drawn(rank, size, dtype) for size in full_sizes]
            parts = [torch.empty(size, dtype=dtype) for size in sizes]
            gathered = [torch.empty(size, dtype=dtype) for size in full_sizes]
            kinds = finish(all_reduce(summed))
            finish(scatter(parts, [drawn(rank, size, dtype) for size in full_sizes]))
            finish(gather(gathered, [drawn(rank, size, dtype) for size in sizes]))
            found.append({"summed": summed, "parts": parts, "gathered": gathered, "kinds": kinds})
            check_ring(gathered, sizes)
    return found


def check_ring(gathered: list[torch.Tensor], sizes: list[int]) -> None:
    """Check that ranks of several hosts gather the same in a ring, also in place, and broadcast nothing."""
    rank = dist.get_rank()
    ring = AllGather(group(), CPU, spans_hosts=True)
    for is_in_place in (False, True):
        outputs = [torch.zeros_like(full) for full in gathered]
        shards = [
            full.clone() for full in (full.chunk(dist.get_world_size())[rank] for full in gathered)
        ]
        if is_in_place:
            places = [full.chunk(dist.get_world_size())[rank] for full in outputs]
            for place, shard in zip(places, shards, strict=True):
                place.copy_(shard)
            shards = places
        with mock.patch.object(collectives.Broadcast, "__call__", side_effect=AssertionError):
            finish(ring(outputs, shards))
        assert all(map(torch.equal, outputs, gathered)), (sizes, is_in_place)


@pytest.mark.parametrize("world", [2, 3])
def test_results_on_each_rank(ranks, world):
    calls = list(itertools.product(SIZES, DTYPES))
    for rank, found in enumerate(ranks(world)(for_each, three_times, calls)):
        for call, results in zip(calls, found, strict=True):
            check_results(results, rank, world, *call)


def check_results(
    results: list[dict[str, Any]], rank: int, world: int, sizes: list[int], dtype: Any
) -> None:
    sums = [sum(drawn(rank, size * world, dtype) for rank in range(world)) for size in sizes]
    full = [torch.cat([drawn(rank, size, dtype) for rank in range(world)]) for size in sizes]
    small = sum(size < 200 for size in sizes)
    for result in results:
        for summed, part, total in zip(result["summed"], result["parts"], sums, strict=True):
            assert torch.equal(summed, total), (sizes, dtype)
            assert torch.equal(part, total.chunk(world)[rank]), (sizes, dtype)
        assert all(map(torch.equal, result["gathered"], full)), (sizes, dtype)
        # A single small tensor needs no copy.
        assert (WorkWithEpilogue in result["kinds"]) == (small > 1)
        assert len(result["kinds"]) == len(sizes) - (small - 1 if small > 1 else 0)


def exchange(sizes: list[int], dtype: torch.dtype) -> tuple[bool, list[torch.Tensor]]:
    """Return whether ranks of several hosts all-reduced, and the shards of the sums."""
    outputs = [torch.empty(size, dtype=dtype) for size in sizes]
    terms = [drawn(dist.get_rank(), size * dist.get_world_size(), dtype) for size in sizes]
    all_reduce = mock.patch.object(
        AllReduce, "__call__", autospec=True, side_effect=AllReduce.__call__
    )
    with mock.patch.object(collectives, "_LARGE_BYTES", 2000), all_reduce as calls:
        finish(ReduceScatter(group(), CPU, exchanges=True)(outputs, terms))
    return calls.called, outputs


def test_ranks_of_several_hosts_exchange_terms_unless_sums_would_round_visibly(ranks):
    calls = [(SIZES[2], dtype) for dtype in DTYPES]
    for rank, found in enumerate(ranks(3)(for_each, exchange, calls)):
        for (sizes, dtype), (has_reduced, parts) in zip(calls, found, strict=True):
            assert has_reduced == (dtype.itemsize < 4)
            for size, part in zip(sizes, parts, strict=True):
                total = sum(drawn(peer, size * 3, dtype) for peer in range(3))
                assert torch.equal(part, total.chunk(3)[rank])


def test_released_memory_is_used_again():
    spare, like = BufferPool(), torch.empty(0)
    first = spare.get(4, like)
    assert spare.get(4, like) is not first, "the tensor is still in use"
    spare.put(first)
    spare.put(first)
    assert spare.get(4, like) is first
    assert spare.get(4, like) is not first, "a tensor released twice is in the pool once"
    spare.put(first)
    assert spare.get(5, like).numel() == 5
    for numel in range(100, 200):
        spare.put(torch.empty(numel))
    assert len(spare._idle) == collectives._MAX_IDLE_TENSORS, "sizes may change from step to step"
    assert spare.get(4, like.double()).dtype == torch.float64


def failing(how: str) -> dict[str, Any]:
    """Start two collectives, and never wait for the first, or wait for it last; its memory must stay in use."""
    all_reduce = AllReduce(group(), CPU)
    forgotten = all_reduce([torch.ones(2), torch.ones(3)])
    values = [torch.full((2,), 2.0), torch.full((3,), 3.0)]
    works = all_reduce(values)
    if how == "the later one first":
        finish(works)
        finish(forgotten)
    else:
        finish(works)
    return {"values": values}


@pytest.mark.parametrize("how", ["never waited for", "the later one first"])
def test_several_collectives_in_flight_do_not_share_memory(ranks, how):
    for result in ranks(2)(failing, how):
        assert torch.equal(result["values"][0], torch.full((2,), 4.0))
        assert torch.equal(result["values"][1], torch.full((3,), 6.0))


class Interrupted:
    """A work whose wait is interrupted by a signal handler that waits for the same collective."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outer: Any = None

    def wait(self) -> None:
        outer, self.outer = self.outer, None
        if outer is not None:
            outer.wait()
        self._work.wait()


def waited_for_within() -> dict[str, Any]:
    scatter = ReduceScatter(group(), CPU)
    parts = [torch.zeros(2), torch.zeros(3)]
    (unpacked,) = scatter(parts, [torch.ones(4), torch.full((6,), 2.0)])
    assert isinstance(unpacked, WorkWithEpilogue)
    interrupted = Interrupted(unpacked._works[0])
    unpacked._works = [interrupted]
    interrupted.outer = unpacked
    unpacked.wait()
    first, second = (scatter._ungrouped._pool.get(4, parts[0]) for _ in range(2))
    return {"parts": parts, "shared": first is second}


def test_a_signal_handler_may_wait_for_the_same_collective(ranks):
    for result in ranks(2)(waited_for_within):
        assert not result["shared"]
        assert torch.equal(result["parts"][0], torch.full((2,), 2.0))
        assert torch.equal(result["parts"][1], torch.full((3,), 4.0))


def test_each_tensor_is_visited_once_to_partition_them_by_size():
    class Sized:
        visits = 0

        @property
        def nbytes(self) -> int:
            self.visits += 1
            return 8

    tensors = [Sized() for _ in range(100)]
    large, small = _partition_by_size(tensors)
    assert (len(large), len(small)) == (0, 100)
    assert {tensor.visits for tensor in tensors} == {1}

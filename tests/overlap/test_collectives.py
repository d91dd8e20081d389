"""Collectives as features issue them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import AllGather, AllReduce, ReduceScatter, backend_name

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int32,
]


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def for_each(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function with several arguments in one job, because a job costs more than a call."""
    return [function(*call) for call in calls]


def tensors(rank: int, sizes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    # Sums of small integers are exact in every dtype and in any order.
    real = [
        torch.randint(-8, 8, (2, *size), generator=generator).to(torch.float64) for size in sizes
    ]
    return [(torch.complex(*pair) if dtype.is_complex else pair[0]).to(dtype) for pair in real]


def summed(sizes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    given = tensors(dist.get_rank(), sizes, dtype)
    addresses = [tensor.data_ptr() for tensor in given]
    works = AllReduce(group(), CPU)(given)
    for work in works:
        work.wait()
    return {
        "sums": given,
        "in place": addresses == [tensor.data_ptr() for tensor in given],
        "works": len(works),
        "backend": backend_name(group(), CPU),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensors_are_summed_in_place_by_one_launch(ranks, world):
    many: list[tuple[int, ...]] = [(5,), (2, 3), (), (0,), (40, 50)]
    calls = [*((many, dtype) for dtype in DTYPES), ([(4, 3)], torch.float32), ([], torch.float32)]
    for results in ranks(world)(for_each, summed, calls):
        for (sizes, dtype), result in zip(calls, results, strict=True):
            expected = [
                sum(parts)
                for parts in zip(*(tensors(r, sizes, dtype) for r in range(world)), strict=True)
            ]
            assert all(
                torch.equal(got, want) for got, want in zip(result["sums"], expected, strict=True)
            ), dtype
            assert result["in place"]
            assert result["works"] == bool(sizes)
            assert result["backend"] == "gloo"


def waited_for_twice() -> list[torch.Tensor]:
    given = [torch.ones(3), torch.ones(2)]
    (work,) = AllReduce(group(), CPU)(given)
    work.wait()
    given[0].fill_(7.0)
    work.wait()
    return given


def test_a_second_wait_does_not_overwrite_later_writes(ranks):
    for first, second in ranks(2)(waited_for_twice):
        assert torch.equal(first, torch.full((3,), 7.0))
        assert torch.equal(second, torch.full((2,), 2.0))


class Recorder:
    """A process group that records the names of its methods that are used."""

    def __init__(self) -> None:
        self.used_names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.used_names.add(name)
        return getattr(group(), name)


def launched() -> set[str]:
    recorder: Any = Recorder()
    many = [torch.ones(4), torch.ones(6)]
    works = [
        *AllReduce(recorder, CPU)(many),
        *ReduceScatter(recorder, CPU)([torch.empty(2), torch.empty(3)], many),
        *AllGather(recorder, CPU)(many, [torch.ones(2), torch.ones(3)]),
    ]
    for work in works:
        work.wait()
    return recorder.used_names - {"rank", "size", "_get_backend"}


def test_gloo_launches_nothing_with_a_long_name(ranks):
    """See [Note: one tensor on gloo]: gloo calls these ALLREDUCE, BROADCAST and ALLTOALL_BASE."""
    assert ranks(2)(launched) == [{"allreduce", "alltoall_base", "broadcast"}] * 2


class Nccl:
    """A fake group whose backend runs synchronous calls on the current stream, and then returns no work."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def _get_backend(self, _device: torch.device) -> Nccl:
        return self

    def name(self) -> str:
        return "nccl"

    def wait(self) -> None:
        self.waited.append("wait")

    def _allgather_base(
        self, output: torch.Tensor, part: torch.Tensor, options: Any
    ) -> Nccl | None:
        output.copy_(part.repeat(2))
        return self if options.asyncOp else None

    def _reduce_scatter_base(
        self, output: torch.Tensor, terms: torch.Tensor, options: Any
    ) -> Nccl | None:
        assert options.reduceOp == dist.ReduceOp.AVG
        output.copy_(terms[:2])
        return self if options.asyncOp else None


def test_synchronous_calls_run_on_the_current_stream():
    group: Any = Nccl()
    gather, scatter = AllGather(group, CPU), ReduceScatter(group, CPU, average=True)
    part, output, sums = torch.arange(2.0), torch.empty(4), torch.empty(2)
    gather.run(output, part)
    scatter.run(sums, output)
    assert not group.waited
    assert output.tolist() == [0, 1, 0, 1]
    assert sums.tolist() == [0, 1]
    for work in (*gather([output], [part]), *scatter([sums], [output])):
        work.wait()
    assert len(group.waited) == 2, "asynchronous calls have a work"


def blocking() -> list[torch.Tensor]:
    part, output = torch.full((3,), 1.0 + dist.get_rank()), torch.empty(6)
    AllGather(group(), CPU).run(output, part)
    sums = torch.empty(3)
    ReduceScatter(group(), CPU).run(sums, output.clone())
    return [output, sums]


def test_synchronous_calls_wait_for_gloo(ranks):
    gathered = torch.tensor([1.0, 1, 1, 2, 2, 2])
    for rank, found in enumerate(ranks(2)(blocking)):
        assert torch.equal(found[0], gathered)
        assert torch.equal(found[1], torch.full((3,), 2.0 + 2 * rank))

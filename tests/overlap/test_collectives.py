"""All-reduces, as features issue them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.collectives import AllReduce, backend_name

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int32]


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def tensors(rank: int, sizes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    # Small integers: their sums are exact in every dtype, whatever the order.
    real = [torch.randint(-8, 8, (2, *size), generator=generator).to(torch.float64) for size in sizes]
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tensors_are_summed_in_place_by_one_launch(ranks, world, dtype):
    sizes = [(5,), (2, 3), (), (0,), (40, 50)]
    expected = [sum(parts) for parts in zip(*(tensors(r, sizes, dtype) for r in range(world)), strict=True)]
    for result in ranks(world)(summed, sizes, dtype):
        assert all(torch.equal(got, want) for got, want in zip(result["sums"], expected, strict=True))
        assert result["in place"]
        assert result["works"] == 1
        assert result["backend"] == "gloo"


@pytest.mark.parametrize(("sizes", "works"), [([(4, 3)], 1), ([], 0)])
def test_one_tensor_or_none(ranks, sizes, works):
    for result in ranks(2)(summed, sizes, torch.float32):
        assert result["works"] == works
        for got, a, b in zip(result["sums"], *(tensors(r, sizes, torch.float32) for r in range(2)), strict=True):
            assert torch.equal(got, a + b)


def in_a_subgroup() -> torch.Tensor:
    pair = dist.new_group([0, 2])
    value = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() != 1:
        for work in AllReduce(pair, CPU)([value]):
            work.wait()
    return value


def test_only_the_groups_ranks_take_part(ranks):
    assert ranks(3)(in_a_subgroup) == [torch.tensor([4.0]), torch.tensor([2.0]), torch.tensor([4.0])]

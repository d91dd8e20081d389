"""The arithmetic of chunks, routes and buffers; ranks exchange nothing but counts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ovpatch_plugins.pipe_experts.all_to_all import RowBuffer, join_rows, split_rows
from ovpatch_plugins.pipe_experts.grouped_gemm import _is_aligned
from ovpatch_plugins.pipe_experts.routing import (
    CUTS,
    ChunkPlan,
    PlanCandidates,
    Splits,
    compute_capacity,
    drop_over_capacity,
    make_plan,
    route_tokens,
)

SIZES = st.integers(1, 6)


@given(world=SIZES, local=SIZES, how=st.sampled_from(CUTS), parts=st.integers(0, 8))
def test_every_expert_is_in_one_group(world, local, how, parts):
    found = make_plan(world, local, how, parts)
    assert [expert for group in found.expert_groups for expert in group] == list(range(local))
    assert all(len(group) > 0 for group in found.expert_groups)
    assert len(found.chunks) == len(found.expert_groups) * found.token_chunks
    assert sorted(found.compute_positions()) == list(range(world * local))


def test_numbers_of_parts():
    shapes = {("auto", 0, 8): 1, ("auto", 2, 8): 1, ("none", 5, 8): 1}
    shapes |= {
        ("experts", 0, 8): 4,
        ("experts", 0, 1): 1,
        ("experts", 2, 8): 2,
        ("experts", 9, 3): 3,
    }
    for (how, parts, local), count in shapes.items():
        assert len(make_plan(2, local, how, parts).chunks) == count, (how, parts, local)
    assert len(make_plan(1, 8).chunks) == 1
    assert len(make_plan(2, 8, "tokens").chunks) == 2
    assert len(make_plan(2, 8, "tokens", 5).chunks) == 5
    with pytest.raises(ValueError, match="Choose one of auto, none, experts, tokens"):
        make_plan(2, 2, "expert")
    with pytest.raises(ValueError, match="Give a number of parts"):
        make_plan(2, 2, "tokens", -1)


def test_positions_are_by_group_and_then_by_rank():
    assert ChunkPlan(2, (range(1), range(1, 3))).compute_positions() == [0, 2, 3, 1, 4, 5]


def test_counts_by_part():
    by_rank = [[[1, 2, 3], [4, 5, 6]], [[0, 1, 0], [7, 0, 9]]]  # [rank][chunk][expert]
    found = Splits.from_counts(ChunkPlan(2, (range(1), range(1, 3)), 2), by_rank, by_rank)
    assert found.input_splits == [[1, 0], [5, 1], [4, 7], [11, 9]]
    assert found.expert_splits[1] == [[2, 3], [1, 0]]
    assert found.output_splits(3) == [11, 9]
    assert found.chunk_sizes() == [1, 6, 11, 20]


@given(
    tokens=st.integers(0, 12),
    top_k=st.integers(1, 3),
    experts=st.integers(1, 5),
    capacity=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_capacity(tokens, top_k, experts, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    found = drop_over_capacity(index, experts, capacity).flatten().tolist()
    left = [capacity] * experts
    for before, after in zip(index.flatten().tolist(), found, strict=True):
        stays = before >= 0 and left[before] > 0
        assert after == (before if stays else -1)
        if stays:
            left[before] -= 1


def test_compute_capacity():
    assert compute_capacity(10, 2, 8, 1.0) == 3
    assert compute_capacity(16, 2, 8, 1.25) == 5
    assert compute_capacity(0, 2, 8, 1.0) == 0


def routed(
    index: list[list[int]], local: int, how: str, parts: int
) -> tuple[list[int], list[list[int]]]:
    world = dist.get_world_size()
    found = route_tokens(
        torch.tensor(index), PlanCandidates(make_plan(world, local, how, parts)), dist.group.WORLD
    )
    return found.order.tolist(), found.splits.input_splits


def test_rows_are_sent_by_part_then_by_rank_then_by_expert(ranks):
    index = [[3, 0], [1, -1], [0, 2], [2, 1]]
    for order, sent in ranks(2)(routed, index, 2, "experts", 2):
        assert order == [1, 4, 5, 6, 2, 7, 0]
        assert sent == [[2, 2], [2, 1]]
    for order, sent in ranks(2)(routed, index, 2, "tokens", 2):
        assert order == [1, 2, 0, 4, 7, 5, 6]
        assert sent == [[2, 1], [2, 2]]
    for order, sent in ranks(2)(routed, index, 2, "none", 0):
        assert order == [1, 4, 2, 7, 5, 6, 0]
        assert sent == [[4, 3]]


def misrouted(expert: int) -> str:
    """Route a token to a wrong expert on the last rank alone; return the error."""
    index = torch.tensor([[expert if dist.get_rank() == 1 else 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="route to 0 to 3, or -1 for none") as caught:
        route_tokens(index, PlanCandidates(make_plan(2, 2)), dist.group.WORLD)
    return str(caught.value)


@pytest.mark.parametrize("expert", [4, -2])
def test_an_unknown_expert_is_an_error_on_all_ranks(ranks, expert):
    for error in ranks(2)(misrouted, expert):
        assert f"rank 1 routes a token to expert {expert}, but 2 ranks with 2 experts" in error


def test_chunks_share_memory_until_they_are_joined():
    memory = RowBuffer([2, 0, 3])
    like = torch.empty(1, 4)
    parts = [memory.get_chunk(i, like).fill_(i) for i in range(3)]
    joined = memory.join_chunks(parts)
    assert joined.data_ptr() == parts[0].data_ptr()
    assert joined[:, 0].tolist() == [0, 0, 2, 2, 2]
    assert memory.get_chunk(0, like).data_ptr() != joined.data_ptr(), (
        "the buffer writes no joined rows again"
    )
    memory.join_chunks([memory.get_chunk(i, like) for i in range(3)])
    elsewhere = [torch.full((size, 4), float(i)) for i, size in enumerate((2, 0, 3))]
    assert torch.equal(memory.join_chunks(elsewhere), joined)
    mixed = [memory.get_chunk(0, like).fill_(0), elsewhere[1], elsewhere[2]]
    assert torch.equal(memory.join_chunks(mixed), joined)


def test_cut_and_join_are_their_own_gradients():
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def through(rows: torch.Tensor) -> torch.Tensor:
        parts = split_rows(rows, RowBuffer([2, 0, 3]))
        return join_rows([part * (i + 1) for i, part in enumerate(parts)], RowBuffer([2, 0, 3]))

    assert torch.autograd.gradcheck(through, (rows,))


def test_alignment_that_the_grouped_kernel_can_read():
    rows = torch.empty(6, 32, dtype=torch.bfloat16)
    stacked = torch.empty(3, 16, 32, dtype=torch.bfloat16)
    readable = [
        rows,
        rows.t(),
        rows[:, :8],
        rows[1:],
        stacked,
        stacked.transpose(-2, -1),
        stacked[1:],
    ]
    assert all(map(_is_aligned, readable))
    odd = torch.empty(6, 9, dtype=torch.bfloat16)
    unreadable = [
        rows[:, 1:],
        rows[:, ::2],
        rows[:1].expand(6, 32),
        odd,
        odd.t(),
        torch.ones(()).expand(6, 32),
    ]
    assert not any(map(_is_aligned, unreadable))

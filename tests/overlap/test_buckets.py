"""Buckets: the tensors that they pack and unpack. The tests sum by hand, without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
from tests.overlap.gradients import ALONE, FLAT, address, backward, finish, params, reduce, replicas

SHAPES = ((3, 4), (5,), (20, 30), (), (0, 2), (1, 7, 1))
# A value of flat_below with which (5,), (), (0, 2) and (1, 7, 1) use the flat tensor.
MIXED = 12
WAYS = [ALONE, MIXED, FLAT]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("flat_below", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_divides_exactly_as_a_plain_multiplication(dtype, flat_below):
    given = params(*SHAPES, dtype=dtype)
    expected = backward(given)
    pieces = GradBucket(range(6), given, flat_below=flat_below).pack(3)
    small = [g for g in expected if g.numel() < max(flat_below, 1)]
    large = [g for g in expected if g.numel() >= max(flat_below, 1)]
    flat = [torch.cat([g.flatten() for g in small])] if any(g.numel() for g in small) else []
    wanted = [(g * (1.0 / 3)).flatten() for g in flat + large]
    assert len(pieces) == len(wanted)
    assert all(torch.equal(piece.flatten(), w) for piece, w in zip(pieces, wanted, strict=True))


def test_ranks_with_different_kinds_of_gradients_pack_the_same_sizes():
    """Check three ranks: one reduces all gradients in place, one needs copies, and one has no gradients."""
    ranks = [params(*SHAPES)]
    ranks += [replicas(ranks[0]), replicas(ranks[0])]
    values = [backward(ranks[0]), backward(ranks[1])]
    held = [p.grad.detach() for p in ranks[1]]
    buckets = [GradBucket(range(6), given, flat_below=MIXED) for given in ranks]
    packs = [bucket.pack(3) for bucket in buckets]
    sizes = [
        [(piece.numel(), piece.dtype) for piece in pack]
        for pack in [*packs, buckets[0].make_zeros()]
    ]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert not any(piece.any() for piece in [*packs[2], *buckets[0].make_zeros()])
    reduced_in_place = [
        {address(piece) for piece in pack} & {address(p.grad) for p in given}
        for pack, given in zip(packs[:2], ranks, strict=False)
    ]
    assert len(reduced_in_place[0]) == 2
    assert not reduced_in_place[1]
    assert all(torch.equal(h, v) for h, v in zip(held, values[1], strict=True))


def test_a_bucket_of_empty_parameters_has_nothing_to_reduce():
    given = params((0,), (3, 0))
    bucket = GradBucket([0, 1], given)
    backward(given)
    assert bucket.pack(2) == []
    assert bucket.make_zeros() == []
    assert bucket.nbytes == 0
    given[1].grad = None
    finish(bucket)
    assert bucket.pack(2) == []
    finish(bucket)
    assert given[1].grad.shape == (3, 0)


@pytest.mark.parametrize("flat_below", WAYS)
def test_nbytes_is_the_size_of_the_tensors_for_the_collective(flat_below):
    given = params(*SHAPES)
    for dtype in (None, torch.float64):
        bucket = GradBucket(range(6), given, dtype=dtype, flat_below=flat_below)
        assert bucket.nbytes == sum(piece.nbytes for piece in bucket.make_zeros())
        backward(given)
        assert bucket.nbytes == sum(piece.nbytes for piece in bucket.pack(2))
        assert bucket.nbytes == sum(p.numel() for p in given) * bucket.dtype.itemsize
        bucket.drop_inputs()


@pytest.mark.parametrize("flat_below", WAYS)
def test_a_new_gradient_has_the_strides_of_its_parameter(flat_below):
    """Check a rank without a gradient. As in stock PyTorch, it gets the layout of the parameter, if that is dense."""
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    gapped, turned = nn.Parameter(torch.randn(4, 10)[:, ::2]), nn.Parameter(torch.randn(5, 7).t())
    mine = [conv.weight, gapped, turned]
    theirs = [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in mine]
    theirs[1] = nn.Parameter(torch.randn(4, 10)[:, ::2])
    values = backward(mine)
    reduce([GradBucket(range(3), given, flat_below=flat_below) for given in (mine, theirs)])
    assert [g.grad.stride() for g in theirs] == [conv.weight.stride(), (5, 1), (1, 7)]
    assert [g.grad.stride() for g in mine] == [conv.weight.stride(), (5, 1), (1, 7)]
    for p, q, value in zip(mine, theirs, values, strict=True):
        assert torch.equal(p.grad, value * 0.5)
        assert torch.equal(q.grad, value * 0.5)


@pytest.mark.parametrize("flat_below", [ALONE, FLAT])
def test_a_gradient_with_another_layout_than_its_parameter_is_matched_by_position(flat_below):
    """Check that a transposed gradient is not added in the order of its memory, as a collective would do."""
    mine, theirs = params((4, 6)), params((4, 6))
    values = [backward(mine)[0], backward(theirs)[0]]
    mine[0].grad = values[0].t().contiguous().t()
    assert mine[0].grad.stride() == (1, 4)
    reduce([GradBucket([0], given, flat_below=flat_below) for given in (mine, theirs)])
    for p in (mine[0], theirs[0]):
        assert torch.equal(p.grad, values[0] * 0.5 + values[1] * 0.5)
    assert mine[0].grad.stride() == (1, 4)


@pytest.mark.parametrize("flat_below", [ALONE, FLAT])
def test_gradients_made_in_inference_mode_can_be_used_for_training(flat_below):
    mine, theirs = params((3,)), params((3,))
    backward(mine)
    with torch.inference_mode():
        reduce([GradBucket([0], given, flat_below=flat_below) for given in (mine, theirs)])
    assert not mine[0].grad.is_inference()
    assert not theirs[0].grad.is_inference()
    # This adds to the gradient in place.
    (theirs[0] * 2).sum().backward()


def test_a_sparse_gradient_among_dense_ones_names_the_remedy():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    for flat_below in (ALONE, FLAT):
        bucket = GradBucket([0], [embedding.weight], flat_below=flat_below)
        with pytest.raises(
            RuntimeError,
            match=r"shape \(5, 2\) has a sparse gradient.*Set sparse=True in the module",
        ):
            bucket.pack(2)


def test_the_flat_tensor_is_kept_for_the_next_step_and_other_tensors_are_not():
    given = params((3, 4), (10, 8))
    bucket = GradBucket([0, 1], given, flat_below=50)
    seen = set()
    for _ in range(3):
        backward(given)
        flat, _large = bucket.pack(2)
        seen.add(address(flat))
        finish(bucket)
        for p in given:
            assert address(p.grad) != address(flat)
            p.grad = None
    assert len(seen) == 1
    assert not bucket._inputs

"""Which gradients are reduced in their own memory: those that nobody else can see changing."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel.bucket import GradBucket
from tests.overlap.gradients import ALONE, address, backward, finish, params

SHAPE = (30, 40)


def in_place(param: nn.Parameter, **pack) -> bool:
    """Tell whether the gradient is reduced where it is; check what comes out either way."""
    grad, before = param.grad, param.grad.clone()
    bucket = GradBucket([0], [param], flat_below=ALONE)
    (piece,) = bucket.pack(2, **pack)
    result = address(piece) == address(grad)
    if not result:
        assert torch.equal(grad, before)
    piece.mul_(2)  # the other rank has the same
    finish(bucket)
    assert param.grad is grad
    assert torch.equal(grad, before)
    return result


def test_what_autograd_made_is_reduced_in_place_again_and_again():
    (param,) = params(SHAPE)
    for _ in range(3):
        backward([param])
        assert in_place(param)
    param.grad = None
    backward([param])
    assert in_place(param)


def test_a_second_reference_to_the_same_tensor_object_does_not_matter():
    """It sees the average after the step, as under stock, which copies it there."""
    (param,) = params(SHAPE)
    backward([param])
    held = param.grad
    assert in_place(param)
    assert param.grad is held


ALIASES = {
    "detached": lambda g: g.detach(),
    "flat": lambda g: g.view(-1),
    "part": lambda g: g[3],
    "numpy": lambda g: g.numpy(),
    "storage": lambda g: g.untyped_storage(),
}


@pytest.mark.parametrize("how", ALIASES)
def test_memory_that_somebody_else_looks_at_is_left_alone_until_the_end(how):
    (param,) = params(SHAPE)
    backward([param])
    alias = ALIASES[how](param.grad)
    assert not in_place(param)
    del alias
    assert in_place(param)


def test_a_gradient_that_is_a_slice_of_the_users_own_tensor():
    given = params((3, 4), (5,))
    pool = torch.zeros(17)
    given[0].grad, given[1].grad = pool[:12].view(3, 4), pool[12:]
    backward(given)
    assert not in_place(given[0])
    assert not in_place(given[1])
    del pool  # each of them still shares with the other
    assert not in_place(given[0])


@pytest.mark.parametrize("exchange", [torch.from_numpy, torch.from_dlpack])
def test_what_other_libraries_read_gets_the_result(exchange):
    """They hold memory without a reference that could be counted; reduced in place or not, it ends right."""
    (param,) = params(SHAPE)
    array = numpy.zeros(SHAPE, dtype=numpy.float32)
    param.grad = exchange(array)
    expected = backward([param])[0]
    in_place(param)
    assert numpy.array_equal(array, expected.numpy())


ODD = {
    "part of a graph": lambda g: g.clone().requires_grad_(),
    "conjugated": lambda g: torch.complex(g, g).conj(),
    "negated": lambda g: torch.complex(g, g).conj().imag,
    "transposed": lambda g: g.t().contiguous().t(),
    "with holes": lambda g: torch.empty_strided(g.shape, (80, 2)).copy_(g),
    "expanded": lambda g: g[:1].clone().expand(g.shape),
    "subclass": lambda g: g.clone().as_subclass(Tagged),
}


class Tagged(torch.Tensor):
    """A tensor whose operations may mean something else."""


@pytest.mark.parametrize("how", ODD)
def test_gradients_that_are_no_plain_memory_go_through_a_tensor_of_their_own(how):
    (param,) = params(SHAPE, dtype=torch.complex64 if how == "conjugated" else torch.float32)
    odd = ODD[how](torch.randn(SHAPE))
    param.grad = odd
    before = odd.detach().resolve_conj().resolve_neg().clone()
    bucket = GradBucket([0], [param], flat_below=ALONE)
    (piece,) = bucket.pack(2)
    assert address(piece) != address(odd)
    assert torch.equal(piece.view(SHAPE), before * 0.5)
    assert torch.equal(odd, before)
    if how != "expanded":  # nobody can write into that
        piece.mul_(4)
        finish(bucket)
        assert param.grad is odd
        assert torch.equal(odd, before * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wider_sum_goes_through_a_tensor_of_its_own_and_is_rounded_once(dtype):
    for flat_below in (ALONE, 1 << 60):
        given = params(SHAPE, (7,), dtype=dtype)
        expected = backward(given)
        given[1].grad = None
        bucket = GradBucket([0, 1], given, dtype=torch.float32, flat_below=flat_below)
        pieces = bucket.pack(3)
        assert {piece.dtype for piece in pieces} == {torch.float32}
        flat = torch.cat([piece.flatten() for piece in pieces])
        assert torch.equal(flat[: expected[0].numel()], (expected[0].float() * (1.0 / 3)).flatten())
        for piece in pieces:
            piece.mul_(3).add_(1e-4)
        finish(bucket)
        assert torch.equal(given[0].grad, (expected[0].float() * (1.0 / 3) * 3 + 1e-4).to(dtype))
        assert torch.equal(given[1].grad, torch.full((7,), 1e-4).to(dtype))
        assert given[1].grad.dtype is dtype


def test_two_leaves_that_autograd_gives_one_memory_are_reduced_apart():
    given = params((4, 6), (6, 4))
    (given[0].view(-1) + given[1].view(-1)).square().sum().backward()
    assert address(given[0].grad) == address(given[1].grad), "the case that this test is about"
    expected = [p.grad.clone() for p in given]
    bucket = GradBucket([0, 1], given, flat_below=ALONE)
    pieces = bucket.pack(4)
    assert len({address(t) for t in (*pieces, given[0].grad)}) == 3
    for piece in pieces:
        piece.mul_(4)
    finish(bucket)
    assert all(torch.equal(p.grad, e) for p, e in zip(given, expected, strict=True))


@pytest.mark.parametrize("flat_below", [ALONE, 50, 1 << 60])
@pytest.mark.parametrize("divisor", [1, 4])
def test_parameters_that_nobody_used_keep_what_they_had(flat_below, divisor):
    given = params((3, 4), (10, 8), (6,), (9, 9))
    bucket = GradBucket([7, 8, 9, 10], given, flat_below=flat_below)
    backward(given)
    given[2].grad = given[3].grad = None
    before = given[1].grad.clone()
    for piece in bucket.pack(divisor, absent=(8, 9, 10)):
        piece.mul_(3.7)
    finish(bucket, skip=(8, 9, 10))
    assert torch.equal(given[1].grad, before)
    assert given[2].grad is given[3].grad is None


@pytest.mark.parametrize("flat_below", [ALONE, 1 << 60])
def test_a_parameter_that_only_others_used_gets_their_gradient(flat_below):
    given = params((3,), (2,))
    bucket = GradBucket([0, 1], given, flat_below=flat_below)
    backward(given[:1])
    for piece in bucket.pack(2, absent=(1,)):
        piece.add_(1.0)
    finish(bucket)
    assert torch.equal(given[1].grad, torch.ones(2))
    address_of_first = address(given[1].grad)
    given[1].grad, kept = None, given[1].grad
    for piece in bucket.pack(2, absent=(1,)):
        piece.add_(5.0)
    finish(bucket)
    assert address(given[1].grad) != address_of_first, "a gradient that was handed out is not reused"
    assert torch.equal(kept, torch.ones(2))

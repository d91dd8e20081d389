"""Which gradients are reduced in their own memory: those that nobody else can see changing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
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


@pytest.mark.parametrize("flat_below", [ALONE, 50, 1 << 60])
def test_a_gradient_dropped_while_it_is_reduced_comes_back(flat_below):
    given = params((3, 4), (10, 8))
    bucket = GradBucket([0, 1], given, flat_below=flat_below)
    expected = backward(given)
    pieces = bucket.pack(1)
    for p in given:
        p.grad = None
    for piece in pieces:
        piece.mul_(2)
    finish(bucket)
    assert all(torch.equal(p.grad, 2 * e) for p, e in zip(given, expected, strict=True))
    held = [p.grad for p in given]
    for p in given:
        p.grad = None
    backward(given)
    for piece in bucket.pack(1):
        piece.zero_()
    finish(bucket)
    assert all(torch.equal(h, 2 * e) for h, e in zip(held, expected, strict=True)), (
        "it belongs to the user now"
    )


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

"""Gradients are reduced in their own memory if no other code can see them change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
from tests.overlap.gradients import ALONE, address, backward, finish, params

SHAPE = (30, 40)


def in_place(param: nn.Parameter, **pack) -> bool:
    """Return whether the gradient is reduced in its own memory; check the result in both cases."""
    grad, before = param.grad, param.grad.clone()
    bucket = GradBucket([0], [param], flat_below=ALONE)
    (piece,) = bucket.pack(2, **pack)
    result = address(piece) == address(grad)
    if not result:
        assert torch.equal(grad, before)
    # A second rank with the same gradient would add as much.
    piece.mul_(2)
    finish(bucket)
    assert param.grad is grad
    assert torch.equal(grad, before)
    return result


def test_gradients_of_autograd_are_reduced_in_place_in_every_step():
    (param,) = params(SHAPE)
    for _ in range(3):
        backward([param])
        assert in_place(param)
    param.grad = None
    backward([param])
    assert in_place(param)


def test_a_second_reference_to_the_same_tensor_object_does_not_matter():
    """Check that the reference shows the average afterwards, as in stock PyTorch, which copies the average there."""
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
def test_memory_that_other_code_can_read_is_not_changed_before_the_end(how):
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
    """A tensor class whose operations may differ from those of torch."""


@pytest.mark.parametrize("how", ODD)
def test_gradients_that_are_not_plain_memory_are_reduced_in_a_copy(how):
    (param,) = params(SHAPE, dtype=torch.complex64 if how == "conjugated" else torch.float32)
    odd = ODD[how](torch.randn(SHAPE))
    param.grad = odd
    before = odd.detach().resolve_conj().resolve_neg().clone()
    bucket = GradBucket([0], [param], flat_below=ALONE)
    (piece,) = bucket.pack(2)
    assert address(piece) != address(odd)
    assert torch.equal(piece.view(SHAPE), before * 0.5)
    assert torch.equal(odd, before)
    # No code can write into an expanded tensor.
    if how != "expanded":
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
        "the tensor belongs to the user now"
    )


@pytest.mark.parametrize("flat_below", [ALONE, 50, 1 << 60])
@pytest.mark.parametrize("divisor", [1, 4])
def test_parameters_that_no_rank_used_keep_their_gradients(flat_below, divisor):
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

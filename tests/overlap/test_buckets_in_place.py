"""Which gradients are reduced in their own memory: those that nobody else can see changing."""

from __future__ import annotations

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

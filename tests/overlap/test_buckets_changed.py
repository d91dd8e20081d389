"""What happens to ``p.grad`` between pack and unpack, by hooks of the user, and what is staged beforehand."""

from __future__ import annotations

import pytest
import torch

from ovpatch.overlap.data_parallel.bucket import GradBucket
from tests.overlap.gradients import ALONE, FLAT, address, backward, finish, params

WAYS = pytest.mark.parametrize("flat_below", [ALONE, 50, FLAT])
SHAPES = ((3, 4), (10, 8))


@WAYS
def test_a_gradient_dropped_while_it_is_reduced_comes_back(flat_below):
    given = params(*SHAPES)
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
    assert all(torch.equal(h, 2 * e) for h, e in zip(held, expected, strict=True)), "it belongs to the user now"


@WAYS
def test_a_gradient_replaced_while_it_is_reduced_is_filled_where_it_is(flat_below):
    given = params(*SHAPES)
    bucket = GradBucket([0, 1], given, flat_below=flat_below)
    expected = backward(given)
    pieces = bucket.pack(1)
    new = [torch.full_like(p, 7.0) for p in given]
    for p, n in zip(given, new, strict=True):
        p.grad = n
    for piece in pieces:
        piece.mul_(2)
    finish(bucket)
    for p, n, e in zip(given, new, expected, strict=True):
        assert p.grad is n
        assert torch.equal(n, 2 * e)


@WAYS
def test_a_staged_gradient_is_what_it_was_then(flat_below):
    given = params(*SHAPES)
    bucket = GradBucket([4, 5], given, flat_below=flat_below)
    expected = backward(given)
    bucket.stage_grad(5, 4)
    with torch.no_grad():
        for p in given:
            p.grad.add_(1.0)
    bucket.stage_grad(5, 4)  # once is enough: the second does not look again
    pieces = torch.cat([piece.flatten() for piece in bucket.pack(4)])
    small_first = flat_below == 50
    wanted = [(expected[0] + 1.0) * 0.25, expected[1] * 0.25]
    assert torch.equal(pieces, torch.cat([w.flatten() for w in wanted])), small_first
    finish(bucket)
    assert torch.equal(given[1].grad, wanted[1])


@WAYS
def test_a_staged_gradient_may_be_missing(flat_below):
    given = params(*SHAPES)
    bucket = GradBucket([4, 5], given, flat_below=flat_below)
    backward(given[:1])
    bucket.stage_grad(5, 2)
    given[1].grad = torch.ones_like(given[1])
    pieces = bucket.pack(2)
    assert not pieces[-1].flatten()[-80:].any()
    finish(bucket)
    assert not given[1].grad.any()


@WAYS
def test_after_a_failed_backward_the_next_one_packs_afresh(flat_below):
    given = params(*SHAPES)
    bucket = GradBucket([0, 1], given, flat_below=flat_below)
    backward(given)
    bucket.stage_grad(0, 2)
    bucket.pack(2)
    bucket.drop_inputs()
    assert bucket.unpack() == []
    for p in given:
        p.grad = None
    expected = backward(given)
    flat = torch.cat([piece.flatten() for piece in bucket.pack(2)])
    assert torch.equal(flat, torch.cat([(e * 0.5).flatten() for e in expected]))


@WAYS
def test_unpack_forgets_what_it_has_done(flat_below):
    given = params(*SHAPES)
    bucket = GradBucket([0, 1], given, flat_below=flat_below)
    expected = backward(given)
    bucket.pack(2)
    finish(bucket)
    assert bucket.unpack() == []
    assert all(torch.equal(p.grad, e * 0.5) for p, e in zip(given, expected, strict=True))


def test_the_flat_tensor_is_used_again_and_tensors_of_their_own_are_not_kept():
    given = params(*SHAPES)
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

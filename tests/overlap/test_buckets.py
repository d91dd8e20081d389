"""Flat buckets: what goes in, what comes out, and whose memory it is. No process group: the sum is done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ovpatch.overlap.buckets import GradBucket


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def backward(given: list[nn.Parameter]) -> list[torch.Tensor]:
    """Give every parameter a gradient as the engine does; return their values."""
    torch.stack([(p * torch.randn_like(p)).sum() for p in given]).sum().backward()
    return [p.grad.clone() for p in given]


def step(bucket: GradBucket, divisor: int = 4, *, always_view: bool = False, absent: tuple[int, ...] = ()) -> None:
    flat = bucket.pack(divisor, absent=absent, always_view=always_view)
    flat.mul_(divisor)  # the sum over ranks that all hold the same
    bucket.unpack(always_view=always_view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_pack_divides_exactly_as_a_plain_multiplication(dtype):
    given = params((3, 4), (5,), (200, 300), (), (0, 2), dtype=dtype)
    expected = backward(given)
    flat = GradBucket(range(5), given).pack(3, always_view=False)
    assert torch.equal(flat, torch.cat([(g * (1.0 / 3)).flatten() for g in expected]))


def test_large_gradients_become_views_of_the_bucket_and_its_memory_is_used_again():
    given = params((300, 400), (200, 300))
    bucket = GradBucket([0, 1], given)
    storages = set()
    for _ in range(3):
        expected = backward(given)
        step(bucket)
        assert all(torch.equal(p.grad, e) for p, e in zip(given, expected, strict=True))
        storages |= {p.grad.untyped_storage().data_ptr() for p in given}
        for p in given:
            p.grad = None
    assert len(storages) == 1


def test_small_gradients_keep_their_own_memory():
    given = params((3, 4), (5,))
    bucket = GradBucket([0, 1], given)
    expected = backward(given)
    own = [p.grad.data_ptr() for p in given]
    step(bucket)
    assert [p.grad.data_ptr() for p in given] == own
    assert all(torch.equal(p.grad, e) for p, e in zip(given, expected, strict=True))


@pytest.mark.parametrize("shape", [(3, 4), (300, 400)])
@pytest.mark.parametrize("hold", [lambda g: g, lambda g: g.detach(), lambda g: g[0], lambda g: g.view(-1)])
def test_what_is_held_is_not_overwritten(hold, shape):
    given = params(shape, (5, 2))
    bucket = GradBucket([0, 1], given)
    backward(given)
    step(bucket)
    held = hold(given[0].grad)
    before = held.clone()
    for p in given:
        p.grad = None
    backward(given)
    step(bucket)
    assert torch.equal(held, before)


@pytest.mark.parametrize("shape", [(3, 4), (300, 400)])
def test_a_gradient_that_somebody_holds_is_filled_in_place(shape):
    given = params(shape)
    bucket = GradBucket([0], given)
    given[0].grad = torch.zeros(shape)
    held = given[0].grad
    expected = backward(given)
    step(bucket)
    assert given[0].grad is held
    assert torch.equal(held, expected[0])


def test_kept_gradients_accumulate_in_the_bucket():
    given = params((3, 4), (5,))
    bucket = GradBucket([0, 1], given)
    first = backward(given)
    step(bucket)
    total = backward(given)
    step(bucket)
    for p, a, b in zip(given, first, total, strict=True):
        assert torch.equal(p.grad, b)
        assert not torch.equal(a, b)


@pytest.mark.parametrize("shape", [(5,), (300, 400)])
def test_parameters_that_nobody_used_keep_what_they_had(shape):
    given = params((3, 4), shape, (6,))
    bucket = GradBucket([7, 8, 9], given)
    backward(given)
    step(bucket)
    given[2].grad = None
    before = given[1].grad.clone()
    bucket.pack(4, absent=(8, 9), always_view=False).mul_(3.7)
    bucket.unpack(skip=(8, 9), always_view=False)
    assert torch.equal(given[1].grad, before)
    assert given[2].grad is None


def test_a_parameter_that_only_others_used_gets_their_gradient():
    given = params((3,), (2,))
    bucket = GradBucket([0, 1], given)
    backward(given[:1])
    bucket.pack(2, absent=(1,), always_view=False).add_(1.0)
    bucket.unpack(always_view=False)
    assert torch.equal(given[1].grad, torch.ones(2))


def test_strides_follow_the_parameter():
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    gapped = nn.Parameter(torch.randn(4, 10)[:, ::2])
    given = [conv.weight, gapped]
    bucket = GradBucket([0, 1], given)
    backward(given)
    step(bucket, always_view=True)
    assert conv.weight.grad.stride() == conv.weight.stride()
    assert gapped.grad.is_contiguous()


def test_memory_first_made_under_inference_mode_is_good_for_training():
    given = params((3,))
    backward(given)
    with torch.inference_mode():
        bucket = GradBucket([0], given)
        bucket.pack(2, always_view=False)
    bucket.unpack(always_view=False)
    assert not given[0].grad.is_inference()

"""Counting of contributions to gradients."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel import grad_sync
from ovpatch.overlap.data_parallel.grad_bucket import GradBucket
from ovpatch.overlap.data_parallel.grad_sync import (
    HOOK,
    GradSync,
    SurplusGradientError,
    expect_gradients,
    mark_gradient,
    register_reducer,
)


class Owner:
    """A reducer that starts nothing."""

    def __init__(self, count: int = 3, params: list[nn.Parameter] | None = None) -> None:
        self.params = params or [nn.Parameter(torch.zeros(2)) for _ in range(count)]
        self.complete: list[int] = []
        buckets = [GradBucket([i], [param]) for i, param in enumerate(self.params)]
        names = [f"p{i}" for i in range(count)]
        with mock.patch.object(grad_sync, "Collectives"):
            self.sync = GradSync(buckets, mock.Mock(), feature="test", average=True, names=names)
        register_reducer(self.params, self)

    def fire(self, index: int, *, adds: bool = True, key: str = HOOK) -> None:
        if self.sync.count_grad(index, key, adds=adds):
            self.complete.append(index)

    def expect_contributions(self, index: int, count: int) -> None:
        self.sync.expect_marks(index, count)

    def mark_contribution(self, index: int, key: str) -> None:
        self.fire(index, key=key)


def opened() -> Owner:
    owner = Owner()
    owner.sync.start_backward()
    return owner


def test_one_mark_completes_a_parameter_and_open_starts_anew():
    owner = Owner()
    for _ in range(2):
        owner.sync.start_backward()
        owner.fire(1)
        assert owner.sync.missing_params() == [0, 2]
        owner.fire(0)
        owner.fire(2)
        assert owner.sync.missing_params() == []
    assert owner.complete == [1, 0, 2] * 2


def test_a_single_contribution_is_counted_in_one_call_and_anything_else_is_not():
    owner = Owner()
    assert owner.sync.count_once(0) is None, "no backward has begun"
    owner.sync.start_backward()
    assert owner.sync.count_once(0) == 0, "its bucket lacks none"
    assert owner.sync.missing_params() == [1, 2]
    assert owner.sync.count_once(0) is None, "which leaves the error to count_grad()"
    with pytest.raises(SurplusGradientError, match="'p0'"):
        owner.fire(0)
    expect_gradients(owner.params[1], 1)
    assert owner.sync.count_once(1) is None
    for counts in ([1, 2, 1], [1, 0, 1]):
        owner.sync.start_backward(counts)
        assert owner.sync.count_once(1) is None
    owner.sync.start_backward()
    owner.sync.skip_param(2)
    assert owner.sync.count_once(1) is None
    assert owner.sync.missing_params() == [0, 1, 2], "nothing was counted"


def test_a_declared_parameter_may_get_nothing_more_from_autograd_once_it_is_complete():
    owner = opened()
    expect_gradients(owner.params[0], 1)
    mark_gradient(owner.params[0], "chunk 0")
    owner.fire(0, adds=False)  # the chunked function returns None for the weight, and the hook still fires
    with pytest.raises(SurplusGradientError, match=r"'p0'.*autograd hook.*weights nowhere else"):
        owner.fire(0)


def test_two_declarations_add_up_until_the_parameter_is_complete():
    owner = opened()
    param = owner.params[1]
    for _ in range(2):
        expect_gradients(param, 2)
    for chunk in range(4):
        assert owner.complete == []
        mark_gradient(param, f"chunk {chunk}")
    assert owner.complete == [1]
    with pytest.raises(SurplusGradientError, match=r"once per forward"):
        expect_gradients(param, 2)


def test_a_declaration_after_an_undeclared_contribution_is_an_error():
    owner = opened()
    owner.fire(2)
    with pytest.raises(SurplusGradientError, match=r"'p2'.*not declared before the first"):
        expect_gradients(owner.params[2], 2)


@pytest.mark.parametrize("marks", [0, -1])
def test_there_is_at_least_one_mark(marks):
    owner = opened()
    with pytest.raises(ValueError, match=r"'p0'.*at least one"):
        expect_gradients(owner.params[0], marks)


def test_of_several_owners_each_is_told():
    first = opened()
    second = Owner(params=first.params)  # not open: its model is not the one whose backward runs
    expect_gradients(first.params[0], 1)
    mark_gradient(first.params[0], "chunk 0")
    assert (first.complete, second.complete) == ([0], [])


def test_parameters_that_nobody_counts_need_no_marks():
    stranger = nn.Parameter(torch.zeros(1))
    assert not expect_gradients(stranger, 2)
    mark_gradient(stranger, "chunk 0")


def test_a_reducer_is_held_weakly():
    owner = Owner()
    param = owner.params[0]
    del owner
    gc.collect()
    assert not expect_gradients(param, 1)

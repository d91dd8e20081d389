"""Counting of contributions to gradients."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ovpatch.overlap.data_parallel.backward_plan import PlanFacts, plan_backward
from ovpatch.overlap.data_parallel.grad_sync import (
    HOOK,
    GradReadiness,
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
        names = [f"p{i}" for i in range(count)]
        self.readiness = GradReadiness(
            self.params, [[i] for i in range(len(self.params))], names=names
        )
        register_reducer(self.params, self)

    def begin(self, counts: list[int] | None = None) -> None:
        facts = PlanFacts(
            has_order=True, is_static=counts is not None, has_learned=counts is not None
        )
        self.readiness.begin(plan_backward(facts, False), counts or ())

    def fire(self, index: int, *, adds: bool = True, key: str = HOOK) -> None:
        if self.readiness.count(index, key, adds=adds):
            self.complete.append(index)

    def expect_contributions(self, index: int, count: int) -> None:
        self.readiness.expect_marks(index, count)

    def mark_contribution(self, index: int, key: str) -> None:
        self.fire(index, key=key)


def opened() -> Owner:
    owner = Owner()
    owner.begin()
    return owner


def test_one_mark_completes_a_parameter_and_each_backward_starts_over():
    owner = Owner()
    for _ in range(2):
        owner.begin()
        owner.fire(1)
        assert owner.readiness.list_missing() == [0, 2]
        owner.fire(0)
        owner.fire(2)
        assert owner.readiness.list_missing() == []
    assert owner.complete == [1, 0, 2] * 2


def test_readiness_is_simple_if_each_gradient_gets_one_contribution():
    owner = Owner()
    readiness = owner.readiness
    assert not readiness.is_simple, "no backward has begun"
    owner.begin()
    assert readiness.is_simple
    expect_gradients(owner.params[1], 1)
    assert not readiness.is_simple
    owner.begin()
    readiness.skip(2)
    assert not readiness.is_simple
    for counts in ([1, 2, 1], [1, 0, 1]):
        owner.begin(counts)
        assert not readiness.is_simple
    owner.begin()
    owner.fire(0)
    with pytest.raises(SurplusGradientError, match="'p0'"):
        owner.fire(0)
    readiness.end()
    assert not readiness.is_simple


def test_a_declared_parameter_may_get_nothing_more_from_autograd_once_it_is_complete():
    owner = opened()
    expect_gradients(owner.params[0], 1)
    mark_gradient(owner.params[0], "chunk 0")
    # The chunked function returns None for the weight, but the hook fires.
    owner.fire(0, adds=False)
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


def test_marks_reach_all_reducers_of_a_parameter():
    first = opened()
    # The second reducer has no backward, because its model is not in use.
    second = Owner(params=first.params)
    expect_gradients(first.params[0], 1)
    mark_gradient(first.params[0], "chunk 0")
    assert (first.complete, second.complete) == ([0], [])


def test_parameters_without_a_reducer_need_no_marks():
    param = nn.Parameter(torch.zeros(1))
    assert not expect_gradients(param, 2)
    mark_gradient(param, "chunk 0")


def test_a_reducer_is_held_weakly():
    owner = Owner()
    param = owner.params[0]
    del owner
    gc.collect()
    assert not expect_gradients(param, 1)

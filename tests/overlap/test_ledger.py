"""Readiness counting."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ovpatch.overlap.ledger import ANY, GradLedger, SurplusGradientError, expect_gradients, mark_gradient


class Owner:
    def __init__(self, count: int = 3) -> None:
        self.params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
        self.complete: list[int] = []
        self.ledger = GradLedger(self.params, [f"p{i}" for i in range(count)], self.done)

    def fire(self, index: int) -> None:
        if self.ledger.hook_fired(index):
            self.done(index)

    def done(self, index: int) -> None:
        self.complete.append(index)


def test_one_mark_completes_a_parameter_and_open_starts_anew():
    owner = Owner()
    for _ in range(2):
        owner.ledger.open()
        owner.fire(1)
        assert owner.ledger.incomplete() == [0, 2]
        owner.fire(0)
        owner.fire(2)
        assert owner.ledger.incomplete() == []
    assert owner.complete == [1, 0, 2] * 2


def test_expected_counts_complete_at_the_last_contribution():
    owner = Owner()
    owner.ledger.open([1, 3, 0])
    for _ in range(3):
        assert owner.complete == []
        owner.fire(1)
    assert owner.complete == [1]
    assert owner.ledger.incomplete() == [0]


def test_a_surplus_contribution_names_the_parameter_and_the_remedy():
    owner = Owner()
    owner.ledger.open()
    owner.fire(1)
    with pytest.raises(SurplusGradientError, match=r"'p1'.*use_reentrant=False"):
        owner.fire(1)


def test_any_only_counts():
    owner = Owner()
    owner.ledger.open([ANY] * 3)
    for _ in range(5):
        owner.fire(0)
    assert owner.ledger.seen(0) == 5
    assert owner.complete == []


def test_declared_marks_replace_the_hook():
    owner = Owner()
    param = owner.params[0]
    owner.ledger.open()
    assert expect_gradients(param, 2)
    owner.fire(0)  # the chunked function returns None for the weight, and the hook still fires
    mark_gradient(param, "chunk 0")
    assert owner.complete == []
    mark_gradient(param, "chunk 1")
    assert owner.complete == [0]
    with pytest.raises(SurplusGradientError, match="chunk 2"):
        mark_gradient(param, "chunk 2")


def test_a_declaration_holds_for_one_backward():
    owner = Owner()
    owner.ledger.open()
    expect_gradients(owner.params[0], 2)
    owner.ledger.close()
    owner.ledger.open()
    owner.fire(0)
    assert owner.complete == [0]


def test_parameters_that_nobody_counts_need_no_marks():
    stranger = nn.Parameter(torch.zeros(1))
    assert not expect_gradients(stranger, 2)
    mark_gradient(stranger, "chunk 0")


def test_the_ledger_is_forgotten_with_its_owner():
    owner = Owner()
    param = owner.params[0]
    del owner
    gc.collect()
    assert not expect_gradients(param, 1)

"""Borders between steps, in this process."""

from __future__ import annotations

import pytest
import torch

from ovpatch.insight.steps import StepCounter


class Own(torch.optim.SGD):
    def step(self, closure=None):
        if closure == "raise":
            raise ValueError("no step")
        return super().step()


@pytest.fixture
def borders(tmp_path):
    borders = []
    steps = StepCounter(tmp_path, borders.append)
    steps.start_counting()
    yield borders
    steps.stop_counting()


def parameter():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return [parameter]


def test_a_step_that_calls_the_step_of_a_hooked_base_is_one(borders):
    torch.optim.SGD(parameter(), lr=0.1)  # from now on torch calls hooks in SGD.step() as well as in Own.step()
    own = Own(parameter(), lr=0.1)
    for _ in range(3):
        own.step()
    assert borders == [1, 2, 3]


class Twice(Own):
    def step(self, closure=None):
        super().step()
        super().step()


def test_a_step_that_calls_that_of_its_hooked_base_twice_is_one(borders):
    Own(parameter(), lr=0.1)
    twice = Twice(parameter(), lr=0.1)
    for _ in range(3):
        twice.step()
    assert borders == [1, 2, 3]


def test_a_step_that_raises_is_none_and_the_next_one_counts(borders):
    own = Own(parameter(), lr=0.1)
    with pytest.raises(ValueError, match="no step"):
        own.step("raise")
    own.step()
    assert borders == [1]


def test_an_optimizer_built_anew_goes_on_with_the_count(borders):
    for _ in range(3):
        own = Own(parameter(), lr=0.1)
        for _ in range(3):
            own.step()
    assert borders == [1, 2, 3, 4, 5, 6, 7], "its first step belongs to the step that it joins"


def test_an_optimizer_that_steps_in_turn_makes_no_steps_of_its_own(borders):
    first, second, seldom = (Own(parameter(), lr=0.1) for _ in range(3))
    for turn in range(6):
        first.step()
        second.step()
        if turn % 3 == 2:
            seldom.step()
    assert borders == [1, 2, 3, 4, 5, 6]

"""A step of an optimizer is seen once, whatever its classes do; steps of several optimizers are counted together."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ovpatch.insight import steps
from ovpatch.insight.steps import StepCounter, StepHooks


class Base(torch.optim.SGD):
    def step(self, closure=None):
        if closure == "raise":
            raise ValueError("no step")
        return super().step()


class Own(Base):
    """Calls what torch has given hooks once per base, does something before and after, or survives a failing base."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].grad.mul_(0.5)
            if closure == "catch":
                with pytest.raises(ValueError, match="no step"):
                    super().step("raise")
            else:
                super().step(closure)
            if closure == "twice":
                super().step()
            self.param_groups[0]["params"][0].round_()


@pytest.fixture
def seen():
    """List the calls of the hooks: ("before" or "after", the optimizer's class, its gradient, its parameter)."""
    seen = []

    def see(when, optimizer):
        (parameter,) = optimizer.param_groups[0]["params"]
        seen.append((when, type(optimizer).__name__, parameter.grad.item(), parameter.item()))

    hooks = StepHooks(
        before=lambda optimizer, args, kwargs: see("before", optimizer),
        after=lambda optimizer: see("after", optimizer),
    )
    yield seen
    hooks.remove()
    count = len(seen)
    optimizer(Own).step()
    assert len(seen) == count, "nothing is seen after remove()"


def optimizer(cls):
    # torch adds the hooks of each class when the first instance is built.
    for base in (torch.optim.SGD, Base, cls):
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        last = base([parameter], lr=0.25)
    assert all("hooked" in vars(vars(base)["step"]) for base in (torch.optim.SGD, Base, cls))
    return last


#: The state on entry, and after the full step: half the gradient, and 1 - 0.125 rounded.
FULL_STEP = [("before", "Own", 1.0, 1.0), ("after", "Own", 0.5, 1.0)]


def test_a_step_is_seen_as_a_whole_however_many_of_its_bases_have_hooks(seen):
    optimizer(Own).step()
    assert seen == FULL_STEP


def test_a_step_that_calls_its_base_twice_is_one(seen):
    optimizer(Own).step("twice")
    assert seen == FULL_STEP


def test_a_step_that_raises_is_none_and_leaves_nothing_to_the_next(seen):
    own = optimizer(Own)
    for _ in range(2):
        with pytest.raises(ValueError, match="no step"):
            own.step("raise")
    assert [when for when, *_ in seen] == ["before", "before"]
    own.param_groups[0]["params"][0].grad.fill_(1.0)
    del seen[:]
    own.step()
    assert seen == FULL_STEP


def test_a_step_that_survives_its_bases_exception_is_one(seen):
    optimizer(Own).step("catch")
    assert seen == FULL_STEP


class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_within_another_is_seen_on_its_own(seen):
    Outer(optimizer(Own)).step()
    assert [(when, name) for when, name, *_ in seen] == [
        ("before", "Outer"), ("before", "Own"), ("after", "Own"), ("after", "Outer"),
    ]  # fmt: skip


def test_an_optimizer_whose_step_raised_is_not_kept_alive(seen):
    own = optimizer(Own)
    with pytest.raises(ValueError, match="no step"):
        own.step("raise")
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None


def test_a_compiled_step_is_seen_once(seen):
    base = optimizer(Base)
    compiled = torch.compile(base.step, backend="eager")
    for _ in range(3):
        compiled()
    assert [when for when, *_ in seen if when == "after"] == ["after"] * 3


def test_a_step_whose_wrapper_is_not_recognised_is_still_one(seen, monkeypatch):
    monkeypatch.setattr(steps, "_WRAPPER", None)
    own = optimizer(Own)
    with pytest.raises(ValueError, match="no step"):
        own.step("raise")
    for _ in range(3):
        own.step()
    assert [when for when, *_ in seen].count("after") == 3


# --- how steps are counted ---


@pytest.fixture
def borders(tmp_path):
    borders = []
    steps = StepCounter(tmp_path, borders.append)
    steps.start_counting()
    yield borders
    steps.stop_counting()


def test_an_optimizer_built_anew_goes_on_with_the_count(borders):
    for _ in range(3):
        own = optimizer(Own)
        for _ in range(3):
            own.step()
    assert borders == [1, 2, 3, 4, 5, 6, 7], "its first step belongs to the step that it joins"


def test_an_optimizer_that_steps_in_turn_makes_no_steps_of_its_own(borders):
    first, second, seldom = (optimizer(Own) for _ in range(3))
    for turn in range(6):
        first.step()
        second.step()
        if turn % 3 == 2:
            seldom.step()
    assert borders == [1, 2, 3, 4, 5, 6]

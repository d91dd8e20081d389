"""Parameters or state that differ between ranks when an optimizer begins: torch steps it, and ranks stay different."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ovpatch
from ovpatch_plugins.dist_optimizer.agreement import hash_content
from ovpatch_plugins.dist_optimizer.sharded_optimizer import REASON_DIFFERENT
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import (
    all_cases,
    apply,
    check_all,
    ddp,
    params,
    train_step,
)
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net


def step(model: nn.Module, opt: torch.optim.Optimizer, number: int) -> Record:
    opt.zero_grad()
    model(data(number, 5, 6)).square().mean().backward()
    opt.step()
    return params(model)


def change(param: torch.Tensor) -> None:
    """Make a parameter differ by rank."""
    with torch.no_grad():
        param.add_(0.01 * dist.get_rank())


def a_parameter(model: nn.Module) -> torch.optim.Optimizer:
    change(next(model.parameters()))
    return OPTIMIZERS["adamw"](model.parameters())


def the_last_bit(model: nn.Module) -> torch.optim.Optimizer:
    weight = next(model.parameters()).data
    weight.view(torch.int32)[-1, -1] ^= dist.get_rank() % 2
    return OPTIMIZERS["sgd"](model.parameters())


def state(model: nn.Module) -> torch.optim.Optimizer:
    trained = OPTIMIZERS["adamw"](model.parameters())
    step(model, trained, 20)
    saved = trained.state_dict()
    for values in saved["state"].values():
        change(values["exp_avg"])
    opt = OPTIMIZERS["adamw"](model.parameters())
    opt.load_state_dict(saved)
    return opt


class Halving(torch.optim.SGD):
    """An optimizer whose own step stays with torch."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


def a_local_step_of_another(model: nn.Module) -> torch.optim.Optimizer:
    with model.no_sync():
        step(model, Halving(model.parameters(), lr=0.1), 20)
    return OPTIMIZERS["adam"](model.parameters())


DIFFERENT = {make.__name__: make for make in (a_parameter, the_last_bit)}
# Another optimizer comes before: it is sharded, or falls back.
AFTER_ANOTHER = {"state": (state, 1, 1), "a local step of another": (a_local_step_of_another, 0, 2)}


def nothing(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


def a_small_parameter(model: nn.Module) -> torch.optim.Optimizer:
    # It has no shards.
    change(min(model.parameters(), key=torch.Tensor.numel))
    return OPTIMIZERS["adamw"](model.parameters())


def a_frozen_parameter(model: nn.Module) -> torch.optim.Optimizer:
    first = next(model.parameters())
    change(first)
    return OPTIMIZERS["adamw"](model.parameters())


def state_that_one_rank_has_read(model: nn.Module) -> torch.optim.Optimizer:
    trained = OPTIMIZERS["adamw"](model.parameters())
    for number in range(20, 23):
        step(model, trained, number)
    opt = OPTIMIZERS["adamw"](model.parameters())
    opt.load_state_dict(trained.state_dict())
    if dist.get_rank() == 0:
        for values in opt.state.values():
            values["exp_avg"].sum()
    return opt


def parameters_that_one_rank_has_read(model: nn.Module) -> torch.optim.Optimizer:
    trained = OPTIMIZERS["adamw"](model.parameters())
    for number in range(20, 23):
        train_step(model, trained, number)
    if dist.get_rank() == 0:
        params(model)
    return OPTIMIZERS["adamw"](model.parameters())


EQUAL = {make.__name__: make for make in (nothing, a_small_parameter, a_frozen_parameter)}
READ_BY_ONE = (state_that_one_rank_has_read, parameters_that_one_rank_has_read)


def train(make: Any, freeze: bool = False) -> list[Record]:
    module = net()
    next(module.parameters()).requires_grad_(not freeze)
    model = ddp(module)
    opt = make(model)
    return [step(model, opt, number) for number in range(5)]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_fall_back(ranks, world):
    cases = {name: {"make": make} for name, make in DIFFERENT.items()}
    check_all(ranks(world)(all_cases, train, cases), steps=0, stock=1)


@pytest.mark.parametrize("name", AFTER_ANOTHER)
def test_ranks_that_differ_after_another_optimizer(ranks, name):
    make, steps, stock = AFTER_ANOTHER[name]
    results = ranks(2)(all_cases, train, {name: {"make": make}})
    check_all(results, steps=steps, by_parts=None, stock=stock)


def test_ranks_that_are_equal_share_the_steps(ranks):
    cases = {
        name: {"make": make, "freeze": make is a_frozen_parameter} for name, make in EQUAL.items()
    }
    cases |= {make.__name__: {"make": make} for make in READ_BY_ONE}
    check_all(ranks(2)(all_cases, train, cases), steps=5)


def report_of_a_fallback() -> str:
    with apply():
        train(a_parameter)
        cells = str(ovpatch.report()).replace("|", " ")
    return " ".join(cells.split())


def test_the_report_says_why(ranks):
    for text in ranks(2)(report_of_a_fallback):
        assert f"AdamW falls back to torch: {REASON_DIFFERENT}" in text


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_hash_depends_on_each_bit_only(dtype, transposed):
    tensor = torch.arange(12.0).view(3, 4).to(dtype)
    same = tensor.t().contiguous().t() if transposed else tensor.clone()
    changed = same.clone()
    changed[2, 3] = 1.0
    assert hash_content([tensor, 3, None]) == hash_content([same])
    assert hash_content([tensor]) != hash_content([changed])
    assert hash_content([tensor, changed]) != hash_content([changed, tensor])

"""Parameters or state that differ between ranks when an optimizer begins: torch steps it, and ranks stay different."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ovpatch
from ovpatch_plugins.dist_optimizer import agreement
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


def two_last_bits(model: nn.Module) -> torch.optim.Optimizer:
    bits = next(model.parameters()).data.view(torch.int32)
    if dist.get_rank() == 1:
        bits[0, :2] += torch.tensor([1, -1], dtype=torch.int32)
    return OPTIMIZERS["adamw"](model.parameters())


def the_order_of_rows(model: nn.Module) -> torch.optim.Optimizer:
    weight = next(model.parameters()).data
    weight.copy_(weight.roll(dist.get_rank(), 0))
    return OPTIMIZERS["adamw"](model.parameters())


def signs(model: nn.Module) -> torch.optim.Optimizer:
    """All elements have one magnitude, and as many are negative on each rank, as after a step by signs."""
    weight = next(model.parameters()).data
    weight.fill_(0.5)
    weight[dist.get_rank()].neg_()
    return OPTIMIZERS["adamw"](model.parameters())


class Subclass(nn.Parameter):
    """A parameter of a script's own class, with plain memory."""


def a_parameter_of_another_class(model: nn.Module) -> torch.optim.Optimizer:
    change(next(p for p in model.parameters() if isinstance(p, Subclass)))
    return OPTIMIZERS["adamw"](model.parameters())


def a_learning_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + dist.get_rank()))


def a_learning_rate_in_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    lr = torch.tensor(0.01 * (1 + dist.get_rank()))
    return torch.optim.AdamW(model.parameters(), lr=lr)


def a_learning_rate_of_numpy(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=numpy.float32(0.01 * (1 + dist.get_rank())))


def a_parameter_that_is_frozen_for_some_steps(model: nn.Module) -> torch.optim.Optimizer:
    first = next(model.parameters())
    change(first)
    opt = OPTIMIZERS["adamw"](model.parameters())
    first.requires_grad_(False)
    opt.step()
    first.requires_grad_(True)
    return opt


def a_parameter_with_lazy_state(model: nn.Module) -> torch.optim.Optimizer:
    trained = OPTIMIZERS["adamw"](model.parameters())
    for number in range(20, 23):
        step(model, trained, number)
    change(next(model.parameters()))
    opt = OPTIMIZERS["adamw"](model.parameters())
    opt.state = trained.state
    return opt


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


DIFFERENT = {
    make.__name__: make
    for make in (
        a_parameter,
        the_last_bit,
        two_last_bits,
        the_order_of_rows,
        signs,
        a_parameter_of_another_class,
        a_learning_rate,
        a_learning_rate_in_a_tensor,
        a_learning_rate_of_numpy,
        a_parameter_that_is_frozen_for_some_steps,
    )
}
# Another optimizer comes before: it is sharded, or falls back.
AFTER_ANOTHER = {
    "state": (state, 1, 1),
    "a parameter with lazy state": (a_parameter_with_lazy_state, 3, 1),
    "a local step of another": (a_local_step_of_another, 0, 2),
}


def nothing(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


def a_small_parameter(model: nn.Module) -> torch.optim.Optimizer:
    # It has no shards.
    change(min(model.parameters(), key=torch.Tensor.numel))
    return OPTIMIZERS["adamw"](model.parameters())


def a_frozen_parameter(model: nn.Module) -> torch.optim.Optimizer:
    # The wrapper does not have it.
    change(next(model.parameters()))
    return OPTIMIZERS["adamw"](model.parameters())


def state_of_many_kinds(model: nn.Module) -> torch.optim.Optimizer:
    """State whose memory is not its content."""
    opt = OPTIMIZERS["sgd"](model.parameters())
    weight = next(model.parameters())
    opt.state[weight] |= {
        "conjugate": torch.fft.fft(weight.detach()).conj(),
        "negative": torch.ones(3, dtype=torch.complex64).conj().imag,
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "empty": torch.empty(0),
        "strided": torch.arange(6.0, dtype=torch.float64)[::2],
        "text": "a",
        "object": object(),
    }
    return opt


def options_that_change_no_update(model: nn.Module) -> torch.optim.Optimizer:
    first = dist.get_rank() == 0
    opt = torch.optim.SGD(
        model.parameters(),
        lr=0.5 if first else numpy.float64(0.5),
        weight_decay=0 if first else -0.0,
        foreach=None if first else False,
    )
    (group,) = opt.param_groups
    group |= {0: "a", "rank": dist.get_rank(), "groups": opt.param_groups}
    group["names"] = ["a name"] * 100
    return opt


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


EQUAL = {
    make.__name__: make
    for make in (
        nothing,
        a_small_parameter,
        a_frozen_parameter,
        options_that_change_no_update,
        state_of_many_kinds,
    )
}
READ_BY_ONE = (state_that_one_rank_has_read, parameters_that_one_rank_has_read)


def train(make: Any) -> list[Record]:
    module = net()
    first = next(module.parameters())
    first.requires_grad_(make is not a_frozen_parameter)
    if make is a_parameter_of_another_class:
        module[0].weight = Subclass(first.data)
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
    cases = {name: {"make": make} for name, make in EQUAL.items()}
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
    [
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.complex32,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_hash_depends_on_each_bit_only(dtype, transposed):
    tensor = torch.arange(12.0).view(3, 4).to(dtype)
    same = tensor.t().contiguous().t() if transposed else tensor.clone()
    changed = same.clone()
    changed[2, 3] = 1.0
    assert hash_content([tensor, 3, None]) == hash_content([same, 3])
    assert hash_content([tensor]) != hash_content([changed])
    assert hash_content([tensor, changed]) != hash_content([changed, tensor])
    assert hash_content([tensor]) != hash_content([tensor.roll(1, 0)])
    assert hash_content([tensor]) != hash_content([tensor.flatten()])
    assert hash_content([[{"lr": 0.1}, tensor]]) != hash_content([[{"lr": 0.2}, tensor]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8], ids=str)
def test_a_hash_reads_parts_of_a_tensor_in_order(monkeypatch, dtype):
    tensor = torch.arange(30).to(dtype)
    full = {hash_content([tensor.roll(shift)]) for shift in range(30)}
    monkeypatch.setattr(agreement, "_CHUNK_WORDS", 8)
    parts = {hash_content([tensor.roll(shift)]) for shift in range(30)}
    assert len(full) == len(parts) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_hash_depends_on_each_sign(dtype):
    signs = torch.ones(64, dtype=dtype)
    found = {hash_content([flip(signs, step)]) for step in range(40)}
    assert len(found) == 40


def flip(signs: torch.Tensor, step: int) -> torch.Tensor:
    """Change two signs, so that as many are even as before."""
    signs[step].neg_()
    signs[step + 1].neg_()
    return signs

"""Loops as people write them: with gradients zeroed at several places, accumulation, skipped steps and schedulers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.plugins.ddp.arms import Record, data, table
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params, some
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net

STEPS = 7


def backward(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    loss = model(data(step, 5, 6, micro=micro)).square().mean()
    loss.backward()
    return loss.detach()


def zero_before_forward(model: nn.Module, opt: Any, step: int, set_to_none: bool = True) -> None:
    opt.zero_grad(set_to_none=set_to_none)
    backward(model, step)
    opt.step()


def zero_between(model: nn.Module, opt: Any, step: int, set_to_none: bool = True) -> None:
    loss = model(data(step, 5, 6)).square().mean()
    opt.zero_grad(set_to_none=set_to_none)
    loss.backward()
    opt.step()


def zero_after_step(model: nn.Module, opt: Any, step: int, set_to_none: bool = True) -> None:
    backward(model, step)
    opt.step()
    opt.zero_grad(set_to_none=set_to_none)


def zero_by_model(model: nn.Module, opt: Any, step: int) -> None:
    model.zero_grad()
    backward(model, step)
    opt.step()


def never_zeroed(model: nn.Module, opt: Any, step: int) -> None:
    backward(model, step)
    opt.step()


def zeroed_every_third(model: nn.Module, opt: Any, step: int) -> None:
    if step % 3 == 0:
        opt.zero_grad()
    backward(model, step)
    opt.step()


def accumulated(
    model: nn.Module, opt: Any, step: int, quiet: bool = True, set_to_none: bool = True
) -> None:
    for micro in range(3):
        with model.no_sync() if quiet and micro < 2 else contextlib.nullcontext():
            backward(model, step, micro)
    opt.step()
    opt.zero_grad(set_to_none=set_to_none)


def accumulated_never_zeroed(model: nn.Module, opt: Any, step: int) -> None:
    for micro in range(2):
        with model.no_sync() if micro < 1 else contextlib.nullcontext():
            backward(model, step, micro)
    opt.step()


def accumulated_with_an_early_zero(model: nn.Module, opt: Any, step: int) -> None:
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            backward(model, step, micro)
        if micro == 0 and step % 2:
            opt.zero_grad()
    opt.step()
    opt.zero_grad()


def step_without_backward(model: nn.Module, opt: Any, step: int) -> None:
    if step == 0:
        opt.step()
    zero_between(model, opt, step)
    opt.step()
    opt.zero_grad()
    opt.step()


def skipped(model: nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    backward(model, step)
    if step % 3 != 1:
        opt.step()


def skipped_and_kept(model: nn.Module, opt: Any, step: int) -> None:
    backward(model, step)
    if step % 3 != 1:
        opt.step()
        opt.zero_grad()


def lr_zero(model: nn.Module, opt: Any, step: int) -> None:
    opt.param_groups[0]["lr"] = 0.0 if step % 2 else 0.01
    zero_between(model, opt, step)


def closure(model: nn.Module, opt: Any, step: int) -> None:
    def evaluate() -> torch.Tensor:
        opt.zero_grad()
        assert all(p.numel() in (60, 10, 70, 7, 21, 3) for p in model.parameters())
        loss = model(data(step, 5, 6)).square().mean()
        loss.backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        return loss

    assert opt.step(evaluate).numel() == 1


def group_added(model: nn.Module, opt: Any, step: int) -> None:
    if step == 4:
        opt.add_param_group({"params": list(model.module[2].parameters()), "lr": 0.02})
    model.zero_grad()
    backward(model, step)
    opt.step()


def weights_set_before_forward(model: nn.Module, opt: Any, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
    zero_before_forward(model, opt, step)
    model.module[2].weight.data[0] += 0.1


def two_forwards(model: nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    (model(data(step, 5, 6)) + model(data(step, 5, 6, micro=1))).square().mean().backward()
    opt.step()


STYLES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    f.__name__: (f, {})
    for f in (
        zero_by_model, never_zeroed, zeroed_every_third, accumulated_never_zeroed, accumulated_with_an_early_zero,
        step_without_backward, skipped, skipped_and_kept, lr_zero, closure, group_added, weights_set_before_forward,
        two_forwards,
    )
}  # fmt: skip
for keep in (True, False):
    for f in (zero_before_forward, zero_between, zero_after_step):
        STYLES[f"{f.__name__}, None: {keep}"] = (f, {"set_to_none": keep})
    for quiet in (True, False):
        STYLES[f"accumulated, quiet: {quiet}, None: {keep}"] = (
            accumulated,
            {"quiet": quiet, "set_to_none": keep},
        )

# Several buckets, so some are reduced while the backward still computes others.
SMALL_BUCKETS = {"bucket_cap_mb": 2e-4}

WRAPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}
WRAPS |= {f"small buckets, {name}": kwargs | SMALL_BUCKETS for name, kwargs in WRAPS.items()}


def train(
    style: str, optimizer: str = "adamw", wrap: str = "plain", early: bool = False
) -> list[Record]:
    iterate, kwargs = STYLES[style]
    raw = net()
    model = raw if early else ddp(raw, **WRAPS[wrap])
    chosen = model if style != "group_added" else (model[0] if early else model.module[0])
    opt = OPTIMIZERS[optimizer](chosen.parameters())
    model = ddp(raw, **WRAPS[wrap]) if early else model
    records = []
    for step in range(STEPS):
        iterate(model, opt, step, **kwargs)
        # Without a read, parameters are still in flight in the next forward.
        if step % 3:
            records.append(params(model))
    return records


@pytest.mark.parametrize(("optimizer", "world"), [("adamw", 2), ("adamw", 3), ("sgd", 2)])
def test_styles(ranks, world, optimizer):
    cases = {s: {"style": s, "optimizer": optimizer} for s in STYLES}
    has_all_styles = (world, optimizer) == (2, "adamw")
    check_all(
        ranks(world)(all_cases, train, cases if has_all_styles else some(cases, first=world % 2))
    )


@pytest.mark.parametrize(("wrap", "first"), [("views", 0), ("unused", 1)])
def test_styles_under_options_of_ddp(ranks, wrap, first):
    check_all(
        ranks(2)(all_cases, train, some({s: {"style": s, "wrap": wrap} for s in STYLES}, first))
    )


def test_an_optimizer_made_before_the_wrap(ranks):
    check_all(ranks(2)(all_cases, train, some({s: {"style": s, "early": True} for s in STYLES}, 2)))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda opt: StepLR(opt, 2, 0.5),
    "warm-up": lambda opt: LambdaLR(opt, lambda step: min(1.0, step / 4)),
    "one cycle": lambda opt: OneCycleLR(opt, 0.05, total_steps=20),
    "plateau": lambda opt: ReduceLROnPlateau(opt, patience=0),
}


def scheduled(scheduler: str, first: bool, early: bool) -> list[Record]:
    raw = net()
    model = raw if early else ddp(raw)
    opt = OPTIMIZERS["adamw"](model.parameters())
    plan = SCHEDULERS[scheduler](opt)
    model = ddp(raw) if early else model
    records = []
    for step in range(6):
        opt.zero_grad()
        loss = backward(model, step)
        if not first:
            opt.step()
        plan.step(*([loss] if scheduler == "plateau" else []))
        if first:
            opt.step()
        records.append({"lr": opt.param_groups[0]["lr"], "param": params(model)})
    return records


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedulers_in_any_order(ranks):
    cases = table(scheduler=SCHEDULERS, first=[False, True], early=[False, True])
    # Each scheduler comes in one or two orders, and each order with several schedulers.
    check_all(ranks(2)(all_cases, scheduled, some(cases)))

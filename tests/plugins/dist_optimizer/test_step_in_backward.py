"""Optimizers that step inside of the backward: one for each parameter, in a hook on it, or in the way that DDP offers.

In a hook on a parameter, gradients are local in stock PyTorch as well, so ranks train separately.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.plugins.ddp import arms as ddp_arms
from tests.plugins.ddp import checks as ddp_checks
from tests.plugins.ddp.arms import Record, data, seen
from tests.plugins.ddp.checks import same_bits
from tests.plugins.dist_optimizer.checks import all_cases, both, check, ddp, on, params
from tests.plugins.dist_optimizer.test_gpu import NCCL
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net


def large() -> nn.Module:
    """Return a model with gradients large enough to be reduced in place."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 3))


def stepping(
    optimizer: str = "adamw",
    afterwards: str = "none",
    hooked: str = "before",
    at: int = 0,
    steps: int = 4,
    model: str = "small",
    **wrap: Any,
) -> list[Record]:
    """Train with an optimizer for each parameter.

    Args:
        optimizer: A key of ``OPTIMIZERS``.
        afterwards: The gradient that the hook leaves after the step: "none", "zeros" or "kept".
        hooked: "before" or "after": hooks are registered before or after the model is wrapped.
        at: The first step in which hooks step.
        steps: The number of steps.
        model: "small" or "large".
        wrap: Arguments of the wrapper.
    """
    raw = large() if model == "large" else net()
    wrapped = ddp(raw, **wrap) if hooked == "after" else None
    opts = {p: OPTIMIZERS[optimizer]([p]) for p in raw.parameters()}
    current = [0]

    def hook(param: nn.Parameter) -> None:
        if current[0] >= at:
            opts[param].step()
            if afterwards != "kept":
                opts[param].zero_grad(set_to_none=afterwards == "none")

    for p in opts:
        p.register_post_accumulate_grad_hook(hook)
    wrapped = wrapped or ddp(raw, **wrap)
    records = []
    for step in range(steps):
        current[0] = step
        if step <= at or afterwards == "kept":
            wrapped.zero_grad()
        loss = wrapped(data(step, 5, 6)).square().mean()
        loss.backward()
        if step < at:
            for opt in opts.values():
                opt.step()
        records.append(seen(raw, loss))
    return records


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "zeroed": {"afterwards": "zeros"},
    "kept": {"afterwards": "kept"},
    "hooked after": {"hooked": "after"},
    "later": {"at": 4, "steps": 7},
    "later, zeroed": {"at": 5, "steps": 7, "afterwards": "zeros"},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "large": {"model": "large"},
    "large, kept": {"model": "large", "afterwards": "kept"},
}


@pytest.mark.parametrize("world", [2, 3])
def test_in_hooks_under_ddp(ranks, world):
    cases = {name: case for name, case in CASES.items() if "at" not in case}
    ddp_checks.check_cases(ranks(world), stepping, cases)


@pytest.mark.parametrize("world", [2, 3])
def test_in_hooks_under_dist_optimizer(ranks, world):
    cases = on(world, CASES)
    results = ranks(world)(all_cases, stepping, cases)
    for name, case in cases.items():
        optimizers = 6 if "model" in case else 8
        check(
            [result[name] for result in results],
            steps=case.get("at", 0),
            by_parts=None,
            stock=optimizers,
        )


def offered() -> list[Record]:
    """Train with optimizers that step in the communication hook of DDP, with averages."""
    raw = net()
    model = ddp(raw)
    _apply_optimizer_in_backward(torch.optim.SGD, raw.parameters(), {"lr": 0.1, "momentum": 0.9})
    records = []
    for step in range(6):
        loss = model(data(step, 5, 6)).square().mean()
        loss.backward()
        records.append({"loss": loss.detach(), "param": params(raw)})
    return records


@pytest.mark.gpu(2)
def test_as_ddp_offers_it(ranks):
    """Check both features on GPUs, because torch's hook needs streams."""
    ddp_checks.check(ranks(2)(ddp_arms.both, offered, **NCCL), stock_models=1)
    for result in same_bits(ranks(2)(both, offered, **NCCL)):
        assert result["counters"]["steps"] == 0

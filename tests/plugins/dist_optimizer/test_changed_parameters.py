"""Parameters that the script changes after the wrap so that autograd cannot train them, or in a mode of torch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import ovpatch
from tests.plugins.ddp.arms import data, table
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params
from tests.plugins.dist_optimizer.test_local_afterwards import Quantized, change_frozen
from tests.plugins.dist_optimizer.test_loops import net

# The step in which the parameters change.
WHEN = 3


def train_with_a_frozen_parameter(how: str, where: str) -> list[Any]:
    """Freeze and change a parameter between two steps; the next forward runs somewhere, or features end before it."""
    torch.manual_seed(1)
    module = Quantized()
    model = ddp(module, find_unused_parameters=True)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(7):
        opt.zero_grad()
        if step == WHEN:
            change_frozen(module.matrix, how)
            if where == "after revert()":
                ovpatch.revert()
            elif where in MODES:
                with MODES[where]():
                    model(data(step, 5, 5))
        if step == WHEN + 2 and how == "of inference mode":
            module.matrix.data = module.matrix.data.clone()
            module.matrix.requires_grad_(True)
        x = data(step, 5, 5)
        with torch.device("meta") if where == "in a device context" else contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        opt.step()
        records.append(params(module))
    assert (module.matrix.grad is not None) is (how == "of inference mode")
    return records


MODES = {"after inference mode": torch.inference_mode, "after no_grad": torch.no_grad}
HOWS = ("quantized", "of inference mode", "of inference mode, in fp64")


def test_a_parameter_that_autograd_refuses_to_train_is_no_obstacle(ranks):
    places = ("", *MODES, "in a device context")
    cases = table(how=HOWS, where=places)
    check_all(ranks(2)(all_cases, train_with_a_frozen_parameter, cases), steps=7)


def test_the_stock_reducer_takes_a_parameter_that_autograd_refuses_to_train(ranks):
    for how in HOWS:
        case = {how: {"how": how, "where": "after revert()"}}
        check_all(ranks(2)(all_cases, train_with_a_frozen_parameter, case), steps=WHEN)


def moved_before_a_transform(transform: str) -> list[Any]:
    """Cast the model before a forward inside of ``torch.func``, which finds parameters with new nodes."""
    module = net()
    model = ddp(module)
    opt = torch.optim.SGD(module.parameters(), 1e-2)
    records = []
    for step in range(6):
        opt.zero_grad()
        if step == WHEN:
            module.double()
        x = data(step, 5, 6).to(next(module.parameters()).dtype)
        if step >= WHEN and transform == "jvp":
            out, _ = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        elif step >= WHEN and transform == "vjp":
            out, _ = torch.func.vjp(model, x)
        else:
            out = model(x)
        out.square().mean().backward()
        opt.step()
        records.append(params(module))
    return records


def test_a_cast_model_gets_its_hooks_inside_of_a_transform(ranks):
    for result in ranks(2)(
        all_cases, moved_before_a_transform, table(transform=("", "jvp", "vjp"))
    ):
        # Stock PyTorch does not reduce the gradients of a parameter that was cast.
        plain, *transformed = (case["patched"] for case in result.values())
        for records in transformed:
            torch.testing.assert_close(records, plain)

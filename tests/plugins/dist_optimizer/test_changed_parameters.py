"""Parameters that the script changes after the wrap so that autograd cannot train them, or in a mode of torch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import ovpatch
from tests.plugins.ddp.arms import data, table
from tests.plugins.dist_optimizer.checks import all_cases, both, check_all, ddp, params
from tests.plugins.dist_optimizer.test_local_afterwards import Quantized, change_frozen
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.equality import compare

# The step in which the parameters change.
WHEN = 3


def wrap_quantized(dtype: torch.dtype = torch.float32) -> tuple[Quantized, torch.nn.Module]:
    """Return a module whose matrix may be quantized, and its wrapper, which searches for unused parameters."""
    torch.manual_seed(1)
    module = Quantized().to(dtype)
    module.code = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    return module, ddp(module, find_unused_parameters=True)


def thaw_matrix(module: Quantized) -> None:
    """Train the matrix again, from its values that were written in inference mode."""
    module.matrix.data = module.matrix.data.clone()
    module.matrix.requires_grad_(True)


def train_with_a_frozen_parameter(how: str, where: str) -> list[Any]:
    """Freeze and change a parameter between two steps; the next forward runs somewhere, or features end before it."""
    module, model = wrap_quantized()
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
            thaw_matrix(module)
        x = data(step, 5, 5)
        with torch.device("meta") if where == "in a device context" else contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        opt.step()
        records.append(params(module))
    assert (module.matrix.grad is not None) is (how == "of inference mode")
    return records


def train_in_bf16(where: str) -> list[Any]:
    """Write a frozen bf16 parameter in inference mode, let the hooks be attached again, and thaw it later."""
    module, model = wrap_quantized(torch.bfloat16)
    opt = torch.optim.SGD(module.parameters(), 1e-2)
    records = []
    for step in range(7):
        opt.zero_grad()
        if step == WHEN:
            change_frozen(module.matrix, "of inference mode")
            if where == "after revert()":
                ovpatch.revert()
            else:
                change_frozen(module.code, "quantized")
        if step == WHEN + 2:
            thaw_matrix(module)
        model(data(step, 5, 5).bfloat16()).square().mean().backward()
        records.append(
            {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        )
        opt.step()
    return records


def test_a_thawed_parameter_of_low_precision_is_reduced(ranks):
    for results in zip(*ranks(2)(train_all_in_bf16), strict=True):
        for result in results:
            compare(result["stock"], result["patched"]).assert_bitwise()
        assert "matrix" in results[0]["patched"][-1]


def train_all_in_bf16() -> list[dict[str, Any]]:
    return [
        both(train_in_bf16, where) for where in ("after revert()", "with another one quantized")
    ]


def step_a_new_optimizer() -> list[Any]:
    """Step a new optimizer before the first forward in which a parameter is quantized."""
    module, model = wrap_quantized()
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(6):
        opt.zero_grad()
        model(data(step, 5, 5)).square().mean().backward()
        if step == WHEN:
            module.matrix.grad = None
            change_frozen(module.matrix, "quantized")
            opt = torch.optim.AdamW(module.parameters(), 1e-2)
        opt.step()
        records.append(params(module))
    return records


def test_a_new_optimizer_leaves_a_quantized_parameter_out(ranks):
    check_all(ranks(2)(all_cases, step_a_new_optimizer, {"": {}}), steps=6)


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

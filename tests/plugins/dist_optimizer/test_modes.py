"""Modes of the script change nothing in the tensors that the runtime creates while they are active."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params, train_steps
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.modes import LEVELS, MODES, unwrap

# The phases of a step, one of which runs inside of the mode.
PHASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "backward": lambda model, opt, loss: loss.backward(),
    "read": lambda model, opt, loss: [p.grad.clone() for p in model.parameters()],
    "clip": lambda model, opt, loss: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "step": lambda model, opt, loss: opt.step(),
    "state_dict": lambda model, opt, loss: {
        f"{n}.{k}": v.clone() for n, s in opt.state_dict()["state"].items() for k, v in s.items()
    },
}


def train_in_mode(mode: str, phase: str) -> list[Record]:
    """Train three steps, one phase of each inside of the mode, the first time included."""
    model = ddp(net())
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    records: list[Record] = []
    for step in range(3):
        opt.zero_grad()
        loss = model(data(step, 5, 6)).square().mean()
        record: Record = {}
        for name, run in PHASES.items():
            if name == "step" and phase == "state_dict":
                opt.step()
            with MODES[mode]() if name == phase else contextlib.nullcontext():
                found = run(model, opt, loss) if name in ("backward", "step", phase) else None
            if name == phase and found is not None and mode != "inference":
                record["found"] = tree_map(unwrap, found)
        records.append(record | params(model))
    return records


def is_possible(mode: str, phase: str) -> bool:
    """Return whether stock PyTorch can run it: the first step creates state, whose kind depends on the mode."""
    return not (
        (mode == "meta device" and phase in ("step", "clip", "backward"))
        or (mode == "inference" and phase in ("clip", "backward"))
        or (mode in LEVELS and phase in ("clip", "backward", "step"))
    )


def sum_grads(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([(p.grad * weight).sum() for p in model.parameters()]).sum()


def functorch_loop(transform: str) -> list[Record]:
    """Call the wrapper inside of a transform after two steps, or read gradients there, and read them afterwards."""
    model = ddp(net())
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    records: list[Record] = []
    for step in range(5):
        opt.zero_grad()
        x = data(step, 5, 6)
        if step >= 2 and transform != "grad":
            if transform == "jvp":
                out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
                records.append({"out": out.detach(), "tangent": tangent.detach()})
            else:
                out, pull = torch.func.vjp(model, x)
                records.append(
                    {"out": out.detach(), "pulled": pull(torch.ones_like(out))[0].detach()}
                )
            opt.zero_grad()
        model(x).square().mean().backward()
        if transform == "grad":
            read = torch.func.grad(lambda weight: sum_grads(model, weight))(torch.ones(()))
            records.append({"read": read.detach()})
        records.append({name: p.grad.clone() for name, p in model.named_parameters()})
        opt.step()
        records.append(params(model))
    return records


@pytest.mark.parametrize("options", [{}, {"grads_in_flight_mb": 0.0}], ids=["default", "no limit"])
def test_first_read_after_a_functorch_transform(ranks, options):
    cases = {name: {"transform": name} for name in ("jvp", "vjp", "grad")}
    check_all(ranks(2)(all_cases, functorch_loop, cases, options, timeout=120), by_parts=None)


def test_phases_of_a_step_inside_of_each_mode(ranks):
    modes = [mode for mode in MODES if mode != "fake"]
    pairs = [(mode, phase) for mode in modes for phase in PHASES if is_possible(mode, phase)]
    cases = {f"{phase} in {mode}": {"mode": mode, "phase": phase} for mode, phase in pairs}
    results = ranks(2)(all_cases, train_in_mode, cases, timeout=240)
    # A norm is summed over shards, in another order.
    clips = {name for name in cases if name.startswith("clip")}
    for chosen, bitwise in ((cases.keys() - clips, True), (clips, False)):
        found = [{name: result[name] for name in chosen} for result in results]
        check_all(found, by_parts=None, bitwise=bitwise)


# Phases for ``FakeTensorMode``, on a model whose gradients are sharded and whose parameters are pending.
FAKE_PHASES: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda model, opt: [p.grad.clone() for p in model.parameters()],
    "norm": lambda model, opt: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "clip": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip value": lambda model, opt: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "add to gradients": lambda model, opt: [p.grad.add_(1.0) for p in model.parameters()],
    "zero gradients": lambda model, opt: opt.zero_grad(set_to_none=False),
    "read parameters": lambda model, opt: [p.clone() for p in model.parameters()],
    "forward": lambda model, opt: model.module(torch.ones(5, 6)),
    "step": lambda model, opt: opt.step(),
    "state": lambda model, opt: [s["exp_avg"].clone() for s in opt.state.values()],
}
# Phases that follow the step, in which parameters are pending and the optimizer's state is lazy.
AFTER_STEP = ("read parameters", "forward", "state")


def describe_found(found: Any) -> list[str]:
    """Return the classes and shapes of the tensors that a phase has returned."""
    values = found if isinstance(found, list) else [found]
    return [f"{type(value).__name__} {getattr(value, 'shape', '')}" for value in values]


def fake_loop(*, phase: str, allow: bool) -> list[Record]:
    """Run a phase of two steps inside of ``FakeTensorMode``, and record its tensors or its error, and the training."""
    model = ddp(net())
    opt = (torch.optim.SGD if phase == "step" else torch.optim.AdamW)(model.parameters(), lr=0.05)
    records: list[Record] = train_steps(model, opt, 2)
    for step in range(2, 4):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        record: Record = {"lazy": any(type(p.grad) is LazyTensor for p in model.parameters())}
        if phase in AFTER_STEP:
            opt.step()
        with FakeTensorMode(allow_non_fake_inputs=allow):
            try:
                record["found"] = describe_found(FAKE_PHASES[phase](model, opt))
            except AssertionError as error:
                record["found"] = str(error).partition(".")[0]
        if step > 2:
            record |= {name: p.grad.clone() for name, p in model.named_parameters()}
        opt.step()
        records += [record, params(model)]
    return records


def test_phases_of_a_step_inside_of_fake_tensor_mode(ranks):
    pairs = [(phase, allow) for phase in FAKE_PHASES for allow in (False, True)]
    cases = {f"{phase}, allow={allow}": {"phase": phase, "allow": allow} for phase, allow in pairs}
    results = ranks(2)(all_cases, fake_loop, cases, timeout=240)
    for arms in (result[name] for result in results for name in cases):
        assert [record.pop("lazy") for record in arms["patched"] if "lazy" in record] == [
            True,
            True,
        ]
        assert [record.pop("lazy") for record in arms["stock"] if "lazy" in record] == [
            False,
            False,
        ]
    check_all(results, by_parts=None)


def keyword_loop() -> list[Record]:
    """Call an optimizer's methods with every parameter by name, as torch.distributed.checkpoint does."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        get_state_dict,
        set_optimizer_state_dict,
    )

    model = ddp(net())
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    records: list[Record] = []
    for step in range(3):
        torch.optim.Optimizer.zero_grad(self=opt, set_to_none=True)
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        found = torch.optim.Optimizer.state_dict(self=opt)
        torch.optim.Optimizer.load_state_dict(self=opt, state_dict=found)
        kept = get_optimizer_state_dict(model, opt)
        set_optimizer_state_dict(model, opt, kept)
        _, again = get_state_dict(model, opt)
        states = {f"{p}.{k}": v.clone() for p, s in again["state"].items() for k, v in s.items()}
        records.append(states | params(model))
    return records


def test_methods_of_optimizers_with_every_parameter_by_name(ranks):
    check_all(ranks(2)(all_cases, keyword_loop, {"by name": {}}), by_parts=None)

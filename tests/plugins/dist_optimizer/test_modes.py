"""Modes of the script change nothing in the tensors that the runtime creates while they are active."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params
from tests.plugins.dist_optimizer.test_loops import net


class Functions(TorchFunctionMode):
    """Sees functions, and does nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Sees operators, and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def filled() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: By default torch fills new memory with NaN under deterministic algorithms.
MODES: dict[str, Callable[[], Any]] = {
    "functions": Functions,
    "operators": Operators,
    "meta device": lambda: torch.device("meta"),
    "default dtype": wide,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic fill": filled,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


#: The parts of a step, one of which runs inside of the mode.
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
                record["found"] = found
        records.append(record | params(model))
    return records


def is_possible(mode: str, phase: str) -> bool:
    """Return whether stock can do it: state is created by the first step, and of the mode's kind."""
    return not (mode in ("meta device", "inference") and phase in ("step", "clip", "backward"))


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
                records.append({"out": out.detach(), "pulled": pull(torch.ones_like(out))[0].detach()})
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
    pairs = [(mode, phase) for mode in MODES for phase in PHASES if is_possible(mode, phase)]
    cases = {f"{phase} in {mode}": {"mode": mode, "phase": phase} for mode, phase in pairs}
    check_all(ranks(2)(all_cases, train_in_mode, cases, timeout=240), by_parts=None)


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

"""Every element-wise optimizer of torch, with its flags, is sharded. Other optimizers fall back and are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ovpatch.session.session_report import NO_WORK
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.dist_optimizer.checks import (
    all_cases,
    apply,
    check_all,
    ddp,
    on,
    params,
    versions,
)
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.rarely import RARELY

# --- optimizers of scripts ---


class OwnStep(torch.optim.AdamW):
    """An optimizer that normalises each gradient by its full norm before it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm() + 1e-3)
        return super().step(closure)


class Plain(torch.optim.AdamW):
    """A subclass that changes nothing of the update."""


class Written(Optimizer):
    """An optimizer written by hand."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"])

    def update(self, p: torch.Tensor, lr: float) -> None:
        raise NotImplementedError


class Own(Written):
    """An optimizer that is not element-wise."""

    def update(self, p: torch.Tensor, lr: float) -> None:
        p.sub_(p.grad / (p.grad.norm() + 1e-3), alpha=lr)


class Handing(Written):
    """An element-wise optimizer whose gradient gets the memory of its momentum, as in code older than ``no_grad``."""

    def update(self, p: torch.Tensor, lr: float) -> None:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(p.grad)
        p.grad.data = momentum
        p.sub_(p.grad, alpha=lr)


# --- tables: a row is a case of the tests below ---

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd, nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "sgd, dampening": (
        torch.optim.SGD,
        {"lr": 0.001, "momentum": 0.9, "dampening": 0.5, "maximize": True},
    ),
    "sgd, fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam, amsgrad, fused": (
        torch.optim.Adam,
        {"lr": 0.01, "amsgrad": True, "fused": True, "weight_decay": 0.1},
    ),
    "adam, lr tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    ),
    "adamw, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True, "weight_decay": 0.1}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "adagrad, fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 3}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
STEPS = 5
# The first five steps of RAdam do not use the second moment.
LONGER = {"radam": 8}
ONE_BY_ONE = ("sgd", "sgd, dampening", "adam, lr tensor")
KINDS |= {
    f"{name}, foreach": (cls, kwargs | {"foreach": True})
    for name, (cls, kwargs) in KINDS.items()
    if "fused" not in name and name not in ONE_BY_ONE
}

# Subclasses that change nothing of the update. They are known by the classes that torch has.
SUBCLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "plain subclass": (Plain, {"lr": 0.01}),
}

# Element-wise classes with a step that the feature does not know. The option `element_wise` names all of them.
NAMED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "handing": (Handing, {"lr": 0.01}),
}

# Classes that nothing knows.
UNSUPPORTED: dict[str, Callable[[nn.Module], Optimizer]] = {
    "own step": lambda m: OwnStep(m.parameters(), lr=0.01),
    "by hand": lambda m: Own(m.parameters(), lr=0.01),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
}


# --- tests ---


def even() -> nn.Module:
    """Return a bf16 model whose shards are full vectors. torch rounds the rest of a vector differently in bf16."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64)).to(
        device(), torch.bfloat16
    )


def train(kind: str, low_precision: bool = False) -> list[Record]:
    model = ddp(even() if low_precision else net())
    if kind in UNSUPPORTED:
        opt = UNSUPPORTED[kind](model)
    else:
        cls, kwargs = (KINDS | SUBCLASSES | NAMED)[kind]
        opt = cls(model.parameters(), **kwargs)
    dtype = next(model.parameters()).dtype
    records = []
    for step in range(LONGER.get(kind.partition(",")[0], STEPS)):

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            model.zero_grad()
            loss = model(data(step, 5, 6).to(dtype)).square().mean()
            loss.backward()
            return loss

        if kind == "lbfgs":
            opt.step(closure)
        else:
            closure()
            opt.step()
        records += [versions(model), params(model)]
    state = opt.state_dict()
    return [
        *records,
        {str(k): v for k, v in state["state"].items()},
        [dict(g) for g in state["param_groups"]],
    ]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_element_wise_optimizers_are_sharded(ranks, world):
    kinds = {kind: {"kind": kind} for kind in [*KINDS, *SUBCLASSES] if "fused" not in kind}
    check_all(ranks(world)(all_cases, train, on(world, kinds)), steps=STEPS)


@pytest.mark.parametrize("world", [2, 3])
def test_classes_that_the_user_names_update_by_parts(ranks, world):
    """Among them is one that replaces the memory of a part."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls, _ in NAMED.values()}
    options = {"element_wise": ",".join(sorted(names))}
    kinds = {kind: {"kind": kind} for kind in NAMED}
    check_all(ranks(world)(all_cases, train, kinds, options=options), steps=STEPS)


@pytest.mark.parametrize("world", [2, 3])
def test_fused_optimizers_are_sharded(ranks, world):
    """Compare without bits: fused kernels of the CPU round the elements after the last full vector differently."""
    kinds = {kind: {"kind": kind} for kind in KINDS if "fused" in kind}
    check_all(ranks(world)(all_cases, train, kinds), steps=STEPS, bitwise=False)


def test_low_precision(ranks):
    # These kinds round like the remaining kinds, and the tests above run them in fp32.
    without = ("fused", "foreach")
    wanted = [kind for kind in KINDS if not any(word in kind for word in without)]
    kinds = {kind: {"kind": kind, "low_precision": True} for kind in wanted}
    check_all(ranks(2)(all_cases, train, kinds), steps=STEPS)


def stale(kind: str) -> list[Record]:
    """Run backwards through graphs that were made before a step, right after the step."""
    torch.manual_seed(1)
    model = ddp(nn.Sequential(*(nn.Conv1d(64, 64, 1, bias=False) for _ in range(4))).to(device()))
    cls, kwargs = KINDS[kind]
    opt = cls(model.parameters(), **kwargs)
    records: list[Any] = []
    for number in range(6):
        x = data(number, 8, 64, 2).requires_grad_()
        out = model.module(x).sum()
        opt.zero_grad()
        model(x.detach()).square().mean().backward()
        opt.step()
        try:
            records.append(torch.autograd.grad(out, x)[0])
        except RuntimeError as error:
            records.append(str(error))
    return [records]


def test_graphs_from_before_a_step_are_refused_as_in_stock_pytorch(ranks):
    """Check both kinds of kernels: fused ones do not raise versions, so stock PyTorch uses the new parameters."""
    cases = {kind: {"kind": kind} for kind in ("sgd", "adamw", "asgd", "adamw, fused")}
    results = ranks(2)(all_cases, stale, cases)
    check_all(results, steps=6, bitwise=False)
    for result in results:
        for kind, arms in result.items():
            (records,) = arms["patched"]
            if "fused" in kind:
                assert all(isinstance(record, torch.Tensor) for record in records)
            else:
                assert [
                    record for record in records if "modified by an inplace operation" in record
                ] == records
                assert records == arms["stock"][0]


def test_unsupported_optimizers_fall_back(ranks):
    check_all(
        ranks(2)(all_cases, train, {kind: {"kind": kind} for kind in UNSUPPORTED}), steps=0, stock=1
    )


def reported() -> list[str]:
    with apply():
        train("own step")
        from ovpatch_plugins.dist_optimizer.dist_optimizer_report import list_remarks

        return list_remarks()


def test_the_report_has_the_optimizer_that_falls_back_and_the_reason(ranks):
    for remarks in ranks(2)(reported):
        assert any(
            "OwnStep falls back to torch" in text and "not known to be element-wise" in text
            for text in remarks
        )


def idle(wrapped: bool) -> tuple[list[str], str, dict[str, int]]:
    """Train with an optimizer that has nothing to shard; return remarks, the largest parameter, and counters."""
    import ovpatch

    with ovpatch.applied("ddp", "dist_optimizer"):
        model: nn.Module = ddp(net()) if wrapped else net()
        opt = torch.optim.RMSprop(model.parameters(), 0.01)
        for index in range(3):
            model(data(index, 5, 6)).square().mean().backward()
            opt.step()
        features = {record["name"]: record for record in ovpatch.report().to_json()["features"]}
        feature = features["dist_optimizer"]
        largest = max(param.numel() for param in model.parameters())
        return feature["remarks"], str(largest), feature["counters"]


def test_an_optimizer_that_has_nothing_to_shard_is_reported(ranks):
    for remarks, largest, counters in ranks(2)(idle, True):
        expected = f"has fewer than min_param_numel=16384 elements (the largest has {largest})"
        assert [
            text for text in remarks if "RMSprop had nothing to shard" in text and expected in text
        ]
        assert (counters["optimizers"], counters["steps"]) == (1, 0)
        assert NO_WORK in remarks
    for remarks, _, counters in ranks(2)(idle, False):
        assert [
            text
            for text in remarks
            if "RMSprop had nothing to shard: no parameter of a model" in text
        ]
        assert not any(
            counters[name] for name in ("optimizers", "steps", "params_updated", "norms", "gathers")
        )


def exchanged() -> list[Record]:
    """Step an optimizer over another model, then give it the same number of parameters of the wrapped model."""
    model, judge = ddp(net()), net()
    opt = torch.optim.AdamW(judge.parameters(), lr=0.01)
    judge(data(9, 5, 6)).square().mean().backward()
    opt.step()
    opt.state.clear()
    opt.param_groups[0]["params"] = list(model.parameters())
    records = []
    for step in range(3):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(model))
    return records


def test_an_optimizer_whose_parameters_were_exchanged_is_sharded(ranks):
    check_all(ranks(2)(all_cases, exchanged, {"": {}}), steps=3)

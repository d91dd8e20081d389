"""Optimizers that need whole parameters: each rank updates some, keeps state for these, and nobody sees that."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import Optimizer

import ovpatch
from ovpatch.insight.equality import compare
from ovpatch.overlap.placeholders import Placeholder
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer import test_loop_styles, test_models
from tests.plugins.dist_optimizer.arms import SMALL, both
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.plugins.dist_optimizer.test_state import on_cpu


class Lamb(Optimizer):
    """As many people have written it: a number of steps that is Python's, and a trust ratio over a whole parameter.

    After a few steps it keeps more than before; all sorts of things besides tensors.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p), "seen": []}
                state["step"] += 1
                if state["step"] == 4:
                    state["slow"], state["norms"] = p.clone(), {"last": (None, torch.ones(2)), 7: float("inf")}
                state["m"].lerp_(p.grad, 1 - group["betas"][0])
                state["v"].lerp_(p.grad.square(), 1 - group["betas"][1])
                update = state["m"] / (state["v"].sqrt() + group["eps"]) + group["decay"] * p
                ratio = float(p.norm() / (update.norm() + 1e-6))
                state["seen"] = [*state["seen"][-2:], ratio]
                p.sub_(update, alpha=group["lr"] * ratio)
        return loss


NAMED = {"per_parameter": f"{__name__}.Lamb"}


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for matrices, and what its documentation advises for the rest."""
    return [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01),
    ]


MAKERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "muon": muon,
    "adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.01, weight_decay=0.1)],
    "adafactor, foreach": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.01, foreach=True)],
    "lamb": lambda m: [Lamb(m.parameters())],
}
KINDS = [
    pytest.param(name, marks=pytest.mark.skipif(not hasattr(torch.optim, cls), reason=f"this torch has no {cls}"))
    for name, cls in (("muon", "Muon"), ("adafactor", "Adafactor"), ("lamb", "Optimizer"))
]
STEPS = 10


def build(kind: str) -> tuple[nn.Module, list[Optimizer]]:
    model = ddp(net())
    return model, MAKERS[kind](model)


def step(model: nn.Module, opts: list[Optimizer], number: int) -> None:
    for opt in opts:
        opt.zero_grad()
    model(data(number, 5, 6)).square().mean().backward()
    for opt in opts:
        opt.step()


def train(kind: str, states: bool = False) -> list[Record]:
    model, opts = build(kind)
    records = []
    for number in range(STEPS):
        step(model, opts, number)
        records.append(params(model))
        if states or number == STEPS - 1:
            records.append({str(i): copy.deepcopy(on_cpu(opt.state_dict())) for i, opt in enumerate(opts)})
    return records


def check(results: list[dict[str, Any]], *, steps: int = STEPS, stock: int = 0, bitwise: bool | None = None) -> None:
    """Demand stock's values, and that each rank updated its share of the parameters and no more."""
    for result in results:
        compared = compare(result["stock"], result["patched"], reordered=result.get("reordered"))
        (compared.assert_bitwise if len(results) == 2 else compared.assert_equal)()
        assert result["counters"]["steps"] >= steps
        assert result["counters"]["stock_optimizers"] == stock
    assert_shared([result["counters"] for result in results])


def assert_shared(counters: list[dict[str, int]]) -> None:
    owned = [one["params_owned"] for one in counters]
    assert all(owned), owned
    assert sum(owned) <= counters[0]["params_updated"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers(ranks, world, kind):
    kinds = {kind: {"kind": kind}, "states": {"kind": kind, "states": True}}
    if kind == "adafactor":
        kinds["foreach"] = {"kind": "adafactor, foreach", "states": True}
    results = ranks(world)(all_cases, train, kinds, options=NAMED)
    for name in kinds:
        check([result[name] for result in results])

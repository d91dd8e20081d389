"""Training loops with the feature compute the same as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.plugins.ddp.arms import data, device
from tests.plugins.ddp.checks import same_bits
from tests.plugins.dist_optimizer.checks import both, train_step

STEPS = 8


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.LayerNorm(7), nn.Linear(7, 3)
    ).to(device())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}


def train(optimizer: str, steps: int = STEPS, read: bool = False) -> list[dict[str, Any]]:
    model = DistributedDataParallel(net())
    opt = OPTIMIZERS[optimizer](model.parameters())
    records = []
    for step in range(steps):
        loss = model(data(step, 5, 6)).square().mean()
        opt.zero_grad()
        loss.backward()
        record: dict[str, Any] = {"loss": loss.detach().clone()}
        if read:
            record["grad"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        opt.step()
        record["param"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        records.append(record)
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("read", [False, True])
def test_optimizers(ranks, world, optimizer, read):
    for result in same_bits(ranks(world)(both, train, optimizer, read=read)):
        assert result["counters"]["steps"] == STEPS
        assert result["counters"]["params_updated"] == STEPS * 4
        by_parts, reads = result["counters"]["grads_sharded"], result["counters"]["grads_read"]
        # The threads of gloo may hold the memory of a gradient for a moment, which then counts as a read.
        assert reads >= 2 * 4 and by_parts == 0 if read else by_parts > 0 and reads <= 2 * 4


class Signed(torch.optim.SGD):
    """An element-wise optimizer with its own step, which calls the step of a class of torch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    assert param.grad.shape == param.shape
                    param.grad = param.grad.sign()
                    state = self.state[param]
                    state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
        return super().step(closure)


def signed() -> list[dict[str, Any]]:
    model = DistributedDataParallel(net())
    opt = Signed(model.parameters(), lr=0.01)
    records = []
    for step in range(8):
        train_step(model, opt, step)
        state = opt.state_dict()["state"]
        records.append(
            {
                "param": {n: p.detach().clone() for n, p in model.named_parameters()},
                "sum": {number: values["sum"].clone() for number, values in state.items()},
            }
        )
    return records


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_class_is_sharded_only_if_the_user_names_it(ranks, named):
    options = {"element_wise": f"{__name__}.Signed" if named else ""}
    for result in same_bits(ranks(2)(both, signed, options=options)):
        counters = result["counters"]
        assert (counters["optimizers"], counters["stock_optimizers"]) == (
            (1, 0) if named else (0, 1)
        )
        assert (counters["grads_sharded"] > 0) == named

"""torch.compile inside and outside DistributedDataParallel, with parameters that arrive under the next forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.plugins.ddp.arms import data
from tests.plugins.ddp.test_compile import loop_compiled_and_counted
from tests.plugins.dist_optimizer.checks import both, ddp
from tests.support.equality import compare


def counted(outside: bool, overlap: bool) -> dict[str, Any]:
    result = both(loop_compiled_and_counted, outside, options={"overlap_param_gather": overlap})
    return {
        **result,
        "graphs": [arm.pop(-1)["graphs"] for arm in (result["stock"], result["patched"])],
    }


# Without overlap no gather is in flight in compiled code, so one case of it is enough.
@pytest.mark.parametrize(("outside", "overlap"), [(True, True), (False, True), (False, False)])
def test_compiled_training_equals_stock_and_compiles_no_more_graphs(ranks, outside, overlap):
    for result in ranks(2)(counted, outside, overlap, timeout=120):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["steps"] == 4
        assert result["counters"]["gathers_overlapped"] == (
            result["counters"]["gathers"] if overlap else 0
        )
        assert result["graphs"][0] == result["graphs"][1]
        assert result["graphs"][1]["unique_graphs"] > 0


class Block(nn.Module):
    """A user's module. torch does not compile its own modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).tanh())


def dynamo_events() -> list[Any]:
    """Compile each block alone, as some scripts do; return Dynamo's frames, and its regions and look-ups in a step.

    While a block runs, parameters of the next blocks may be in flight, so functions that wait are called in it.
    """
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        block.compile(backend="eager")
    wrapped = ddp(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    for step in range(5):
        optimizer.zero_grad()
        with torch.profiler.profile() if step == 4 else nullcontext() as profile:
            wrapped(data(step, 4, 16)).square().mean().backward()
        optimizer.step()
    frames = torch._dynamo.convert_frame.FRAME_COUNTER
    torch._dynamo.reset()
    names = sorted(
        event.name
        for event in profile.events()
        if "Dynamo" in event.name or "Compiled" in event.name
    )
    return [frames, *names]


@pytest.mark.parametrize("granularity", ["size", "layer"])
def test_compiled_blocks_are_looked_up_as_often_as_in_stock_pytorch(ranks, granularity):
    for result in ranks(2)(
        both, dynamo_events, options={"gather_granularity": granularity}, timeout=120
    ):
        assert result["counters"]["gathers_overlapped"] == (5 if granularity == "size" else 15)
        assert result["stock"] == result["patched"]
        assert result["stock"][0] == 1
        assert result["stock"].count("TorchDynamo Cache Lookup") == 3


def compiled_later(kind: str) -> list[Any]:
    """Train by eager steps, then compile them."""
    model = ddp(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)))
    opt = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind](model.parameters(), 1e-2)
    compiled, records = torch.compile(opt.step, backend="aot_eager"), list[Any]()
    for step in range(28):
        opt.zero_grad()
        model(data(step, 4, 6)).square().mean().backward()
        (opt.step if step < 4 else compiled)()
        records.append({name: param.detach().clone() for name, param in model.named_parameters()})
    torch._dynamo.reset()
    return records


# Two ranks have even shards, and three have uneven ones.
@pytest.mark.parametrize(("kind", "world"), [("adamw", 2), ("sgd", 3)])
def test_an_optimizer_whose_step_is_compiled_later_falls_back(ranks, world, kind):
    for result in ranks(world)(
        both, compiled_later, kind, options={"min_param_numel": 1}, timeout=120
    ):
        torch.testing.assert_close(result["patched"], result["stock"], rtol=1e-5, atol=1e-6)
        assert result["counters"]["steps"] == 4
        assert result["counters"]["stock_optimizers"] == 1

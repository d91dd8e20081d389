"""Copies of one state drift apart between ranks, and the copy of each rank counts as in stock PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.plugins.tp_linear.arms import (
    SCHEDULES,
    Record,
    all_both,
    check_all,
    compare,
    copy_full,
    draw,
    mesh,
    seen,
)
from tests.plugins.tp_linear.models import MLP, WIDTH, Llama, parallel_llama
from tests.support.rarely import ALL_CASES, RARELY

# Divisible by 2 and 3 ranks, in every dimension that a plan cuts.
ROWS = 6


class Normed(nn.Module):
    """A model of a norm and a feed-forward, both with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def cut(dim: int, *, local: bool = True) -> Callable[[], nn.Module]:
    """Return a function that makes a feed-forward whose outer activations are cut along a dimension."""

    def make() -> nn.Module:
        layout = Shard(dim)
        plan = {
            "norm": SequenceParallel(sequence_dim=dim, use_local_output=local),
            "mlp.up": ColwiseParallel(input_layouts=layout),
            "mlp.down": RowwiseParallel(output_layouts=layout, use_local_output=local),
        }
        return parallelize_module(Normed().double(), mesh(), plan)

    return make


def replicated() -> nn.Module:
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Replicate())}
    return parallelize_module(Normed().double(), mesh(), plan)


def blocks() -> nn.Module:
    return parallel_llama(Llama(layers=1).double(), mesh())


PLANS = {
    "rows": cut(0),
    "sequence": cut(1),
    "DTensors": cut(1, local=False),
    "replicated": replicated,
    "blocks": blocks,
}
DIFFERENT = ("bias", "norm", "input", "labels")


def drift(model: nn.Module, kind: str) -> None:
    """Make the copies of biases, or of norms, differ between ranks."""
    with torch.no_grad():
        for number, (name, param) in enumerate(model.named_parameters()):
            is_copied = not isinstance(param, DTensor) or param.placements == (Replicate(),)
            if is_copied and kind in ("norm" if "norm" in name else name):
                local = param.to_local() if isinstance(param, DTensor) else param
                local.add_(
                    draw(*local.shape, seed=100 * number + dist.get_rank(), dtype=local.dtype)
                )


def trained(plan: str, different: str, dtype: torch.dtype = torch.float64) -> Record:
    """Take two steps from different copies, with different inputs, or with labels that make copies drift."""
    torch.manual_seed(0)
    model, rank = PLANS[plan]().to(dtype), dist.get_rank()
    drift(model, different)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outputs = []
    for step in range(2):
        seed = 10 * step + rank * (different == "input")
        if plan == "blocks":
            generator = torch.Generator().manual_seed(seed)
            x = torch.randint(48, (2, ROWS), generator=generator)
        else:
            x = draw(ROWS, ROWS, WIDTH, seed=seed, dtype=dtype)
        y = model(x)
        local = y.to_local() if isinstance(y, DTensor) else y
        labels = draw(*local.shape, seed=step + rank * (different == "labels"), dtype=dtype)
        loss = (local - labels).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(copy_full(y))
    return {"outputs": outputs, **seen(model)}


CASES = {
    f"{plan}, {different}": {"plan": plan, "different": different}
    for plan, different in itertools.product(PLANS, DIFFERENT)
}


# Schedules whose sums have the order of stock PyTorch on two ranks.
IN_ORDER = ("stock", "bulk")

RUNS = [
    pytest.param(world, schedule, marks=RARELY if world == 3 and schedule != "ring" else ())
    for world, schedule in itertools.product((2, 3), SCHEDULES)
]


@pytest.mark.parametrize(("world", "schedule"), RUNS)
def test_copies_that_differ_count_as_in_stock_pytorch(ranks, world: int, schedule: str):
    # Two ranks take each case by some schedule.
    first, step = (
        (SCHEDULES.index(schedule), len(SCHEDULES)) if world == 2 and not ALL_CASES else (0, 1)
    )
    cases = dict(itertools.islice(CASES.items(), first, None, step))
    results = ranks(world)(all_both, trained, cases, options={"schedule": schedule}, timeout=120)

    def check(results: list[Any]) -> None:
        for result in results:
            compare(result["stock"], result["patched"], floor=1e-10).assert_equal()
            if world == 2 and schedule in IN_ORDER:
                assert torch.equal(result["stock"]["outputs"][0], result["patched"]["outputs"][0])
            assert result["counters"]["calls"] > 0

    check_all(results, check=check)

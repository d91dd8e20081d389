"""Backwards at unusual times, split backwards, backwards in other orders, and backwards of a model that changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record, both, data, record_steps, seen, table
from tests.plugins.ddp.checks import check, check_cases

WORLDS = [2, 3]
TINY = 0.0001
CAPS = [TINY, 25]


class Towers(nn.Module):
    """Independent towers, whose backwards can run separately, in any order."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> list[torch.Tensor]:
        outputs = {i: self.towers[i](x) for i in order or range(len(self.towers))}
        return [outputs[i] for i in range(len(self.towers))]


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    return sum(output.square().mean() for output in outputs)


def loop_piecewise(cap: float, ddp: dict[str, Any], reverse: bool) -> list[Record]:
    """Run one forward, and a backward for each of its outputs. Together they reach every parameter."""
    model = Towers()
    wrapped = DDP(model, bucket_cap_mb=cap, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    records = []
    for step in range(4):
        outputs = wrapped(data(step, 4, 6))
        for output in reversed(outputs) if reverse else outputs:
            output.square().mean().backward()
        records.append(seen(model))
        optimizer.step()
        optimizer.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_one_forward_with_a_backward_for_each_output(ranks, world):
    check_cases(
        ranks(world), loop_piecewise, table(cap=CAPS, ddp=[{}], reverse=[True, False]), backwards=4
    )


def loop_orders(cap: float, ddp: dict[str, Any]) -> list[Record]:
    """Run the towers in another order on each rank, so gradients come in another order as well."""
    model = Towers()
    wrapped = DDP(model, bucket_cap_mb=cap, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    orders = ([(i + dist.get_rank() + step) % 3 for i in range(3)] for step in range(5))
    losses = (loss_of(wrapped(data(step, 4, 6), order)) for step, order in enumerate(orders))
    return record_steps(model, losses, optimizer)


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_whose_gradients_come_in_other_orders(ranks, world):
    check_cases(
        ranks(world),
        loop_orders,
        table(cap=CAPS, ddp=[{}, {"find_unused_parameters": True}]),
        backwards=5,
    )


def loop_closure(kind: str) -> list[Record]:
    """Let the optimizer run forward and backward, which LBFGS does several times per step."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    wrapped = DDP(model)
    params = model.parameters()
    optimizer = (
        torch.optim.LBFGS(params, 0.1, max_iter=3)
        if kind == "lbfgs"
        else torch.optim.SGD(params, 0.1)
    )
    records = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = wrapped(data(step, 8, 6)).square().mean()
            loss.backward()
            records.append(seen(model, loss))
            return loss

        optimizer.step(closure)
    return [*records, seen(model)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["lbfgs", "sgd"])
def test_a_backward_inside_the_optimizers_step(ranks, world, kind):
    results = ranks(world)(both, loop_closure, kind)
    check(results)
    assert results[0]["counters"]["backwards"] == len(results[0]["patched"]) - 1 >= 3


def loop_extra_backward(cap: float, ddp: dict[str, Any]) -> list[Record]:
    """Add a forward and backward of a second batch without no_sync, from the third step on."""
    model = Towers(1)
    wrapped = DDP(model, bucket_cap_mb=cap, **ddp)
    records = []
    for step in range(4):
        for micro in range(1 + step // 2):
            wrapped(data(step, 4, 6, micro=micro))[0].square().mean().backward()
            records.append(seen(model))
        wrapped.zero_grad()
    return records


def test_an_extra_backward_after_the_first_steps(ranks):
    cases = table(cap=CAPS, ddp=[{}, {"find_unused_parameters": True}, {"static_graph": True}])
    check_cases(ranks(2), loop_extra_backward, cases, backwards=6)


def loop_frozen_later(cap: float, back: bool) -> list[Record]:
    model = Towers()
    wrapped = DDP(model, bucket_cap_mb=cap, find_unused_parameters=True)

    def losses() -> Iterator[torch.Tensor]:
        for step in range(6):
            if step == 2:
                model.towers[1].requires_grad_(False)
            if step == 4 and back:
                model.towers[1].requires_grad_(True)
            yield loss_of(wrapped(data(step, 4, 6)))

    return record_steps(model, losses(), torch.optim.AdamW(model.parameters(), 0.01))


@pytest.mark.parametrize("world", WORLDS)
def test_a_part_frozen_later_and_thawed_again(ranks, world):
    results = check_cases(
        ranks(world), loop_frozen_later, table(cap=CAPS, back=[True, False]), backwards=6
    )
    for name, case in results[0].items():
        assert case["patched"][3]["grad"]["towers.1.0.weight"] is None
        assert (case["patched"][5]["grad"]["towers.1.0.weight"] is not None) == (
            "back True" in name
        )


def loop_frozen_at_the_wrap(cap: float) -> list[Record]:
    """Thaw parameters that were frozen when the model was wrapped; stock PyTorch does not reduce them either."""
    model = Towers()
    model.towers[0].requires_grad_(False)
    wrapped = DDP(model, bucket_cap_mb=cap)

    def losses() -> Iterator[torch.Tensor]:
        for step in range(4):
            if step == 2:
                model.towers[0].requires_grad_(True)
            yield loss_of(wrapped(data(step, 4, 6)))

    return record_steps(model, losses())


def test_a_part_that_was_frozen_at_the_wrap_stays_local(ranks):
    first, second = check_cases(ranks(2), loop_frozen_at_the_wrap, table(cap=CAPS), backwards=4)
    for name in first:
        here, there = (
            result[name]["patched"][3]["grad"]["towers.0.0.weight"] for result in (first, second)
        )
        assert not torch.equal(here, there), name

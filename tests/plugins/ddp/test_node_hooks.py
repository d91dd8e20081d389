"""Hooks of others on the AccumulateGrad nodes that our reducer listens to."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from tests.plugins.ddp.arms import Record, both, data
from tests.support.equality import compare


def hooked(where: str) -> list[Record]:
    """Train with a hook on a node that doubles a gradient, registered before the wrapper or behind it."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    node: Any = get_gradient_edge(net[0].weight).node

    def double(*_: Any) -> None:
        assert net[0].weight.grad is not None
        net[0].weight.grad.mul_(2)

    if where == "before":
        node.register_hook(double)
    wrapped = DDP(net)
    if where == "behind":
        node.register_hook(double)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    records: list[Record] = []
    for step in range(3):
        opt.zero_grad()
        wrapped(data(step, 4, 8)).square().mean().backward()
        records.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        opt.step()
    return records


@pytest.mark.parametrize("where", ["before", "behind"])
def test_what_they_do_counts_as_under_stock(ranks, where):
    for result in ranks(2)(both, hooked, where):
        compare(result["stock"], result["patched"]).assert_bitwise()


def wrapped_again() -> list[bool]:
    found = []
    with ovpatch.applied("ddp"):
        net = nn.Linear(8, 8)
        nodes = [get_gradient_edge(param).node for param in net.parameters()]  # which outlive the wrapper
        for _ in range(2):
            wrapped = DDP(net)
            wrapped(torch.ones(2, 8)).sum().backward()
            found.append(wrapped.reducer._hooks.has_foreign())
            del wrapped
            gc.collect()
        assert nodes
    return found


def test_those_of_an_earlier_wrapper_are_gone_with_it(ranks):
    assert ranks(2)(wrapped_again) == [[False, False]] * 2

"""The communicator with an SM budget is made by the first backward that reduces, for which all ranks are there."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.ddp.arms import Record, data
from tests.support.equality import compare


def train(patched: bool) -> tuple[list[Record], list[str]]:
    """Rank 0 alone runs a forward with gradients enabled; then all train."""
    made: list[str] = []

    def get_budgeted_group(group: dist.ProcessGroup, max_ctas: int | None) -> dist.ProcessGroup:
        del group, max_ctas
        made.append(when)
        return dist.new_group()

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)))
    records: list[Record] = []
    # gloo has no budget, but may have a second communicator.
    with mock.patch("ovpatch_plugins.ddp.reducer.get_budgeted_group", get_budgeted_group):
        when = "alone"
        if dist.get_rank() == 0:
            model(data(0, 5, 6))
        when = "together"
        for number in range(3):
            model.zero_grad()
            model(data(number, 5, 6)).square().mean().backward()
            records.append({"grads": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}})
    assert made == ["together"] * patched
    return records, made


def both() -> tuple[list[Record], list[Record]]:
    stock, _ = train(patched=False)
    with ovpatch.applied("ddp"):
        patched, _ = train(patched=True)
        dist.barrier()
    return stock, patched


def test_a_forward_of_one_rank_alone_makes_no_communicator(ranks):
    for stock, patched in ranks(2)(both, timeout=60):
        compare(stock, patched).assert_bitwise()

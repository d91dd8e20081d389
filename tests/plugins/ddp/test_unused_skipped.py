"""``skip_all_reduce_unused_params``: buckets that no rank uses are not reduced."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record, both, data, seen
from tests.plugins.ddp.checks import check

TINY = 0.0001


class Frozen(nn.Module):
    """One branch is never taken, and takes part in the reduction nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.taken, self.left = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.taken(self.stem(x))


def loop(skip: bool) -> list[Record]:
    model = Frozen()
    wrapped = DDP(model, find_unused_parameters=True, bucket_cap_mb=TINY, skip_all_reduce_unused_params=skip)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    records = []
    for step in range(4):
        loss = wrapped(data(step, 4, 8)).square().mean()
        loss.backward()
        records.append(seen(model, loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*records, seen(model)]


@pytest.mark.parametrize("world", [2, 3])
def test_skipped_buckets_are_not_reduced_and_change_nothing(ranks, world):
    all_of_them = ranks(world)(both, loop, False)
    results = ranks(world)(both, loop, True)
    check(all_of_them, backwards=4)
    check(results, backwards=4)
    for result, whole in zip(results, all_of_them, strict=True):
        spared = {name: count - result["counters"][name] for name, count in whole["counters"].items()}
        assert spared["collectives"] == 4 * 2  # the first of the three shares its bucket with what is used
        assert spared["bytes_reduced"] == 4 * 2 * 8 * 8 * 4
        assert result["patched"][0]["grad"]["left.0.weight"] is None

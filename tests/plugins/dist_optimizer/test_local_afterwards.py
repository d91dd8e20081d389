"""Training on, each rank by itself, when the wrapper is gone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer.arms import both
from tests.plugins.dist_optimizer.checks import ddp, params
from tests.plugins.dist_optimizer.test_loops import net


def deleted(set_to_none: bool, alone: bool, again: bool) -> list[Any]:
    """Steps on all ranks, then steps of the module alone, on all or on one, and maybe another wrapper."""
    module = net()
    model: nn.Module | None = ddp(module)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(10):
        if step == 5:
            model = None
            gc.collect()
        if step == 8 and again:
            model = ddp(module)
        opt.zero_grad(set_to_none=set_to_none)
        if model is not None or not alone or dist.get_rank() == 0:
            (model or module)(data(step, 5, 6)).square().mean().backward()
            if step % 2:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            opt.step()
        records.append(params(module))
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_without_the_wrapper_ranks_go_on_by_themselves(ranks, world, set_to_none):
    for alone, again in ((False, False), (True, False), (False, True)):
        results = ranks(world)(both, deleted, set_to_none, alone, again)
        for result in results:
            torch.testing.assert_close(result["patched"], result["stock"], rtol=1e-5, atol=1e-6)
            assert result["counters"]["steps"] == 5
        first, second = (result["patched"][7]["0.weight"] for result in results[:2])
        assert not torch.equal(first, second), "each trains by its own data"

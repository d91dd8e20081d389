"""``GradScaler``: all ranks skip a step in which any of them has an infinity."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.plugins.ddp.arms import all_both, data, device, table
from tests.plugins.ddp.checks import check_all
from tests.plugins.dist_optimizer.checks import apply
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support.equality import compare

# The steps in which the gradient of one rank has an infinity. Gradients are sharded by then, and between these steps
# the scale grows.
SPOILT = (3, 8)


FUSED = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


def train(unscale: bool, clip: bool, fused: bool, culprit: int) -> list[dict[str, Any]]:
    model = DistributedDataParallel(net())
    opt = (FUSED if fused else OPTIMIZERS["adamw"])(model.parameters())
    scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10, growth_interval=4)
    now = [0]

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        # After the average, only the shard with the last element has the infinity.
        if now[0] in SPOILT and dist.get_rank() == culprit:
            grad = grad.clone()
            grad.view(-1)[-1] = float("inf")
        return grad

    model.module[0].weight.register_hook(spoil)
    records = []
    for step in range(SPOILT[-1] + 2):
        now[0] = step
        opt.zero_grad()
        scaler.scale(model(data(step, 5, 6)).square().mean()).backward()
        if unscale:
            scaler.unscale_(opt)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        records.append(
            {
                "scale": scaler.get_scale(),
                "param": {n: p.detach().clone() for n, p in model.named_parameters()},
            }
        )
    return records


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        compare(result["stock"], result["patched"]).assert_equal()
        scales = [record["scale"] for record in result["patched"]]
        assert scales == [record["scale"] for record in result["stock"]]
        for step in SPOILT:
            assert scales[step] == scales[step - 1] / 2, (
                "no step was skipped, so the test shows nothing"
            )
        assert result["counters"]["grads_sharded"] > 0


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_skip_together(ranks, world):
    # The fused kernel reads the infinity from the scaler like the other kernels, so two ranks are enough.
    fused = [False, True] if world == 2 else [False]
    cases = table(unscale=[True], clip=[False, True], fused=fused, culprit=[0])
    cases |= table(unscale=[False], clip=[False], fused=fused, culprit=[0])
    check_all(ranks(world)(all_both, train, cases, apply=apply), check=check)

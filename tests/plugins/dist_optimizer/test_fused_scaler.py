"""Fused optimizers under a ``GradScaler``, whose kernels unscale gradients in the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.plugins.ddp.arms import data, device
from tests.plugins.dist_optimizer.checks import all_cases, ddp, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.equality import compare

STEPS = 6


def train(
    *, reads: str = "", by: int | None = None, scale: float = 4.0, zeroes: bool = True
) -> list[Any]:
    """Train with an overflow in step 3.

    Args:
        reads: When gradients are read: ``before`` or ``after`` the step, or not at all.
        by: The rank that reads them. Default: all ranks.
        scale: The first scale.
        zeroes: Whether gradients are zeroed; otherwise the next backward adds to the unscaled ones.
    """
    model = ddp(net())
    opt = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device().type, init_scale=scale, growth_interval=3)
    records: list[Any] = []

    def read() -> None:
        if by in (None, dist.get_rank()):
            records.append([param.grad.clone() for param in model.parameters()])

    for step in range(STEPS):
        if zeroes:
            opt.zero_grad()
        loss = model(data(step, 5, 6)).square().mean()
        scaler.scale(loss * (float("inf") if step == 3 and zeroes else 1)).backward()
        if reads == "before":
            read()
        scaler.step(opt)
        if reads == "after":
            read()
        scaler.update()
        records += [params(model), scaler.get_scale()]
    return records


CASES: dict[str, dict[str, Any]] = {
    "unread": {},
    "kept": {"zeroes": False},
    "read before": {"reads": "before"},
    "read after": {"reads": "after"},
    "read after by one rank": {"reads": "after", "by": 0},
    "read before by one rank": {"reads": "before", "by": 1},
    "kept and read by one rank": {"reads": "after", "by": 1, "zeroes": False},
    "a scale that divides with rounding": {"reads": "after", "scale": 3.0},
}


def check(results: list[dict[str, Any]]) -> None:
    for name in CASES:
        for result in (by_rank[name] for by_rank in results):
            # Fused kernels round the elements that fill no vector in another way, and a shard has others.
            compare(result["stock"], result["patched"], noise_units=4).assert_equal()
            assert result["counters"]["steps"] == STEPS, name


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_unscaled_wherever_they_are(ranks, world):
    check(ranks(world)(all_cases, train, CASES))

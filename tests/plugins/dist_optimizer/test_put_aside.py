"""Gradients that the script puts aside before a backward, and restores before the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer.checks import all_cases, ddp, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.equality import compare

BEGIN, STEPS = 3, 6


def train(
    *, local: bool, clips: bool = False, reads: bool = False, part: bool = False
) -> list[Any]:
    """Train; from step 3 on, gradients are put aside during another reduced backward.

    Args:
        local: Whether they have local terms by then.
        clips: Whether their norm is clipped.
        reads: Whether the gradients of the other backward are read.
        part: Whether a parameter is used by no local backward.
    """
    model = ddp(net())
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    records = []
    for step in range(STEPS):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        if step >= BEGIN:
            if local:
                with model.no_sync():
                    y = model(data(step, 5, 6, micro=1))
                    (
                        y.detach() * model.module[-1].bias.sum() if part else y.square()
                    ).mean().backward()
            saved = [param.grad for param in model.parameters()]
            for param in model.parameters():
                param.grad = None
            model(data(step, 5, 6, micro=2)).square().mean().backward()
            if reads:
                records.append([param.grad.clone() for param in model.parameters()])
            for param, grad in zip(model.parameters(), saved, strict=True):
                param.grad = grad
        if clips:
            records.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        opt.step()
        records.append(params(model))
    return records


CASES = {
    f"{', '.join(names) or 'reduced'}": dict.fromkeys(names, True) | {"local": "local" in names}
    for names in (
        (), ("reads",), ("clips",), ("local",), ("local", "reads"), ("local", "part"),
    )
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_that_are_restored_are_what_they_were(ranks, world):
    results = ranks(world)(all_cases, train, CASES)
    for name in CASES:
        found = [result[name] for result in results]
        for result in found:
            compare(result["stock"], result["patched"]).assert_equal()
            is_local = name.startswith("local")
            assert result["counters"]["steps"] == (BEGIN if is_local else STEPS), name
        first, second = (result["patched"][-1].values() for result in found[:2])
        is_equal = all(map(torch.equal, first, second))
        assert is_equal != name.startswith("local"), "ranks differ by local gradients"

"""Training loops of these tests, and a comparison of two runs."""

from __future__ import annotations

from typing import Any

import torch

from tests.plugins.tp_linear.arms import Record, copy_full, seen
from tests.support.equality import compare


def trained(
    model: torch.nn.Module, run: Any, steps: int, *, backward: bool = True, gathered: bool = False
) -> list[Record]:
    """Train with AdamW and gradient clipping.

    Args:
        model: The model.
        run: ``run(step)`` returns the loss of a step, and functions that return more records.
        steps: The number of steps.
        backward: Whether to run the backward of the loss, unless ``run`` does.
        gathered: See :func:`tests.plugins.tp_linear.arms.seen`.
    """
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], 0.01, foreach=False
    )
    records = []
    for step in range(steps):
        loss, more = run(step)
        if backward:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        record = {
            "loss": copy_full(loss),
            "norm": copy_full(norm),
            **seen(model, gathered=gathered),
        }
        records.append({**record, **{k: v() for k, v in more.items()}})
        optimizer.step()
        optimizer.zero_grad()
    return [*records, seen(model, gathered=gathered)]


def equal(
    expected: list[Record], found: list[Record], names: tuple[str, ...] = (), floor: float = 1e-11
) -> None:
    """Compare two runs in float64; the order of sums may differ."""
    wanted, values = (
        [{n: v for n, v in record.items() if not names or n in names} for record in records]
        for records in (expected, found)
    )
    compare(wanted, values, floor=floor).assert_equal()

"""Training loops of these tests, and how two runs are held against each other."""

from __future__ import annotations

from typing import Any

import torch

from tests.plugins.tp_linear.arms import Record, seen, whole
from tests.support.equality import compare


def trained(
    model: torch.nn.Module, run: Any, steps: int, *, backward: bool = True, gathered: bool = False
) -> list[Record]:
    """Train with AdamW and clipping; ``run(step)`` returns the loss of a step, and what else is to be seen; and has
    run backward, if we must not. For ``gathered`` see :func:`tests.plugins.tp_linear.arms.seen`."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], 0.01, foreach=False
    )
    records = []
    for step in range(steps):
        loss, more = run(step)
        if backward:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        record = {"loss": whole(loss), "norm": whole(norm), **seen(model, gathered=gathered)}
        records.append({**record, **{k: v() for k, v in more.items()}})
        optimizer.step()
        optimizer.zero_grad()
    return [*records, seen(model, gathered=gathered)]


def equal(
    expected: list[Record], found: list[Record], names: tuple[str, ...] = (), floor: float = 1e-11
) -> None:
    """Hold two runs in float64 against each other; the order of sums may differ."""
    keep = [{n: v for n, v in record.items() if not names or n in names} for record in expected]
    other = [{n: v for n, v in record.items() if not names or n in names} for record in found]
    compare(keep, other, floor=floor).assert_equal()

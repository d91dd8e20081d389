"""The first use of linears under tensor parallelism inside of a mode of the script changes no later step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.plugins.tp_linear.arms import (
    SCHEDULES,
    Record,
    all_both,
    check_all,
    copy_full,
    draw,
    mesh,
    seen,
)
from tests.plugins.tp_linear.models import MLP, WIDTH
from tests.support.equality import compare
from tests.support.modes import FORWARD_ONLY, LEVELS, MODES

CUT = Shard(0)
PLAN = {"up": ColwiseParallel(input_layouts=CUT), "down": RowwiseParallel(output_layouts=CUT)}

# These schedules split the rows of a GEMM, and some processors round such a GEMM in another way.
SPLIT_ROWS = ("chunk", "ring")


def train(mode: str) -> list[Record]:
    """Train three steps; the first step is inside of the mode, or follows a forward in it."""
    torch.manual_seed(0)
    model = parallelize_module(MLP(), mesh(), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    for step in range(3):
        x = draw(3, WIDTH, seed=10 * step + dist.get_rank())
        record: Record = {}
        if step == 0 and mode in LEVELS:
            # torch's own DTensor refuses to enter a level.
            with pytest.raises(RuntimeError, match="functorch") as caught, MODES[mode]():
                model(x)
            record["before"] = str(caught.value)
        elif step == 0 and mode in FORWARD_ONLY:
            with MODES[mode]():
                before = model(x)
                # A fake tensor has a shape but no values.
                record["before"] = (
                    tuple(before.shape) if mode == "fake" else copy_full(before).clone()
                )
        with MODES[mode]() if step == 0 and mode not in FORWARD_ONLY else contextlib.nullcontext():
            loss = model(x).square().sum()
            loss.backward()
        records.append({"loss": copy_full(loss), **record, **seen(model)})
        optimizer.step()
        optimizer.zero_grad()
    return [*records, seen(model)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_use_inside_of_a_mode(ranks: Any, schedule: str) -> None:
    cases = {mode: {"mode": mode} for mode in MODES}
    results = ranks(2)(all_both, train, cases, options={"schedule": schedule}, timeout=120)

    def check(results_by_rank: list[Record]) -> None:
        for result in results_by_rank:
            # In inference mode DTensor adds the bias inside of the GEMM, in another order than with gradients.
            before = [result[arm][0].pop("before", None) for arm in ("stock", "patched")]
            compare(*before).assert_equal()
            if schedule in SPLIT_ROWS:
                compare(result["stock"], result["patched"], noise_units=32).assert_equal()
            else:
                compare(result["stock"], result["patched"]).assert_bitwise()
            assert result["counters"]["calls"] >= 6, result["counters"]

    check_all(results, check=check)

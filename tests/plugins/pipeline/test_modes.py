"""The first step of a pipeline inside of a mode of the script changes no later step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import ovpatch
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.ddp.arms import named
from tests.plugins.pipeline.cases import (
    Case,
    counters,
    differences,
    list_params,
    make_schedule,
    run_steps,
)
from tests.support.modes import FORWARD_ONLY, LEVELS, MODES
from tests.support.torch_versions import HAS_OLD_STAGES

CASES = {
    "1f1b": Case(),
    "interleaved": Case(schedule="ScheduleInterleaved1F1B", chunks=2, microbatches=4),
    "varying lengths": Case(),
    "zero bubble": Case(schedule="ScheduleInterleavedZeroBubble", chunks=2, microbatches=4),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "zb-h1"},
    "varying lengths": {"schedule": "zb-h1", "variable_seq_lengths": True},
}
ENDS = ("is_first", "is_last")


def train(case: Case, mode: str) -> list[Any]:
    """Train two steps; the first step is inside of the mode, or follows an evaluation in it."""
    schedule, parts = make_schedule(case)
    params = list_params(parts)
    optimizer = torch.optim.AdamW([param for _, param in params], lr=1e-2)
    contexts = iter([] if mode in FORWARD_ONLY else [MODES[mode]])
    if mode in FORWARD_ONLY:
        rows, width = case.shape[0] * case.microbatches, case.shape[1]
        is_first, is_last = (
            any(getattr(stage, name) for stage in list_stages(schedule)) for name in ENDS
        )
        x = torch.ones(rows, 2, width)
        with MODES[mode]():
            schedule.eval(*((x,) if is_first else ()), target=x if is_last else None, losses=[])

    def context() -> contextlib.AbstractContextManager[Any]:
        return next(contexts, contextlib.nullcontext)()

    return run_steps(Case(**{**vars(case), "context": context}), schedule, params, optimizer, 0)


def train_all(mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with named(f"{name} in {mode}"):
            stock = train(case, mode)
            with ovpatch.applied("pipeline", options={"pipeline": OPTIONS.get(name, {})}):
                before = counters()["steps"]
                found[name] = differences(stock, train(case, mode)), counters()["steps"] - before
    return found


# Messages cannot be fake, and torch's stages call requires_grad_(), which a level refuses.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("fake", *LEVELS)])
def test_the_first_step_inside_of_a_mode(ranks: Any, mode: str) -> None:
    if HAS_OLD_STAGES and mode in ("no_grad", "inference"):
        pytest.skip("stock PyTorch fails")
    for found in ranks(2)(train_all, mode, timeout=120):
        assert found == dict.fromkeys(CASES, ([], 2))

"""schedule=auto: it measures, solves, races and keeps the faster order, alike on all ranks, with stock's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovpatch_plugins.pipeline import auto_schedule
from ovpatch_plugins.pipeline.auto_schedule import MEASURED, WARM_UP
from tests.plugins.pipeline.cases import Case, Outcome, train_both
from tests.plugins.pipeline.models import Block, Part

STEPS = WARM_UP + MEASURED + 2 * 2 * 4 + 3
EIGHT: dict[str, Any] = {"microbatches": 8, "chunks": 2, "steps": STEPS}
CASES = {
    "Schedule1F1B": Case(steps=STEPS, microbatches=8),
    "ScheduleGPipe, dropout": Case("ScheduleGPipe", steps=STEPS, part=lambda _: Part(Block(0.2, False), Block())),
    "ScheduleInterleaved1F1B": Case("ScheduleInterleaved1F1B", **EIGHT),
    "ScheduleLoopedBFS": Case("ScheduleLoopedBFS", **EIGHT),
    "ScheduleZBVZeroBubble, dropout": Case(
        "ScheduleZBVZeroBubble", vee=True, part=lambda _: Part(Block(0.2), Block()), **EIGHT
    ),
}


def _run(names: list[str], cache: str, winner: int) -> dict[str, Outcome]:
    """Train under ``schedule=auto``; the order as given wins (0), or the solved one (1)."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OVPATCH_CACHE_DIR", cache)
    patch.setattr(auto_schedule.AutoSchedule, "_read_step", lambda _self, number: 1.0 + (number != winner))
    patch.setattr("ovpatch_plugins.pipeline.candidates._GAIN", -9.0)
    try:
        return {name: train_both(CASES[name], "auto", memory_limit="1.5x") for name in names}
    finally:
        patch.undo()


@pytest.mark.parametrize("world", [2, 4])
def test_each_step_has_stocks_bits_whoever_wins(ranks: Any, tmp_path: Path, world: int) -> None:
    names = list(CASES) if world == 2 else ["Schedule1F1B", "ScheduleZBVZeroBubble, dropout"]
    found = ranks(world)(_run, names, str(tmp_path), 1, timeout=120)
    for rank, outcomes in enumerate(found):
        for name, outcome in outcomes.items():
            assert not outcome.differences, f"rank {rank}, {name}: {outcome.differences[:4]}"
            assert outcome.counters["steps"] == STEPS, name
            text = " ".join(outcome.remarks)
            assert "runs as solved for 1.5x" in text, text
            assert "solved for 1.5x takes 1000.0 ms a step against 2000.0 ms as given (predicted " in text, text

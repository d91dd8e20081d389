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


def test_the_order_as_given_stays_where_it_is_faster(ranks: Any, tmp_path: Path) -> None:
    for outcomes in ranks(2)(_run, ["Schedule1F1B"], str(tmp_path), 0, timeout=120):
        outcome = outcomes["Schedule1F1B"]
        assert not outcome.differences, outcome.differences[:4]
        text = " ".join(outcome.remarks)
        assert "the order as given stays: 1000.0 ms a step against 2000.0 ms of solved for 1.5x" in text, text
        assert "Schedule1F1B runs as 1f1b" in text, text


def _run_twice(cache: str) -> list[Outcome]:
    return [_run(["Schedule1F1B"], cache, 1)["Schedule1F1B"] for _ in range(2)]


def test_a_later_run_takes_the_order_that_was_chosen(ranks: Any, tmp_path: Path) -> None:
    for first, second in ranks(2)(_run_twice, str(tmp_path), timeout=120):
        assert not first.differences, first.differences[:4]
        assert not second.differences, second.differences[:4]
        assert "chosen in an earlier run" not in " ".join(first.remarks)
        assert "solved for 1.5x, chosen in an earlier run (as given 2000.0 ms" in " ".join(second.remarks), (
            second.remarks
        )

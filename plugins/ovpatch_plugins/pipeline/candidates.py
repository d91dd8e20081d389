"""The orders that ``schedule=auto`` races, and the plan of ``ovpatch pipeline`` that is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ovpatch.overlap.autotune.measure import write_json
from ovpatch_plugins.pipeline.actions import Schedule
from ovpatch_plugins.pipeline.measured_costs import PipelineCosts, find_unit, make_problem
from ovpatch_plugins.pipeline.options import MemoryLimit, read_memory_limit
from ovpatch_plugins.pipeline.orders import ORDERS, Placement, ScheduleError, build_order, split_backwards
from ovpatch_plugins.pipeline.planning import draw_text
from ovpatch_plugins.pipeline.schedule_cache import read_orders, write_orders
from ovpatch_plugins.pipeline.simulator import Simulation, simulate
from ovpatch_plugins.pipeline.solver import Solution, find_lower_bound, solve

AS_GIVEN_NAME: Final = "as given"

_GAIN: Final = 0.002  # by which an order is expected to be shorter before it is raced
_PLANNED: Final = ("1x", "1.5x", "2x")


@dataclass(frozen=True)
class Candidate:
    """An order that may be run.

    Attributes:
        name: What it is called in the report.
        schedule: Orders by rank.
        predicted: Simulated seconds of a step.
        memory: What it holds on the fullest rank, in units of 1F1B's.
        setting: Options that make the feature run it, by name.
    """

    name: str
    schedule: Schedule
    predicted: float
    memory: float
    setting: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {**vars(self), "schedule": write_orders(self.schedule), "setting": dict(self.setting)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Candidate:
        """Return what :meth:`to_json` wrote."""
        return cls(**{**data, "schedule": read_orders(data["schedule"])})


def find_candidates(
    measured: PipelineCosts,
    placement: Placement,
    microbatches: int,
    stock: Schedule,
    memory_limit: str,
    *,
    plans: bool,
) -> tuple[list[Candidate], str]:
    """Return the order as given and those that may be faster, and a remark.

    Args:
        measured: What all ranks measured.
        placement: Rank of each stage.
        microbatches: Their number.
        stock: The order as given.
        memory_limit: The option.
        plans: Return all fixed orders and one solved for each of some limits, whatever is expected of them.
    """
    unit = find_unit(measured, placement, microbatches)
    given = _simulate(stock, placement, measured)
    found = [Candidate(AS_GIVEN_NAME, stock, given.step, max(given.peak_memory) / unit, {"schedule": "as-given"})]
    if plans and list(placement) == list(range(len(stock))):
        for name in ORDERS:
            schedule = build_order(name, ranks=len(stock), microbatches=microbatches)
            simulation = _simulate(schedule, placement, measured)
            memory = max(simulation.peak_memory) / unit
            found.append(Candidate(name, schedule, simulation.step, memory, {"schedule": name}))
    texts = [*_PLANNED, *([memory_limit] if memory_limit not in _PLANNED else [])] if plans else [memory_limit]
    remarks = []
    for text in texts:
        limit = read_memory_limit(text)
        if plans and limit == MemoryLimit() and not measured.spare:
            continue  # the same as 1x
        problem, remark = make_problem(measured, placement, microbatches, stock, limit)
        remarks.append(remark)
        try:
            solution = solve(problem)
        except ScheduleError as error:
            remarks.append(f"memory_limit={text}: {error}")
            continue
        if plans or solution.simulation.step < given.step * (1 - _GAIN):
            found.append(_name_solution(solution, text, unit))
    return _merge_equal(found), "; ".join(filter(None, dict.fromkeys(remarks)))


def _simulate(schedule: Schedule, placement: Placement, measured: PipelineCosts) -> Simulation:
    """Simulate an order as the engine runs it: an input gradient is sent before its weight gradients."""
    return simulate(split_backwards(schedule), placement, measured.costs, footprint=measured.footprint)


def _name_solution(solution: Solution, text: str, unit: float) -> Candidate:
    simulation = solution.simulation
    setting = {"schedule": "auto", "memory_limit": text}
    name = f"solved for {text}" if text != "auto" else "solved"
    return Candidate(name, solution.schedule, simulation.step, max(simulation.peak_memory) / unit, setting)


def _merge_equal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the orders that run differently, each with the names of all that are equal."""
    kept: dict[str, Candidate] = {}
    for candidate in candidates:
        text = " / ".join(write_orders(split_backwards(candidate.schedule)))
        first = kept.get(text)
        kept[text] = candidate if first is None else replace(first, name=f"{first.name} = {candidate.name}")
    return list(kept.values())


def write_plan(
    path: Path,
    name: str,
    measured: PipelineCosts,
    numbers: tuple[int, Placement],
    candidates: Sequence[Candidate],
    steps: Sequence[float],
    best: int,
) -> None:
    """Write what was measured for ``ovpatch pipeline``, as JSON data.

    Args:
        path: The file; it is there as a whole or not at all.
        name: Class of the schedule.
        measured: Costs.
        numbers: Microbatches, and the rank of each stage.
        candidates: Orders that were raced.
        steps: Measured seconds of a step of each; NaN or infinite where unknown.
        best: The fastest.
    """
    microbatches, placement = numbers
    problem, _ = make_problem(measured, placement, microbatches, candidates[0].schedule, MemoryLimit(1.0))
    winner = _simulate(candidates[best].schedule, placement, measured)
    work = max(winner.busy)
    rows = [
        {
            "order": candidate.name,
            "memory": candidate.memory,
            "predicted": candidate.predicted,
            "measured": seconds if math.isfinite(seconds) else None,
            "bubble": max(0.0, 1 - work / (seconds if math.isfinite(seconds) else candidate.predicted)),
            "setting": dict(candidate.setting),
        }
        for candidate, seconds in zip(candidates, steps, strict=True)
    ]
    plan = {
        "class": name,
        "ranks": max(placement) + 1,
        "microbatches": microbatches,
        "placement": list(placement),
        "costs": measured.to_json(),
        "limit": work,
        "bound": find_lower_bound(problem),
        "rows": rows,
        "best": best,
        "timeline": [
            [[a.kind.value, a.stage, a.microbatch, begin, end] for a, begin, end in line] for line in winner.timeline
        ],
        "picture": draw_text(winner),
    }
    write_json(path, plan)

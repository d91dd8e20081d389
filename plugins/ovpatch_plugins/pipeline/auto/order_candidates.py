"""The orders that ``schedule=auto`` races, the plan of ``ovpatch pipeline`` about them, and the chosen order.

Choices are files in the user's cache, one for each pipeline. The first rank of a job reads and writes them, and sends
them to its peers. A file that cannot be read is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ovpatch.overlap.kernels.autotuner import write_if_possible, write_json
from ovpatch.overlap.pipelining.ir import (
    Placement,
    Schedule,
    ScheduleError,
    read_orders,
    write_orders,
)
from ovpatch.overlap.pipelining.order_table import ORDERS
from ovpatch.overlap.pipelining.orders import build_order, split_backwards
from ovpatch.planner.memory_limit import MemoryLimit, read_memory_limit
from ovpatch.planner.simulator import Simulation, simulate
from ovpatch.planner.solver import Problem, Solution, find_lower_bound, share_solutions, solve
from ovpatch.planner.what_if import draw_text
from ovpatch_plugins.pipeline.auto.measured_costs import PipelineCosts, find_unit, make_problem
from ovpatch_plugins.pipeline.auto.order_race import CLEAR

AS_GIVEN_NAME: Final = "as given"
STOCK_NAME: Final = "stock"
"""The name of torch's own runtime in a plan."""

# The part by which an order is expected to be shorter before it is raced.
_GAIN: Final = 0.002
# The format of the files. Orders in files of format 1 may hold more memory than is allowed now.
_FORMAT: Final = 2
# The memory limits for which a plan has a solved order.
_PLANNED: Final = ("1x", "1.5x", "2x")


@dataclass(frozen=True)
class Candidate:
    """An order that may be run.

    Attributes:
        name: Its name in the report.
        schedule: Orders by rank.
        predicted: Simulated seconds of a step.
        memory: Memory on the fullest rank, in units of 1F1B's.
        setting: Options that make the feature run it, by name.
    """

    name: str
    schedule: Schedule
    predicted: float
    memory: float
    setting: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            **vars(self),
            "schedule": write_orders(self.schedule),
            "setting": dict(self.setting),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Candidate:
        """Return the candidate that :meth:`to_json` wrote."""
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
    """Return the order as given and orders that may be faster, and a remark.

    Args:
        measured: The measurements of all ranks.
        placement: Rank of each stage.
        microbatches: Number of microbatches.
        stock: The order as given.
        memory_limit: The option.
        plans: Whether to return all fixed orders and a solved order for each of several limits, even if they are not
            expected to be faster, and last the runtime of torch.
    """
    unit = find_unit(measured, placement, microbatches)
    given = _simulate(stock, placement, measured)
    found = [
        Candidate(
            AS_GIVEN_NAME,
            stock,
            given.step,
            max(given.peak_memory) / unit,
            {"schedule": "as-given"},
        )
    ]
    if plans and list(placement) == list(range(len(stock))):
        for name in ORDERS:
            schedule = build_order(name, ranks=len(stock), microbatches=microbatches)
            simulation = _simulate(schedule, placement, measured)
            memory = max(simulation.peak_memory) / unit
            found.append(Candidate(name, schedule, simulation.step, memory, {"schedule": name}))
    texts = (
        [*_PLANNED, *([memory_limit] if memory_limit not in _PLANNED else [])]
        if plans
        else [memory_limit]
    )
    remarks, solved, limits = list[str](), list[tuple[Problem, Solution]](), list[str]()
    for text in texts:
        limit = read_memory_limit(text)
        # On a CPU, auto is the same as 1x.
        if plans and limit == MemoryLimit() and not measured.spare:
            continue
        problem, remark = make_problem(measured, placement, microbatches, stock, limit)
        remarks.append(remark)
        try:
            solved.append((problem, solve(problem)))
            limits.append(text)
        except ScheduleError as error:
            remarks.append(f"memory_limit={text}: {error}")
    for text, solution in zip(limits, share_solutions(solved), strict=True):
        if plans or solution.simulation.step < given.step * (1 - _GAIN):
            found.append(_name_solution(solution, text, unit))
    found = _merge_equal(found)
    if plans:
        # Torch sends an input gradient after the weight gradients of a full backward.
        own = simulate(stock, placement, measured.costs, footprint=measured.footprint)
        found.append(Candidate(STOCK_NAME, stock, own.step, max(own.peak_memory) / unit, {}))
    return found, "; ".join(filter(None, dict.fromkeys(remarks)))


def _simulate(schedule: Schedule, placement: Placement, measured: PipelineCosts) -> Simulation:
    """Simulate an order as the engine runs it: an input gradient is sent before its weight gradients."""
    return simulate(
        split_backwards(schedule), placement, measured.costs, footprint=measured.footprint
    )


def _name_solution(solution: Solution, text: str, unit: float) -> Candidate:
    simulation = solution.simulation
    setting = {"schedule": "auto", "memory_limit": text}
    name = f"solved for {text}" if text != "auto" else "solved"
    return Candidate(
        name, solution.schedule, simulation.step, max(simulation.peak_memory) / unit, setting
    )


def _merge_equal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the orders that run differently, each with the names of all equal orders."""
    kept: dict[str, Candidate] = {}
    for candidate in candidates:
        text = " / ".join(write_orders(split_backwards(candidate.schedule)))
        first = kept.get(text)
        kept[text] = (
            candidate if first is None else replace(first, name=f"{first.name} = {candidate.name}")
        )
    return list(kept.values())


def write_plan(
    path: Path,
    name: str,
    measured: PipelineCosts,
    numbers: tuple[int, Placement],
    candidates: Sequence[Candidate],
    steps: Sequence[float],
) -> None:
    """Write the measurements for ``ovpatch pipeline``, as JSON data.

    Args:
        path: The file; it exists entirely or not at all.
        name: Class of the schedule.
        measured: Costs.
        numbers: Number of microbatches, and the rank of each stage.
        candidates: Orders that were raced; torch's runtime is the last.
        steps: Measured seconds of a step of each; infinite if unknown.
    """
    microbatches, placement = numbers
    problem, _ = make_problem(
        measured, placement, microbatches, candidates[0].schedule, MemoryLimit(1.0)
    )
    # In the file, the runtime of torch is the first row.
    candidates, steps = [candidates[-1], *candidates[:-1]], [steps[-1], *steps[:-1]]
    best = min(range(1, len(steps)), key=steps.__getitem__)
    if math.isfinite(steps[0]) and not steps[best] < CLEAR * steps[0]:
        best = 0
    stock = simulate(
        candidates[0].schedule, placement, measured.costs, footprint=measured.footprint
    )
    # The engine sends input gradients earlier than torch, so the simulations differ.
    winner = _simulate(candidates[best].schedule, placement, measured) if best else stock
    work = max(winner.busy)
    rows = [
        {
            "order": candidate.name,
            "memory": candidate.memory,
            "predicted": candidate.predicted,
            "measured": seconds if math.isfinite(seconds) else None,
            "bubble": max(
                0.0, 1 - work / (seconds if math.isfinite(seconds) else candidate.predicted)
            ),
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
            [[a.kind.value, a.stage, a.microbatch, begin, end] for a, begin, end in line]
            for line in winner.timeline
        ],
        "picture": draw_text(winner),
    }
    write_json(path, plan)


# --- choices of earlier runs ---


@dataclass(frozen=True)
class ChosenOrder:
    """An order that has won a race.

    Attributes:
        name: Its name in the report.
        schedule: Orders by rank.
        steps: Measured seconds of a step of each order that ran, by name.
    """

    name: str
    schedule: Schedule
    steps: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {"name": self.name, "orders": write_orders(self.schedule), "steps": dict(self.steps)}

    @classmethod
    def from_json(cls, data: Any) -> ChosenOrder:
        """Return the order that :meth:`to_json` wrote.

        Raises:
            ScheduleError: The data are something else.
        """
        try:
            steps = {str(name): float(seconds) for name, seconds in data["steps"].items()}
            return cls(str(data["name"]), read_orders(data["orders"]), steps)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(
                f"the cached order cannot be read ({error!r}). Delete its file."
            ) from error


class ScheduleCache:
    """The file of one pipeline.

    Args:
        directory: The user's cache; None for no cache.
        key: The facts on which the choice depends: the model's shapes, the pipeline, the options and the machine.
    """

    def __init__(self, directory: Path | None, key: Mapping[str, Any]) -> None:
        text = json.dumps(key, sort_keys=True)
        self._key = json.loads(text)
        # The name is a digest, and the file has the full key, against collisions.
        name = f"pipeline-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self.path = None if directory is None else directory / "choices" / name

    def read(self) -> ChosenOrder | None:
        """Return the cached order; None without a usable file."""
        if self.path is None:
            return None
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT or data["key"] != self._key:
                return None
            return ChosenOrder.from_json(data["choice"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # ScheduleError is a ValueError.
            return None

    def write(self, choice: ChosenOrder) -> None:
        """Write an order if the file can be written; the write is atomic."""
        if self.path is None:
            return
        write_if_possible(
            self.path, {"format": _FORMAT, "key": self._key, "choice": choice.to_json()}
        )

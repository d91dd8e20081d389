"""The gain of a pipeline of some size and costs: its fixed orders and solved orders, side by side."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ovpatch.overlap.pipelining.ir import Kind, Schedule, ScheduleError, count_stages
from ovpatch.overlap.pipelining.order_table import ORDERS
from ovpatch.overlap.pipelining.orders import (
    build_bidirectional_order,
    build_order,
    build_placement,
    build_vee_order,
    split_backwards,
)
from ovpatch.planner.simulator import Costs, Simulation, simulate
from ovpatch.planner.solver import (
    Problem,
    Progress,
    Solution,
    find_lower_bound,
    share_solutions,
    solve,
)

_SOLVED: Final = "solved"
_ONE_BY_ONE: Final = "bidirectional"
_DOUBLED: Final = "bidirectional, forwards doubled"
# The names of the runs of stock PyTorch, by the order. As in a measured plan, the engine's run has the order's name.
_STOCK_NAMES: Final = {name: f"stock {name}" for name, order in ORDERS.items() if order.torch_class}
_SETTINGS: Final = {
    **{name: {} for name in _STOCK_NAMES.values()},
    **{name: {"OVPATCH_PIPELINE": "1", "OVPATCH_PIPELINE_SCHEDULE": name} for name in ORDERS},
    "zb-v": {"OVPATCH_PIPELINE": "1"},
    _ONE_BY_ONE: {"OVPATCH_PIPELINE": "1"},
    _DOUBLED: {"OVPATCH_PIPELINE": "1", "OVPATCH_PIPELINE_FORWARD_DOUBLING": "1"},
    _SOLVED: {"OVPATCH_PIPELINE": "1", "OVPATCH_PIPELINE_SCHEDULE": "auto"},
}
"""The variables that set an order; orders without a variable are torch's own."""
_LETTERS: Final = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "B"}


@dataclass(frozen=True)
class _Row:
    """A row of the table.

    Attributes:
        order: Name of the order.
        placement: Name of the placement.
        simulation: Its time and memory.
        limit: Memory limit of a solved order, in units of 1F1B's memory; None for fixed orders.
    """

    order: str
    placement: str
    simulation: Simulation
    limit: float | None = None


def plan(question: Mapping[str, Any], progress: Callable[[float], None]) -> Mapping[str, Any]:
    """Return the costs of orders, as JSON data.

    Args:
        question: ``ranks``, ``microbatches``, ``memory``, ``placements``, and the costs ``forward``,
            ``backward``, ``weight`` and ``send``. ``memory`` lists limits, in units of the memory that 1F1B's
            first rank holds. ``forward``, ``backward`` and ``weight`` are for a rank's share of the model,
            ``send`` for a transfer; all are in any one unit.
        progress: Called with the part that is done, from 0 to 1.

    Returns:
        ``rows``, the index ``best`` of the row with the shortest step that fits, ``bounds`` by placement, and
        ``timeline`` and ``picture`` of the best row. A row has its order, placement and limit, its memory in
        units of 1F1B's, its step in units of m(F+B+W), its bubble, and whether it fits. It also has the
        variables that set the order, none for torch's own.
    """
    ranks, microbatches = int(question["ranks"]), int(question["microbatches"])
    times = [float(question[name]) for name in ("forward", "backward", "weight", "send")]
    memories: Sequence[float] = question["memory"]
    # The unit of a step's time is m(F+B+W) of one rank, and memory counts in units
    # of 1F1B's first rank.
    unit, full_memory = microbatches * sum(times[:3]), float(min(ranks, microbatches))
    rows, bounds = [], {}
    solved, total = 0, len(memories) * len(question["placements"])
    for name in question["placements"]:
        chunks = 2 if name in ("loop", "vee") else 1
        placement = build_placement(name, ranks=ranks, chunks=chunks)
        costs = Costs.uniform(
            len(placement),
            forward=times[0] / chunks,
            backward=times[1] / chunks,
            weight=times[2] / chunks,
            send=times[3],
        )
        for order, schedule in _known(name, ranks, microbatches):
            rows.append(_Row(order, name, simulate(schedule, placement, costs)))
        # The solver does not take orders of two pipelines.
        if count_stages(placement) < len(placement):
            continue
        bounds[name] = find_lower_bound(Problem(placement, microbatches, costs)) / unit
        # Solutions are shared at the end, because a search with more memory may miss an order of a
        # search with less.
        limits, solutions = list[float](), list[tuple[Problem, Solution]]()
        for memory in memories:
            problem = Problem(placement, microbatches, costs, memory * full_memory)
            # Too little memory for this placement makes no row.
            with contextlib.suppress(ScheduleError):
                found = solve(
                    problem, progress=functools.partial(_report_progress, progress, solved, total)
                )
                limits.append(memory)
                solutions.append((problem, found))
            solved += 1
        for memory, found in zip(limits, share_solutions(solutions), strict=True):
            rows.append(_Row(_SOLVED, name, found.simulation, memory))
    progress(1.0)
    return _make_result(rows, bounds, unit=unit, full_memory=full_memory, most=max(memories))


def _report_progress(
    progress: Callable[[float], None], solved: int, total: int, now: Progress
) -> None:
    progress((solved + now.done) / total)


def _known(placement: str, ranks: int, microbatches: int) -> list[tuple[str, Schedule]]:
    if placement == "vee":
        return [("zb-v", build_vee_order(ranks=ranks, microbatches=microbatches))]
    if placement == "bidirectional":
        names = {False: _ONE_BY_ONE, True: _DOUBLED}
        return [
            (
                name,
                split_backwards(
                    build_bidirectional_order(
                        ranks=ranks, microbatches=microbatches, doubles=doubles
                    )
                ),
            )
            for doubles, name in names.items()
        ]
    if placement != "straight":
        return []
    known = []
    for name in ORDERS:
        schedule = build_order(name, ranks=ranks, microbatches=microbatches)
        if name in _STOCK_NAMES:
            known.append((_STOCK_NAMES[name], schedule))
        # The engine splits each full backward, so that input gradients are sent early.
        known.append((name, split_backwards(schedule)))
    return known


def _make_result(
    rows: Sequence[_Row],
    bounds: Mapping[str, float],
    *,
    unit: float,
    full_memory: float,
    most: float,
) -> Mapping[str, Any]:
    listed: list[dict[str, Any]] = []
    for row in rows:
        memory = max(row.simulation.peak_memory) / full_memory
        listed.append(
            {
                "order": row.order,
                "placement": row.placement,
                "limit": row.limit,
                "memory": memory,
                "step": row.simulation.step / unit,
                "bubble": max(0.0, row.simulation.bubble),
                "fits": memory <= most * (1 + 1e-9),
                "setting": dict(_SETTINGS[row.order]) | _limit_memory(row.limit),
            }
        )
    fitting = [index for index, row in enumerate(listed) if row["fits"]]
    # If orders take the same time, the order that holds less memory is better.
    best = min(
        fitting,
        key=lambda index: (*(round(listed[index][name], 9) for name in ("step", "memory")), index),
        default=None,
    )
    result: dict[str, Any] = {"unit": unit, "rows": listed, "bounds": dict(bounds), "best": best}
    if best is not None:
        simulation = rows[best].simulation
        result["timeline"] = [
            [
                [a.kind.value, a.stage, a.microbatch, begin / unit, end / unit]
                for a, begin, end in line
            ]
            for line in simulation.timeline
        ]
        result["picture"] = draw_text(simulation)
    return result


def _limit_memory(limit: float | None) -> dict[str, str]:
    return {} if limit is None else {"OVPATCH_PIPELINE_MEMORY_LIMIT": f"{limit:g}x"}


def draw_text(simulation: Simulation, width: int = 100) -> list[str]:
    """Return a line of letters per rank: F, B and W while it computes, and dots while it waits.

    Args:
        simulation: A simulated step.
        width: Letters in a line.
    """
    ends = [line[-1].end for line in simulation.timeline if line]
    scale = max(ends, default=1.0) / width
    lines = []
    for timed in simulation.timeline:
        letters = ["."] * width
        for action, start, end in timed:
            first = round(start / scale)
            last = min(width, max(first + 1, round(end / scale)))
            for place in range(first, last):
                letters[place] = _LETTERS[action.kind]
        lines.append("".join(letters))
    return lines

"""The worker of ``ovpatch pipeline -- command`` in each process, and the plan as text and picture.

The plan is a file that feature ``pipeline`` writes once it has raced all orders, by
``order_candidates.write_plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ovpatch.session.report_table import render_table
from ovpatch.session.worker_orders import Orders

# The file of the plan in the folder of the run.
PLAN: Final = "plan.json"
COLOURS: Final = {"F": "#7fa8d9", "B": "#e3a857", "BW": "#e3a857", "W": "#7fb5a8"}
_STAGES: Final = ("stage", "rank", "F", "B", "W", "holds until B", "until W")
_ROWS: Final = ("order", "memory", "predicted", "measured", "of stock", "bubble", "")


def start_worker(orders: Orders) -> None:
    """End this process after the step in which the plan appears. ``import torch`` calls this at its end."""
    from ovpatch.insight import steps

    plan = Path(orders.details["plan"])

    def at_border(_number: int) -> None:
        if plan.exists():
            steps.exit_with_peers(orders.directory)

    counter = steps.StepCounter(orders.directory, at_border)
    counter.start_counting()


def format_plan(plan: Mapping[str, Any], command: str, *, colour: bool) -> str:
    """Return the tables, the picture of the best order, and the line to set."""
    best = plan["rows"][plan["best"]]
    numbers = f"{plan['class']}, {plan['ranks']} ranks, {plan['microbatches']} microbatches"
    right = {head for head in (*_STAGES, *_ROWS) if head not in ("order", "")}
    stages = f"{numbers}: milliseconds of a microbatch"
    tables = [
        render_table(stages, _STAGES, _list_stages(plan), colour=colour, right=right),
        render_table("Milliseconds of a step", _ROWS, _list_rows(plan), colour=colour, right=right),
    ]
    send = 1000 * float(plan["costs"]["send"])
    return "\n".join(
        [
            *(table.rstrip() for table in tables),
            "memory: of the fullest rank, in units of 1F1B's; bubble: part of a step in which the "
            "busiest rank waits",
            f"a transfer takes {send:.3f} ms; no order is below {1000 * plan['limit']:.1f} ms, "
            "m(F+B+W) of the busiest "
            f"rank, and none of this placement below {1000 * plan['bound']:.1f} ms",
            "",
            f"{best['order']}, as simulated (a dot: the rank waits):",
            *(f"  rank {rank}  {letters}" for rank, letters in enumerate(plan["picture"])),
            "",
            _recommend(best, command),
        ]
    )


def _recommend(best: Mapping[str, Any], command: str) -> str:
    if not best["setting"]:
        return "no order is faster than torch's own step: leave feature pipeline off"
    return f"to run it: {write_setting(best['setting'])} {command}"


def write_setting(setting: Mapping[str, str]) -> str:
    """Return the variables that make the feature run an order."""
    # The schedule comes first. JSON may have sorted the options by name.
    named = sorted(setting.items(), key=lambda item: item[0] != "schedule")
    options = (f"OVPATCH_PIPELINE_{name.upper()}={value}" for name, value in named)
    return " ".join(["OVPATCH_AUTO=1", "OVPATCH_PIPELINE=1", *options])


def _list_stages(plan: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    costs = plan["costs"]
    for stage, rank in enumerate(plan["placement"]):
        times = (f"{1000 * costs[name][stage]:.2f}" for name in ("forward", "backward", "weight"))
        held = (_mebibytes(costs[name], stage) for name in ("activations", "deferred"))
        yield str(stage), str(rank), *times, *held


def _mebibytes(sizes: Sequence[float] | None, stage: int) -> str:
    return "unknown" if sizes is None else f"{sizes[stage] / 2**20:.0f} MiB"


def _list_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    stock = plan["rows"][0]["measured"]
    for number, row in enumerate(plan["rows"]):
        measured = row["measured"]
        yield (
            row["order"],
            f"{row['memory']:.2f}x",
            f"{1000 * row['predicted']:.1f}",
            "not run" if measured is None else f"{1000 * measured:.1f}",
            "" if measured is None or stock is None else f"{measured / stock:.3f}",
            f"{100 * row['bubble']:.1f}%",
            "best" if number == plan["best"] else "",
        )


def draw_order(
    timeline: Sequence[Sequence[Sequence[Any]]], title: str, unit: str, path: Path
) -> None:
    """Draw a row per rank, F, B and W by colour, to a PNG, SVG or PDF file; later stages of a rank are paler.

    ``timeline`` has kind, stage, microbatch, start and end of each computation, by rank, in a ``unit`` of time.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 0.5 * len(timeline) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for rank, line in enumerate(timeline):
        stages = sorted({action[1] for action in line})
        for kind, stage, _, start, end in line:
            alpha = 1.0 - 0.5 * stages.index(stage) / len(stages)
            colour = COLOURS[kind]
            axes.barh(
                rank,
                end - start,
                0.85,
                start,
                color=colour,
                alpha=alpha,
                edgecolor="white",
                linewidth=0.3,
            )
    axes.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
    axes.invert_yaxis()
    axes.set_xlabel(f"time in {unit}")
    axes.set_title(title)
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in "FBW"]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)

"""Draws the pictures of the documentation from ``benchmarks/results``: ``make figures``.

Words in the SVG files stay searchable text, so that they can be searched for, and no date is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.tables import (
    README_PROGRAMS,
    RESULTS,
    ROOT,
    find_program_pair,
    group_runs,
    name_run,
    pick_best,
    read_results,
)

PICTURES = ROOT / "docs" / "pictures"
STOCK, OURS, PEER = "#8a8f98", "#00897b", "#c9822b"
PARTS = {
    "compute": ("compute", "#4f81bd"),
    "exposed": ("exposed communication", "#d32f2f"),
    "copies": ("copies", "#b0a08a"),
    "idle": ("idle", "#dddddd"),
}


def steps() -> Figure:
    """Draw step time and memory of ``ddp`` and of the fastest stock setting, for the models of 8 GPUs."""
    runs = [runs for runs in group_runs("ddp_step") if "tiny" not in name_run(runs[0])]
    names = [name_run(group[0]).replace(", 16", ",\n16") for group in runs]
    best = [pick_best(group[0]) for group in runs]
    ours = [next(row for row in group[0]["summary"] if row["arm"] == "ovpatch") for group in runs]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratios = [
        mine["median_ms"] / stock["median_ms"] * 100 for stock, mine in zip(best, ours, strict=True)
    ]
    bars = left.barh(names, ratios, color=OURS, height=0.6)
    left.bar_label(
        bars, [f"{row['median_ms']:.1f} ms" for row in ours], label_type="center", color="white"
    )
    left.axvline(100, color=STOCK, linewidth=2)
    left.set(title="step time, % of stock's fastest setting", xlim=(0, 110))
    for offset, rows, color, label in (
        (-0.2, best, STOCK, "stock's fastest"),
        (0.2, ours, OURS, "ovpatch"),
    ):
        places = [index + offset for index in range(len(rows))]
        bars = right.barh(
            places, [row["peak_gib"] for row in rows], height=0.38, color=color, label=label
        )
        right.bar_label(bars, [f"{row['peak_gib']:.1f}" for row in rows], padding=3)
    right.set(title="peak memory, GiB", yticks=range(len(names)), yticklabels=[], xlim=(0, 130))
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.invert_yaxis()
    saved = [
        1 - mine["peak_gib"] / stock["peak_gib"] for stock, mine in zip(best, ours, strict=True)
    ]
    figure.suptitle(
        f"ddp on 8 H200: {min(ratios):.0f} to {max(ratios):.0f}% of stock's fastest step, "
        f"{min(saved):.0%} to {max(saved):.0%} less memory than that"
    )
    return figure


def memory_and_time() -> Figure:
    """Draw step time over memory of stock DDP, FSDP2 and ``dist_optimizer``, GPT 3.8B on two GPUs."""
    (run,) = next(runs for runs in group_runs("zero_step") if name_run(runs[0]) == "GPT 3.8B")
    shown = {
        pick_best(run)["arm"]: ("stock DDP, fastest setting", STOCK),
        "FSDP2, ZeRO-2": ("FSDP2, bf16 parameters", PEER),
        "ovpatch": ("ovpatch, dist_optimizer", OURS),
        "ovpatch, bf16 weights": ("ovpatch, dist_optimizer, bf16 weights", OURS),
    }
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for row in run["summary"]:
        if row["arm"] in shown:
            label, color = shown[row["arm"]]
            place = (row["peak_gib"], row["median_ms"])
            axes.plot(*place, "o", color=color, markersize=10)
            text = f"{label}\n{place[1]:.1f} ms, {place[0]:.1f} GiB"
            axes.annotate(
                text,
                place,
                (10, -30 if color == PEER else 0),
                textcoords="offset points",
                va="center",
            )
    stock, *sharded = [
        next(row for row in run["summary"] if row["arm"] == arm) for arm in (*shown,)[:3]
    ]
    fsdp2, ours = [
        " and ".join(f"{1 - row[key] / stock[key]:.0%}" for key in ("median_ms", "peak_gib"))
        for row in sharded
    ]
    saved = f"dist_optimizer {ours}, FSDP2 with bf16 parameters {fsdp2}"
    axes.set(title=f"GPT 3.8B on 2 NVIDIA H200: less time and memory than stock DDP\n{saved}")
    axes.set(xlabel="peak memory, GiB", ylabel="ms per step", xlim=(38, 105), ylim=(200, 272))
    return figure


def programs() -> Figure:
    """Draw step time and memory of the programs of README.md, in percent of stock PyTorch."""
    results = {result["program"]: result for result in read_results("programs")}
    shown = [results[name] for name in README_PROGRAMS]
    names = [
        result["title"].replace(", compiled, 4", ",\ncompiled, 4").replace("124M, ", "124M,\n")
        for result in shown
    ]
    pairs = [find_program_pair(result) for result in shown]
    panels = (
        (
            "step time",
            "ms",
            [(mine["ratio"] * 100, mine["median_ms"]) for stock, mine in pairs],
        ),
        (
            "peak memory",
            "GiB",
            [
                (mine["peak_gib"] / stock["peak_gib"] * 100, mine["peak_gib"])
                for stock, mine in pairs
            ],
        ),
    )
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (quantity, unit, values) in zip(figure.subplots(1, 2), panels, strict=True):
        bars = axes.barh(names, [percent for percent, _ in values], color=OURS, height=0.6)
        texts = [f"{percent:.0f}%, {value:.1f} {unit}" for percent, value in values]
        axes.bar_label(bars, texts, label_type="center", color="white")
        axes.axvline(100, color=STOCK, linewidth=2)
        axes.set(title=f"{quantity}, % of stock PyTorch", xlim=(0, 110))
        axes.invert_yaxis()
        if unit == "GiB":
            axes.set_yticklabels([])
    device = shown[0]["device"].replace("NVIDIA ", "").split()[0]
    figure.suptitle(
        f"Unmodified programs on {shown[0]['world']} {device}: ovpatch, stock PyTorch is the line"
    )
    return figure


def timeline() -> Figure:
    """Draw what each of four GPUs does in the median step, stock and with ``ddp``."""
    recorded = json.loads((RESULTS / "timeline_3.8b_4_gpus.json").read_text())
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panels = figure.subplots(len(recorded["runs"]), 1, sharex=True)
    for axes, run in zip(panels, recorded["runs"], strict=True):
        steps = [(rank["rank"], _shown(rank, run["shown"])) for rank in run["ranks"]]
        for row, (_, step) in enumerate(steps):
            _draw_step(axes, row, step)
        hidden = max(step["hidden"] for _, step in steps) / 1e6
        exposed = max(step["exposed"] for _, step in steps) / 1e6
        longest = max(step["step"] for _, step in steps) / 1e6
        communication = f"communication at most {hidden:.0f} ms hidden, {exposed:.1f} ms exposed"
        axes.set_title(f"{run['name']}: {longest:.0f} ms; {communication}", loc="left")
        axes.set(yticks=range(len(steps)), yticklabels=[f"rank {rank}" for rank, _ in steps])
        axes.invert_yaxis()
    panels[-1].set_xlabel(
        "ms of the median step; the line below a bar is communication under compute"
    )
    handles = [mpl.patches.Patch(color=color, label=label) for label, color in PARTS.values()]
    handles.append(mpl.patches.Patch(color="#2e7d32", label="communication under compute"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _shown(rank: dict[str, Any], number: int) -> dict[str, Any]:
    found: dict[str, Any] = next(step for step in rank["steps"] if step["number"] == number)
    return found


def _draw_step(axes: Any, row: int, step: dict[str, Any]) -> None:
    left = 0.0
    for part, (_, color) in PARTS.items():
        axes.barh(row, step[part] / 1e6, left=left, height=0.5, color=color)
        left += step[part] / 1e6
    axes.barh(row + 0.34, step["hidden"] / 1e6, height=0.14, color="#2e7d32")


FIGURES = {
    "programs": programs,
    "steps": steps,
    "memory-and-time": memory_and_time,
    "timeline-3.8b-4-gpus": timeline,
}


def draw(name: str, folder: Path) -> Path:
    """Draw one picture into a folder, and return its file."""
    sizes: Any = {
        "font.size": 11,
        "axes.titlesize": 11,
        "figure.titlesize": 12,
    }
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, **sizes}):
        figure = FIGURES[name]()
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    return folder / f"{name}.svg"


def main() -> None:
    """Draw all pictures."""
    for name in FIGURES:
        print(draw(name, PICTURES).relative_to(ROOT))


if __name__ == "__main__":
    main()

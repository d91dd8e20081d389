"""The picture: what each rank did over time, with the exposed communication in a colour that nothing else has.

Each rank is a lane: compute in its upper half, hidden communication below it, so that the two are seen side by side;
exposed communication fills the whole height.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovpatch.insight.intervals import Intervals, Span
from ovpatch.insight.timeline.lanes import Lanes, step_of
from ovpatch.insight.timeline.summary import Run
from ovpatch.insight.timeline.text import milliseconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Longest stretch that is drawn, in steps, up to and including the shown one where there is a choice.
STEPS: Final = 3

EXPOSED: Final = "#e0121f"
HIDDEN: Final = "#7fb5a8"
COMPUTE: Final = "#c3cfe0"
COPIES: Final = "#c9a86a"
HATCH: Final = "#b0b0b0"
INK: Final = "#202020"

_HEIGHT: Final = 0.82  # of a lane, whose distance from the next is 1
_FINEST: Final = 4000  # gaps narrower than this part of the width are not drawn, nor can they be seen
_WIDE: Final = 25  # blocks wider than this part of the width have room for a number


class NoMatplotlibError(RuntimeError):
    """The picture cannot be drawn; the text ends with the remedy."""


def check() -> None:
    """Raise, before anything has run, if there is nothing to draw with.

    Raises:
        NoMatplotlibError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise NoMatplotlibError(
            "the picture needs matplotlib, which is not installed. "
            "Install it with: pip install 'ovpatch[plot]' — or leave the picture out with --no-picture."
        )


def draw(runs: Sequence[Run], paths: Sequence[Path]) -> None:
    """Draw one run, or a stock run above a patched one on the same scale.

    Args:
        runs: In the order from above.
        paths: Where to; the suffix is the format.

    Raises:
        NoMatplotlibError: matplotlib is not installed.
    """
    check()
    from matplotlib import rc_context

    figure = _figure(runs)
    # Without its date, and with names that are not drawn by lot, an SVG of the same data is the same file.
    with rc_context({"svg.hashsalt": "ovpatch"}):
        for path in paths:
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(runs: Sequence[Run]) -> Figure:
    from matplotlib.figure import Figure

    lanes = sum(len(run.ranks) for run in runs)
    height = 1.9 + 0.75 * len(runs) + (0.62 if lanes <= 8 else 0.36) * lanes
    figure = Figure(figsize=(14, height), layout="constrained", facecolor="white")
    figure.suptitle(headline(runs), fontsize=21, fontweight="bold", color=INK, x=0.01, ha="left")
    ratios = [len(run.ranks) + 0.4 for run in runs]
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    width = max(_window(run)[1] - _window(run)[0] for run in runs)
    for axes, run in zip(panels, runs, strict=True):
        _panel(axes, run, width)
    panels[-1].set_xlabel("milliseconds", fontsize=12, color=INK)
    _legend(figure, runs)
    return figure


def headline(runs: Sequence[Run]) -> str:
    """Say the result in one line: exposed communication of the worst rank, before and after."""
    worst = [run.worst(run.shown)[1] for run in runs]
    if not any(parts.exposed or parts.hidden for parts in worst):
        return "No communication was recorded"
    sides = [f"{milliseconds(parts.exposed)} of {milliseconds(parts.step)} ms" for parts in worst]
    if len(runs) == 1:
        return f"Exposed communication: {sides[0]} per step"
    named = [f"{run.name} {side}" for run, side in zip(runs, sides, strict=True)]
    return "Exposed communication: " + "  →  ".join(named)


def _drawn(run: Run) -> tuple[int, ...]:
    """Return the steps that are drawn: the shown one, and its neighbours as far as there is room."""
    last = max(run.steps.index(run.shown), min(STEPS, len(run.steps)) - 1)
    return run.steps[max(0, last - STEPS + 1) : last + 1]


def _stretch(run: Run, lanes: Lanes) -> Span:
    """Return the time of the drawn steps of one rank; what it did beside them is not known as a whole."""
    drawn = _drawn(run)
    return step_of(lanes, drawn[0]).start, step_of(lanes, drawn[-1]).end


def _window(run: Run) -> Span:
    """Return the time of the drawn steps of all ranks."""
    stretches = [_stretch(run, lanes) for lanes in run.ranks]
    return min(start for start, _ in stretches), max(end for _, end in stretches)


def _panel(axes: Axes, run: Run, width: int) -> None:
    start, _ = _window(run)
    for row, lanes in enumerate(run.ranks):
        _lane(axes, lanes, len(run.ranks) - 1 - row, _stretch(run, lanes), start, width)
    worst, parts = run.worst(run.shown)
    where = f"rank {worst.rank}, step {run.shown}"
    numbers = f"{milliseconds(parts.exposed)} of {milliseconds(parts.step)} ms exposed ({where})"
    hidden = f"{percent(parts.hidden_share)} of the communication is hidden"
    axes.set_title(f"{run.name}: {numbers}, {hidden}", loc="left", fontsize=13, color=INK, pad=18)
    axes.set_yticks([len(run.ranks) - 1 - row for row in range(len(run.ranks))])
    axes.set_yticklabels([f"rank {lanes.rank}" for lanes in run.ranks], fontsize=12)
    axes.set_ylim(-0.55, len(run.ranks) - 0.45)
    axes.set_xlim(0, width / 1e6)
    axes.tick_params(length=0, labelsize=11, labelbottom=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _mark_steps(axes, run, start)


def _mark_steps(axes: Axes, run: Run, start: int) -> None:
    """Draw the borders between steps, by the first rank, and write each step's number above it."""
    for number in _drawn(run):
        step = step_of(run.ranks[0], number)
        for border in (step.start, step.end):
            axes.axvline((border - start) / 1e6, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=4)
        middle = (step.start + step.end) / 2 - start
        weight = "bold" if number == run.shown else "normal"
        axes.annotate(
            f"step {number}",
            (middle / 1e6, 1),
            (0, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=11,
            fontweight=weight,
            color=INK,
        )


def _lane(axes: Axes, lanes: Lanes, row: int, window: Span, zero: int, width: int) -> None:
    compute, copies = lanes.compute.within(*window), lanes.copies.within(*window)
    communication = lanes.communication.within(*window)
    exposed, hidden = communication - compute, communication & compute
    copies -= compute | communication
    idle = (compute | communication | copies).gaps(*window)
    bottom, half = row - _HEIGHT / 2, _HEIGHT / 2
    finest = width // _FINEST
    _bars(axes, _coarse(compute, finest), zero, (row, half), color=COMPUTE)
    _bars(axes, _coarse(hidden, finest), zero, (bottom, half), color=HIDDEN)
    _bars(axes, _coarse(copies, finest), zero, (row, half), color=COPIES)
    seen = Intervals(tuple(span for span in idle if span[1] - span[0] > 4 * finest))
    _bars(axes, seen, zero, (bottom, _HEIGHT), color="none", hatch="////", edge=HATCH)
    _bars(axes, exposed, zero, (bottom, _HEIGHT), color=EXPOSED)
    _numbers(axes, exposed, zero, row, width)


def _bars(
    axes: Axes,
    intervals: Intervals,
    zero: int,
    where: tuple[float, float],
    *,
    color: str,
    hatch: str | None = None,
    edge: str = "none",
) -> None:
    spans = [((start - zero) / 1e6, (end - start) / 1e6) for start, end in intervals]
    axes.broken_barh(spans, where, facecolors=color, hatch=hatch, edgecolor=edge, linewidth=0)


def _numbers(axes: Axes, exposed: Intervals, zero: int, row: int, width: int) -> None:
    for start, end in exposed:
        if (end - start) * _WIDE > width:
            middle = ((start + end) / 2 - zero) / 1e6
            text = milliseconds(end - start)
            axes.text(middle, row, text, color="white", fontsize=11, fontweight="bold", ha="center", va="center")


def _coarse(intervals: Intervals, finest: int) -> Intervals:
    """Close gaps that cannot be seen, which would make a large file of an SVG. Never done to what is exposed."""
    return Intervals.of((start, end + finest) for start, end in intervals)


def _legend(figure: Figure, runs: Sequence[Run]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=EXPOSED, label="EXPOSED communication: nothing computes"),
        Patch(facecolor=HIDDEN, label="communication hidden under compute"),
        Patch(facecolor=COMPUTE, label="compute"),
        Patch(facecolor="none", edgecolor=HATCH, hatch="////", linewidth=0, label="idle: waits for the host"),
    ]
    if any(lanes.copies for run in runs for lanes in run.ranks):
        handles.append(Patch(facecolor=COPIES, label="copies only"))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=11, frameon=False)

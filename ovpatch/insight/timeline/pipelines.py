"""The computations of a pipeline in a trace, and their picture: one row a rank, F, B and W by colour, waits between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from ovpatch.insight.timeline.trace import Intervals, Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ovpatch.insight.timeline.summary import TimelineRun
    from ovpatch.insight.timeline.tracks import RankTracks, Step

KINDS: Final = ("F", "B", "W")
COLOURS: Final = {"F": "#5b8fc9", "B": "#efa13c", "W": "#6aa84f"}
REST: Final = "#c3cfe0"
WAIT: Final = "#e0121f"

#: Labels of feature ``pipeline``, and of ``timeline_worker`` around the methods of torch's stages.
_LABEL: Final = re.compile(r"^ovpatch::pipeline::([FBW]) \((\d+)[FBW]+(\d+)\)$")
# The height of a bar; rows have a distance of 1.
_HEIGHT: Final = 0.82
# Bars wider than the width divided by this have room for a microbatch's number.
_WIDE: Final = 45


@dataclass(frozen=True)
class PipelineAction:
    """A computation of one microbatch on one stage. A backward that leaves no weight gradient for later is a B."""

    # One of ``KINDS``.
    kind: str
    # Stage, kind and microbatch: ``0F3``.
    name: str
    # Nanoseconds since the epoch.
    start: int
    end: int


def find_actions(trace: Trace, where: tuple[int | str, int | str]) -> tuple[PipelineAction, ...]:
    """Return the outermost computations of a pipeline on a thread of the host or a stream of a device, by start."""
    found: list[PipelineAction] = []
    for event in trace.select_events("user_annotation", "gpu_user_annotation"):
        label = _LABEL.match(event.name) if (event.pid, event.tid) == where else None
        if label is not None and not (found and event.start < found[-1].end):
            name = f"{label[2]}{label[1]}{label[3]}"
            found.append(PipelineAction(label[1], name, event.start, event.end))
    return tuple(found)


@dataclass(frozen=True)
class PipelineParts:
    """Nanoseconds of one step of one rank; F, B, W, other compute and waits make up the step."""

    F: int
    B: int
    W: int
    # The time of other computations, such as the optimizer. The key of the same name in JSON is public.
    other: int
    wait: int

    @property
    def bubble(self) -> float:
        """Share of the step in which no microbatch is computed."""
        busy = self.F + self.B + self.W
        return 1 - busy / max(1, busy + self.other + self.wait)


def split_actions(tracks: RankTracks, step: Step) -> PipelineParts:
    """Return the parts of a step."""
    spans = {kind: _select(tracks, kind).clip(step.start, step.end) for kind in KINDS}
    busy = spans["F"] | spans["B"] | spans["W"]
    gaps = busy.find_gaps(step.start, step.end)
    rest = (gaps & tracks.compute).total
    return PipelineParts(
        spans["F"].total, spans["B"].total, spans["W"].total, rest, gaps.total - rest
    )


def _select(tracks: RankTracks, kind: str) -> Intervals:
    return Intervals.union_of(
        (action.start, action.end) for action in tracks.actions if action.kind == kind
    )


def has_pipeline(runs: Sequence[TimelineRun]) -> bool:
    """Return whether the runs are of a pipeline."""
    return any(tracks.actions for run in runs for tracks in run.ranks)


def measure_bubble(run: TimelineRun, steps: Sequence[int] = ()) -> float:
    """Return the share of a step in which a rank computes no microbatch: the mean of all ranks, the median of steps.

    ``steps`` are those that count in the run by default.
    """
    return median(
        fmean(parts.bubble for _, parts in list_parts(run, number))
        for number in steps or run.counted
    )


def list_parts(run: TimelineRun, number: int) -> Iterator[tuple[RankTracks, PipelineParts]]:
    """Yield each rank and the parts of one of its steps."""
    for tracks in run.ranks:
        yield (
            tracks,
            split_actions(tracks, next(step for step in tracks.steps if step.number == number)),
        )


def parts_to_json(tracks: RankTracks, step: Step) -> dict[str, Any]:
    """Return the parts of a step as JSON types, nothing for a rank outside of pipelines; times are nanoseconds."""
    if not tracks.actions:
        return {}
    parts = split_actions(tracks, step)
    return {"pipeline": {**vars(parts), "bubble": parts.bubble}}


def draw_rank(
    axes: Axes, tracks: RankTracks, row: int, window: Span, zero: int, width: int
) -> None:
    """Draw the row of a rank: its computations, with the numbers of microbatches where there is room, and waits."""
    where = (row - _HEIGHT / 2, _HEIGHT)
    spans = {kind: _select(tracks, kind).clip(*window) for kind in KINDS}
    rest = (spans["F"] | spans["B"] | spans["W"]).find_gaps(*window)
    draw_bars(axes, rest - tracks.compute, zero, where, facecolors=WAIT, alpha=0.25)
    draw_bars(axes, rest & tracks.compute, zero, where, facecolors=REST)
    for action in tracks.actions:
        start, end = max(action.start, window[0]), min(action.end, window[1])
        if start >= end:
            continue
        times = [((start - zero) / 1e6, (end - start) / 1e6)]
        axes.broken_barh(
            times, where, facecolors=COLOURS[action.kind], edgecolor="white", linewidth=0.4
        )
        if (end - start) * _WIDE > width:
            text = action.name.partition(action.kind)[2]
            axes.text(
                ((start + end) / 2 - zero) / 1e6,
                row,
                text,
                fontsize=8,
                ha="center",
                va="center",
                clip_on=True,
            )


def draw_bars(
    axes: Axes, intervals: Intervals, zero: int, where: tuple[float, float], **style: Any
) -> None:
    """Draw a bar for each interval; ``where`` is its bottom and its height."""
    spans = [((start - zero) / 1e6, (end - start) / 1e6) for start, end in intervals]
    axes.broken_barh(spans, where, linewidth=0, **style)


def make_legend() -> list[Any]:
    """Return the handles of the legend."""
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=COLOURS["F"], label="F: forward"),
        Patch(facecolor=COLOURS["B"], label="B: backward, without what W has"),
        Patch(facecolor=COLOURS["W"], label="W: weight gradients computed later"),
        Patch(facecolor=WAIT, alpha=0.25, label="waits"),
        Patch(facecolor=REST, label="other compute, as the optimizer's"),
    ]

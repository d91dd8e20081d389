"""The folder with everything: raw traces, the picture, the merged trace and the numbers."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovpatch._version import __version__
from ovpatch.exit_codes import ExitCode
from ovpatch.insight.timeline import summary
from ovpatch.insight.timeline.recording import Recording
from ovpatch.insight.timeline.summary import Run, efficiency, milliseconds, percent, to_json
from ovpatch.insight.timeline.trace import MERGED, Intervals, Span, base_of, load, nanoseconds
from ovpatch.insight.timeline.tracks import Lanes, step_of
from ovpatch.session.worker_reports import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The picture: what each rank did over time, with the exposed communication in a colour that nothing else has.
#
# Each rank is a lane: compute in its upper half, hidden communication below it, so that the two are seen side by side;
# exposed communication fills the whole height.

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


# One trace of all ranks and arms, for Perfetto: the recorded events on common clocks, and tracks for what was exposed.
#
# [Note: common clocks] The first steps of all arms begin at the same time, so that arms that ran one after the other
# stand above each other. Nothing is before zero: Perfetto drops such events, and on a GPU all launches of the first
# step may come before it. Within an arm ranks keep their distance by the clocks of their machines, unless these are
# more than a step apart: several machines are together only as well as their clocks are.

_Json = dict[str, Any]
#: Phases of events that belong together by an id, which is unique in one trace only.
_WITH_ID: Final = frozenset("stfbenOND")


def write(runs: Sequence[Run], path: Path) -> None:
    """Write the merged trace, packed by gzip. One recorded trace at a time is in memory.

    Args:
        runs: The arms.
        path: Ends with ``.json.gz``.
    """
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(f'{{"displayTimeUnit": "ms", "{MERGED}": true, "traceEvents": [')
        separator = "\n"
        for event in _events(runs):
            file.write(separator + json.dumps(event, default=_number))
            separator = ",\n"
        file.write("\n]}\n")


def _number(value: object) -> float:
    """Numbers that were read exactly, other than times, are written as any."""
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"a trace cannot hold a {type(value).__name__}")


def _events(runs: Sequence[Run]) -> Iterator[_Json]:
    names = _Numbers()
    starts = [min(step_of(lanes, run.steps[0]).start for lanes in run.ranks) for run in runs]
    lead = max(start - lanes.first for run, start in zip(runs, starts, strict=True) for lanes in run.ranks)
    for run, start in zip(runs, starts, strict=True):
        zero = start - max(lead, 0)
        for lanes in run.ranks:
            who = f"{run.name} rank {lanes.rank}"
            yield from _tracks(run, lanes, zero, names, who)
            yield from _recorded(lanes, zero, names, who)


class _Numbers:
    """Numbers of processes, threads and ids that are unique in the merged trace; threads are counted with processes."""

    def __init__(self) -> None:
        self._given: dict[tuple[object, ...], int] = {}

    def of(self, *what: object) -> int:
        return self._given.setdefault(what, len(self._given) + 1)


def _tracks(run: Run, lanes: Lanes, zero: int, names: _Numbers, who: str) -> Iterator[_Json]:
    """Yield our own tracks of a rank, which stand above what was recorded."""
    pid = names.of(who, "ovpatch")
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"{who}: summary"}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    start, end = (step_of(lanes, run.steps[0]).start, step_of(lanes, run.steps[-1]).end)
    busy = lanes.compute | lanes.communication | lanes.copies
    steps = [(f"step {number}", Intervals.of([_span(lanes, number)])) for number in run.steps]
    tracks = [
        ("steps", steps),
        ("exposed", [("exposed communication", lanes.exposed)]),
        ("hidden", [("hidden communication", lanes.communication & lanes.compute)]),
        ("idle", [("idle", busy.gaps(start, end))]),
    ]
    for title, slices in tracks:
        tid = names.of(who, "ovpatch", title)
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for name, intervals in slices:
            for one in intervals.within(start, end):
                times = {"ts": _microseconds(one[0] - zero), "dur": _microseconds(one[1] - one[0])}
                yield {"ph": "X", "cat": "ovpatch", "name": name, "pid": pid, "tid": tid, **times}


def _span(lanes: Lanes, number: int) -> Span:
    step = step_of(lanes, number)
    return step.start, step.end


def _recorded(lanes: Lanes, zero: int, names: _Numbers, who: str) -> Iterator[_Json]:
    """Yield the recorded events of a rank with numbers and times of the merged trace."""
    data = load(lanes.path)
    base = base_of(data) + lanes.moved
    for event in data["traceEvents"]:
        moved = {**event, "pid": names.of(who, event.get("pid"))}
        moved["tid"] = names.of(who, event.get("pid"), event.get("tid")) if event.get("tid") else 0
        if "ts" in event:
            moved["ts"] = _microseconds(base + nanoseconds(event["ts"]) - zero)
        if "id" in event and event.get("ph") in _WITH_ID:
            moved["id"] = names.of(who, "id", event.get("cat"), event["id"])
        if event.get("ph") == "M":
            moved.pop("ts", None)
            moved["args"] = _metadata(event, moved["pid"], who)
        yield moved


def _metadata(event: _Json, pid: int, who: str) -> _Json:
    """Names say whose they are, and processes are sorted by rank, not by their old numbers."""
    args = dict(event.get("args") or {})
    if event.get("name") == "process_name":
        args["name"] = f"{who}: {args.get('name', '')}"
    if event.get("name") == "process_sort_index":
        args["sort_index"] = pid
    return args


def _microseconds(ns: int) -> float:
    """Exact here, since it is counted from a near zero."""
    return ns / 1000


_PICTURES: Final = ("timeline.png", "timeline.svg")
_MERGED: Final = "timeline.json.gz"
_SUMMARY: Final = "summary.json"
_RUNS: Final = ("stock", "patched", "stock.log", "patched.log")


class OutputError(ValueError):
    """The results could not be kept; the text ends with the remedy."""

    exit_code = ExitCode.USAGE


class Output:
    """The output folder of one call.

    Args:
        folder: Where to.
        picture: Whether there shall be a picture.

    Raises:
        OutputError: The folder holds something else, or there is nothing to draw with.
    """

    def __init__(self, folder: Path, *, picture: bool) -> None:
        self.folder, self._picture = folder, picture
        self.written: list[Path] = []
        self._check()

    def _check(self) -> None:
        if self._picture:
            _can_draw()
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputError(f"--out {self.folder} is a file. Name a folder.")
        ours = {*_PICTURES, _MERGED, _SUMMARY, *_RUNS}
        others = sorted(path.name for path in self.folder.glob("*") if path.name not in ours)
        if others:
            raise OutputError(
                f"--out {self.folder} holds other things, such as {others[0]}. Name an empty folder or a new one."
            )

    def spare(self, traces: Iterable[Path]) -> None:
        """Make sure that none of the traces that are read would be replaced.

        Raises:
            OutputError: One would.
        """
        replaced = {(self.folder / name).resolve() for name in (*_PICTURES, _MERGED, _SUMMARY)}
        for trace in traces:
            if trace.resolve() in replaced:
                raise OutputError(f"{trace} would be replaced by what --out {self.folder} gets. Name another folder.")

    def prepare(self, *, keep_runs: bool) -> None:
        """Make the folder, without what an earlier call left in it.

        Args:
            keep_runs: Leave the raw traces; they may be what is read now.

        Raises:
            OutputError: It cannot be made, or would lose what is not ours.
        """
        for name in () if keep_runs else _RUNS:
            if _foreign(self.folder / name):
                raise OutputError(f"--out {self.folder} holds a folder {name} that is not ours. Name another folder.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (*_PICTURES, _MERGED, _SUMMARY, *(() if keep_runs else _RUNS)):
                _remove(self.folder / name)
        except OSError as error:
            raise OutputError(f"--out {self.folder}: {error.strerror}. Name a folder that can be written.") from error

    def discard(self) -> None:
        """Take back what :meth:`prepare` made, and the runs; nothing was recorded."""
        for name in _RUNS:
            _remove(self.folder / name)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write(self, recordings: Sequence[Recording], *, colour: bool = False) -> str:
        """Write the files and return the tables."""
        runs = [recording.run for recording in recordings]
        if self._picture:
            self.written = [self.folder / name for name in _PICTURES]
            draw(runs, self.written)
        write(runs, self.folder / _MERGED)
        write_json(self.folder / _SUMMARY, _summary(recordings))
        self.written += [self.folder / _MERGED, self.folder / _SUMMARY]
        costs = [f"{one.run.name}: {one.cost}" for one in recordings if one.cost is not None]
        return "\n".join([summary.report(runs, colour=colour), *costs])


def _foreign(path: Path) -> bool:
    """Whether a folder named like one of a run is of somebody else: in each of ours, processes have signed in."""
    return (
        path.is_dir() and any(path.iterdir()) and not any((*path.glob("process-*.json"), *path.glob("failed-*.json")))
    )


def _can_draw() -> None:
    try:
        check()
    except NoMatplotlibError as error:
        raise OutputError(str(error)) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _summary(recordings: Sequence[Recording]) -> dict[str, Any]:
    runs = [recording.run for recording in recordings]
    found = efficiency(*runs) if len(runs) == 2 else None
    return {
        "version": __version__,
        "unit": "ns",
        "overlap_efficiency": found._asdict() if found is not None else None,
        "recording_cost": {one.run.name: one.cost and one.cost.share for one in recordings},
        "remarks": [remark for one in recordings for remark in one.remarks],
        "runs": [to_json(run) for run in runs],
    }

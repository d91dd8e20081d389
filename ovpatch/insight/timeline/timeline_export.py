"""The output of a timeline: raw traces, the picture, the merged trace and the numbers, in one folder."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovpatch._version import __version__
from ovpatch.exit_codes import ExitCode
from ovpatch.insight.timeline import pipelines, summary
from ovpatch.insight.timeline.pipelines import draw_bars
from ovpatch.insight.timeline.summary import (
    Recording,
    TimelineRun,
    compute_efficiency,
    format_ms,
    format_percent,
    run_to_json,
)
from ovpatch.insight.timeline.trace import (
    MERGED,
    Intervals,
    Span,
    get_time_base,
    load_trace,
    to_nanoseconds,
)
from ovpatch.insight.timeline.tracks import RankTracks, get_step
from ovpatch.session.worker_reports import save_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Most steps that are drawn, up to and including the shown one if there are more.
STEPS: Final = 3

EXPOSED: Final = "#e0121f"
HIDDEN: Final = "#7fb5a8"
COMPUTE: Final = "#c3cfe0"
COPIES: Final = "#c9a86a"
HATCH: Final = "#b0b0b0"
INK: Final = "#202020"

# The height of a bar; rows have a distance of 1.
_HEIGHT: Final = 0.82
# Gaps narrower than the width divided by this are invisible and not drawn.
_FINEST: Final = 4000
# Blocks wider than the width divided by this have room for a number.
_WIDE: Final = 25


class OutputError(ValueError):
    """The results cannot be written; the text ends with the remedy."""

    exit_code = ExitCode.USAGE


def check_matplotlib() -> None:
    """Check, before anything runs, that matplotlib is installed; raise OutputError if not."""
    if find_spec("matplotlib") is None:
        raise OutputError(
            "the picture needs matplotlib, which is not installed. "
            "Install it with: pip install 'ovpatch[plot]' — or leave the picture out with "
            "--no-picture."
        )


def draw_picture(runs: Sequence[TimelineRun], paths: Sequence[Path]) -> None:
    """Draw one run, or a stock run above a patched one on the same scale, to files whose suffixes are their formats.

    A rank is a row: compute in its upper half, hidden communication below it, exposed communication over the whole
    height; in a pipeline, F, B and W, and waits between them.
    """
    check_matplotlib()
    from matplotlib import rc_context

    figure = _figure(runs)
    # No date and no random names: the same data make the same SVG file.
    with rc_context({"svg.hashsalt": "ovpatch"}):
        for path in paths:
            figure.savefig(
                path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None
            )


def _figure(runs: Sequence[TimelineRun]) -> Figure:
    from matplotlib.figure import Figure

    tracks = sum(len(run.ranks) for run in runs)
    height = 2.1 + 0.75 * len(runs) + (0.62 if tracks <= 8 else 0.36) * tracks
    figure = Figure(figsize=(10, height), layout="constrained", facecolor="white")
    figure.suptitle(
        format_headline(runs), fontsize=15, fontweight="bold", color=INK, x=0.01, ha="left"
    )
    ratios = [len(run.ranks) + 0.4 for run in runs]
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    width = max(_window(run)[1] - _window(run)[0] for run in runs)
    for axes, run in zip(panels, runs, strict=True):
        _panel(axes, run, width)
    panels[-1].set_xlabel("milliseconds", fontsize=12, color=INK)
    _legend(figure, runs)
    return figure


def format_headline(runs: Sequence[TimelineRun]) -> str:
    """Return the result in one line, before and after: the bubble, or the worst rank's exposed communication."""
    if pipelines.has_pipeline(runs):
        sides = [
            f"{format_percent(pipelines.measure_bubble(run))} of {format_ms(run.median_step)} ms"
            for run in runs
        ]
        return "Pipeline bubble: " + "  →  ".join(_name_sides(runs, sides))
    if not any(parts.exposed or parts.hidden for run in runs for parts in run.list_worst_parts()):
        return "No communication was recorded"
    sides = [f"{format_ms(run.median_exposed)} of {format_ms(run.median_step)} ms" for run in runs]
    if len(runs) == 1:
        return f"Exposed communication: {sides[0]} per step"
    return "Exposed communication: " + "  →  ".join(_name_sides(runs, sides))


def _name_sides(runs: Sequence[TimelineRun], sides: Sequence[str]) -> list[str]:
    return [
        f"{run.name} {side}" if len(runs) > 1 else side
        for run, side in zip(runs, sides, strict=True)
    ]


def _drawn(run: TimelineRun) -> tuple[int, ...]:
    """Return the steps that are drawn: the shown one and its neighbours."""
    last = max(run.counted.index(run.shown), min(STEPS, len(run.counted)) - 1)
    return run.counted[max(0, last - STEPS + 1) : last + 1]


def _stretch(run: TimelineRun, tracks: RankTracks) -> Span:
    drawn = _drawn(run)
    return get_step(tracks, drawn[0]).start, get_step(tracks, drawn[-1]).end


def _window(run: TimelineRun) -> Span:
    """Return the time of the drawn steps of all ranks."""
    stretches = [_stretch(run, tracks) for tracks in run.ranks]
    return min(start for start, _ in stretches), max(end for _, end in stretches)


def _panel(axes: Axes, run: TimelineRun, width: int) -> None:
    start, _ = _window(run)
    is_pipeline = pipelines.has_pipeline([run])
    for row, tracks in enumerate(run.ranks):
        draw = pipelines.draw_rank if is_pipeline else _draw_rank
        draw(axes, tracks, len(run.ranks) - 1 - row, _stretch(run, tracks), start, width)
    worst, parts = run.find_worst_rank(run.shown)
    where = f"rank {worst.rank}, step {run.shown}"
    numbers = f"{format_ms(parts.exposed)} of {format_ms(parts.step)} ms exposed ({where})"
    hidden = f"{format_percent(parts.hidden_share)} of the communication is hidden"
    title = f"{run.name}: {numbers}, {hidden}"
    if is_pipeline:
        bubble = format_percent(pipelines.measure_bubble(run, [run.shown]))
        title = f"{run.name}: {bubble} of {format_ms(parts.step)} ms is bubble (step {run.shown}, mean of ranks)"
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=18)
    axes.set_yticks([len(run.ranks) - 1 - row for row in range(len(run.ranks))])
    axes.set_yticklabels([f"rank {tracks.rank}" for tracks in run.ranks], fontsize=12)
    axes.set_ylim(-0.55, len(run.ranks) - 0.45)
    axes.set_xlim(0, width / 1e6)
    axes.tick_params(length=0, labelsize=11, labelbottom=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _mark_steps(axes, run, start)


def _mark_steps(axes: Axes, run: TimelineRun, start: int) -> None:
    """Draw the first rank's step boundaries, with the steps' numbers."""
    for number in _drawn(run):
        step = get_step(run.ranks[0], number)
        for border in (step.start, step.end):
            axes.axvline(
                (border - start) / 1e6, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=4
            )
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


def _draw_rank(
    axes: Axes, tracks: RankTracks, row: int, window: Span, zero: int, width: int
) -> None:
    compute, copies = tracks.compute.clip(*window), tracks.copies.clip(*window)
    communication = tracks.communication.clip(*window)
    exposed, hidden = communication - compute, communication & compute
    copies -= compute | communication
    idle = (compute | communication | copies).find_gaps(*window)
    bottom, half = row - _HEIGHT / 2, _HEIGHT / 2
    finest = width // _FINEST
    draw_bars(axes, _coarse(compute, finest), zero, (row, half), facecolors=COMPUTE)
    draw_bars(axes, _coarse(hidden, finest), zero, (bottom, half), facecolors=HIDDEN)
    draw_bars(axes, _coarse(copies, finest), zero, (row, half), facecolors=COPIES)
    seen = Intervals(tuple(span for span in idle if span[1] - span[0] > 4 * finest))
    draw_bars(axes, seen, zero, (bottom, _HEIGHT), facecolors="none", hatch="////", edgecolor=HATCH)
    draw_bars(axes, exposed, zero, (bottom, _HEIGHT), facecolors=EXPOSED)
    for start, end in exposed:
        if (end - start) * _WIDE > width:
            middle = ((start + end) / 2 - zero) / 1e6
            text = format_ms(end - start)
            axes.text(
                middle,
                row,
                text,
                color="white",
                fontsize=11,
                fontweight="bold",
                ha="center",
                va="center",
            )


def _coarse(intervals: Intervals, finest: int) -> Intervals:
    """Close invisible gaps, which would make an SVG large. Not applied to exposed communication."""
    return Intervals.union_of((start, end + finest) for start, end in intervals)


def _legend(figure: Figure, runs: Sequence[TimelineRun]) -> None:
    from matplotlib.patches import Patch

    if pipelines.has_pipeline(runs):
        figure.legend(
            handles=pipelines.make_legend(),
            loc="outside lower left",
            ncols=3,
            fontsize=11,
            frameon=False,
        )
        return
    handles = [
        Patch(facecolor=EXPOSED, label="EXPOSED communication: nothing computes"),
        Patch(facecolor=HIDDEN, label="communication hidden under compute"),
        Patch(facecolor=COMPUTE, label="compute"),
        Patch(
            facecolor="none",
            edgecolor=HATCH,
            hatch="////",
            linewidth=0,
            label="idle: waits for the host",
        ),
    ]
    if any(tracks.copies for run in runs for tracks in run.ranks):
        handles.append(Patch(facecolor=COPIES, label="copies only"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=11, frameon=False)


_Json = dict[str, Any]
# Numbers of processes, threads and ids, unique in the merged trace.
_Ids = defaultdict[tuple[object, ...], int]
#: Phases of events with an id, which is unique in one trace only.
_WITH_ID: Final = frozenset("stfbenOND")


def write_merged_trace(runs: Sequence[TimelineRun], path: Path) -> None:
    """Write one ``.json.gz`` trace of all ranks and variants for Perfetto. One recorded trace at a time is in memory.

    The first steps of all variants start at the same time. No event is before zero, where Perfetto drops it: on a GPU
    the launches of the first step precede it. Within a variant ranks keep the offsets of their clocks, unless these
    exceed a step.
    """
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(f'{{"displayTimeUnit": "ms", "{MERGED}": true, "traceEvents": [')
        separator = "\n"
        for event in _events(runs):
            # Times are of type Decimal, which json cannot write.
            file.write(separator + json.dumps(event, default=float))
            separator = ",\n"
        file.write("\n]}\n")


def _events(runs: Sequence[TimelineRun]) -> Iterator[_Json]:
    ids: _Ids = defaultdict(count(1).__next__)
    starts = [min(get_step(tracks, run.steps[0]).start for tracks in run.ranks) for run in runs]
    lead = max(
        start - tracks.first
        for run, start in zip(runs, starts, strict=True)
        for tracks in run.ranks
    )
    for run, start in zip(runs, starts, strict=True):
        zero = start - max(lead, 0)
        for tracks in run.ranks:
            owner = f"{run.name} rank {tracks.rank}"
            yield from _tracks(run, tracks, zero, ids, owner)
            yield from _recorded(tracks, zero, ids, owner)


def _tracks(
    run: TimelineRun, tracks: RankTracks, zero: int, ids: _Ids, owner: str
) -> Iterator[_Json]:
    """Yield ovpatch's own tracks of a rank, which are shown above the recorded ones."""
    pid = ids[owner, "ovpatch"]
    yield {
        "ph": "M",
        "pid": pid,
        "tid": 0,
        "name": "process_name",
        "args": {"name": f"{owner}: summary"},
    }
    yield {
        "ph": "M",
        "pid": pid,
        "tid": 0,
        "name": "process_sort_index",
        "args": {"sort_index": pid},
    }
    start, end = get_step(tracks, run.steps[0]).start, get_step(tracks, run.steps[-1]).end
    busy = tracks.compute | tracks.communication | tracks.copies
    spans = [get_step(tracks, number) for number in run.steps]
    steps = [
        (f"step {step.number}", Intervals.union_of([(step.start, step.end)])) for step in spans
    ]
    rows = [
        ("steps", steps),
        ("exposed", [("exposed communication", tracks.exposed)]),
        ("hidden", [("hidden communication", tracks.communication & tracks.compute)]),
        ("idle", [("idle", busy.find_gaps(start, end))]),
        (
            "pipeline",
            [(action.name, Intervals(((action.start, action.end),))) for action in tracks.actions],
        ),
    ]
    for title, slices in rows if tracks.actions else rows[:-1]:
        tid = ids[owner, "ovpatch", title]
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": title}}
        yield {
            "ph": "M",
            "pid": pid,
            "tid": tid,
            "name": "thread_sort_index",
            "args": {"sort_index": tid},
        }
        for name, intervals in slices:
            for part in intervals.clip(start, end):
                times = {"ts": (part[0] - zero) / 1000, "dur": (part[1] - part[0]) / 1000}
                yield {"ph": "X", "cat": "ovpatch", "name": name, "pid": pid, "tid": tid, **times}


def _recorded(tracks: RankTracks, zero: int, ids: _Ids, owner: str) -> Iterator[_Json]:
    """Yield the recorded events of a rank with numbers and times of the merged trace."""
    data = load_trace(tracks.path)
    base = get_time_base(data) + tracks.moved
    for event in data["traceEvents"]:
        moved = {**event, "pid": ids[owner, event.get("pid")]}
        moved["tid"] = ids[owner, event.get("pid"), event.get("tid")] if event.get("tid") else 0
        if "ts" in event:
            moved["ts"] = (base + to_nanoseconds(event["ts"]) - zero) / 1000
        if "id" in event and event.get("ph") in _WITH_ID:
            moved["id"] = ids[owner, "id", event.get("cat"), event["id"]]
        if event.get("ph") == "M":
            moved.pop("ts", None)
            moved["args"] = _metadata(event, moved["pid"], owner)
        yield moved


def _metadata(event: _Json, pid: int, owner: str) -> _Json:
    """Return metadata with the rank in names, and processes sorted by rank."""
    args = dict(event.get("args") or {})
    if event.get("name") == "process_name":
        args["name"] = f"{owner}: {args.get('name', '')}"
    if event.get("name") == "process_sort_index":
        args["sort_index"] = pid
    return args


_PICTURES: Final = ("timeline.png", "timeline.svg")
_MERGED: Final = "timeline.json.gz"
_SUMMARY: Final = "summary.json"
_RUNS: Final = ("stock", "patched", "stock.log", "patched.log")


class Output:
    """The output folder of one call; raises OutputError if it holds other files, or if matplotlib is missing."""

    def __init__(self, folder: Path, *, picture: bool) -> None:
        self.folder, self._picture = folder, picture
        self.trace = folder / _MERGED
        self.written: list[Path] = []
        if picture:
            check_matplotlib()
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"--out {folder} is a file. Name a folder.")
        known = {*_PICTURES, _MERGED, _SUMMARY, *_RUNS}
        unknown = sorted(path.name for path in folder.glob("*") if path.name not in known)
        if unknown:
            raise OutputError(
                f"--out {folder} holds other things, such as {unknown[0]}. Name an empty folder or "
                "a new one."
            )

    def check_inputs(self, traces: Iterable[Path]) -> None:
        """Raise OutputError if an input trace would be replaced."""
        replaced = {(self.folder / name).resolve() for name in (*_PICTURES, _MERGED, _SUMMARY)}
        for trace in traces:
            if trace.resolve() in replaced:
                raise OutputError(
                    f"{trace} would be replaced by a file of --out {self.folder}. Name another "
                    "folder."
                )

    def prepare_folder(self, *, keep_runs: bool) -> None:
        """Make the folder, without an earlier call's files; raise OutputError if it cannot be made or is another's.

        ``keep_runs`` keeps raw traces, which may be the input.
        """
        for name in () if keep_runs else _RUNS:
            if _foreign(self.folder / name):
                raise OutputError(
                    f"--out {self.folder} holds a folder {name} that is not ours. Name another "
                    "folder."
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (*_PICTURES, _MERGED, _SUMMARY, *(() if keep_runs else _RUNS)):
                _remove(self.folder / name)
        except OSError as error:
            raise OutputError(
                f"--out {self.folder}: {error.strerror}. Name a folder that can be written."
            ) from error

    def discard_folder(self) -> None:
        """Remove the runs and the empty folder, after nothing was recorded."""
        for name in _RUNS:
            _remove(self.folder / name)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write_results(self, recordings: Sequence[Recording], *, colour: bool = False) -> str:
        """Write the files and return the tables."""
        runs = summary.align_runs([recording.run for recording in recordings])
        if self._picture:
            self.written = [self.folder / name for name in _PICTURES]
            draw_picture(runs, self.written)
        write_merged_trace(runs, self.trace)
        found = compute_efficiency(*runs) if len(runs) == 2 else None
        numbers = {
            "version": __version__,
            "unit": "ns",
            "overlap_efficiency": found._asdict() if found is not None else None,
            "recording_cost": {
                recording.run.name: recording.cost and recording.cost.share
                for recording in recordings
            },
            "remarks": [remark for recording in recordings for remark in recording.remarks],
            "runs": [run_to_json(run) for run in runs],
        }
        save_json(self.folder / _SUMMARY, numbers)
        self.written += [self.trace, self.folder / _SUMMARY]
        costs = [
            f"{recording.run.name}: {recording.cost}"
            for recording in recordings
            if recording.cost is not None
        ]
        return "\n".join([summary.format_tables(runs, colour=colour), *costs])


def _foreign(path: Path) -> bool:
    """Return whether a folder has only the name of a run: processes sign in in a run's folder."""
    signs = (*path.glob("process-*.json"), *path.glob("failed-*.json"))
    return path.is_dir() and any(path.iterdir()) and not signs


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

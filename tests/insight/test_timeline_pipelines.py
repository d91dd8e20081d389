"""Timelines of pipelines: F, B and W by rank, the rest of a step, and the labels of PyTorch's stages."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.colors import to_hex

import ovpatch
from ovpatch.insight.timeline import pipelines, timeline_export, timeline_worker
from ovpatch.insight.timeline.summary import (
    align_runs,
    compute_efficiency,
    format_tables,
    make_run,
    run_to_json,
)
from ovpatch.insight.timeline.tracks import read_all_ranks, shift_tracks
from ovpatch.patching import PatchManager
from tests.insight.traces import COMPUTE_STREAM, DEVICE, NCCL_STREAM, Synthetic
from tests.plugins.pipeline.cases import Case, make_schedule
from tests.plugins.pipeline.models import ROWS, WIDTH

MS = 1000


def _label(kind: str, microbatch: int, action: str = "") -> str:
    return f"ovpatch::pipeline::{kind} (0{action or kind}{microbatch})"


@pytest.fixture
def run(tmp_path):
    """A step of 100 ms: F 10, B 20 with a nested label of torch's stage, W 15, other work 5, waits 50."""
    paths = []
    for rank in range(2):
        trace = Synthetic(rank).border(4, 0).border(5, 100 * MS)
        for kind, start, end in (("F", 10, 20), ("B", 40, 60), ("W", 60, 75)):
            trace.note(_label(kind, 3, "BW" if kind == "B" else ""), start * MS, end * MS)
            trace.note(_label(kind, 3), (start + 1) * MS, (end - 1) * MS).op(
                "aten::mm", (start + 2) * MS, end * MS
            )
        trace.op("aten::add_", 80 * MS, 85 * MS).note("Optimizer.step#SGD.step", 80 * MS, 85 * MS)
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    return make_run("stock", read_all_ranks(paths))


def test_the_parts_of_a_step(run):
    assert [action.name for action in run.ranks[0].actions] == ["0F3", "0B3", "0W3"]
    for _, parts in pipelines.list_parts(run, 5):
        expected = {"F": 10, "B": 20, "W": 15, "other": 5, "wait": 50}
        assert vars(parts) == {name: ms * MS * MS for name, ms in expected.items()}
    assert pipelines.measure_bubble(run) == pytest.approx(0.55)
    step = run_to_json(run)["ranks"][1]["steps"][0]
    assert step["pipeline"]["wait"] == 50 * MS * MS
    table = format_tables([run])
    assert "stock | 0    | 10.0 | 20.0 | 15.0 | 5.00          | 50.0  | 55%" in table
    assert "stock: 55% of step 5 is bubble, the mean of ranks" in table
    moved = shift_tracks(run.ranks[0], 7, "")
    assert [action.start for action in moved.actions] == [
        action.start + 7 for action in run.ranks[0].actions
    ]


def _steps(folder, *waits: int):
    """Return a run with a step of 100 ms for each wait, of which F takes the rest."""
    trace, end = Synthetic(0).border(4, 0), 0
    for number, wait in enumerate(waits, 5):
        start, end = end, end + 100 * MS
        trace.border(number, end).note(_label("F", 1), start + wait * MS, end).op(
            "aten::mm", start + wait * MS, end
        )
    folder.mkdir()
    return make_run(folder.name, read_all_ranks([trace.write(folder / "rank0.json")]))


def test_of_pipelines_bubbles_are_compared_over_the_same_steps_and_no_efficiency(tmp_path):
    """A receive is exposed for as long as its sender takes, so a smaller bubble may come with more of that."""
    stock, patched = align_runs(
        [_steps(tmp_path / "stock", 33, 39, 35, 90), _steps(tmp_path / "patched", 29, 19, 20)]
    )
    assert compute_efficiency(stock, patched) is None
    text = format_tables([stock, patched])
    assert "efficiency" not in text
    assert "stock: 35% of a step is bubble, the median of steps 5 to 7, the mean of ranks" in text
    assert "patched: 20% of a step is bubble, the median of steps 5 to 7, the mean of ranks" in text
    assert (
        timeline_export.format_headline([stock, patched])
        == "Pipeline bubble: stock 35% of 100 ms  →  patched 20% of 100 ms"
    )
    assert stock.shown == patched.shown


def test_other_traces_say_nothing_of_pipelines(tmp_path):
    trace = (
        Synthetic(0)
        .border(4, 0)
        .border(5, 100)
        .op("aten::mm", 0, 50)
        .note("ovpatch::ddp::F (0F3)", 0, 50)
    )
    ddp_run = make_run("stock", read_all_ranks([trace.write(tmp_path / "rank0.json")]))
    assert not pipelines.has_pipeline([ddp_run])
    assert "pipeline" not in format_tables([ddp_run])
    assert "pipeline" not in run_to_json(ddp_run)["ranks"][0]["steps"][0]


def test_a_device_has_the_ranges_of_its_compute_stream(tmp_path):
    trace = Synthetic(0).border(4, 0).border(5, 90)
    trace.note(_label("F", 1), 5, 10).gemm(20, 60, launch=6).nccl(30, 90, launch=7)
    for stream, start, end in ((COMPUTE_STREAM, 20, 60), (NCCL_STREAM, 30, 90)):
        trace.add(_label("F", 1), "gpu_user_annotation", start, end, pid=DEVICE, tid=stream)
    (tracks,) = read_all_ranks([trace.write(tmp_path / "rank0.json")])
    assert [(action.name, action.end - action.start) for action in tracks.actions] == [
        ("0F1", 40_000)
    ]


def test_ranks_are_rows_of_coloured_computations(run, tmp_path):
    figure = timeline_export._figure([run])
    (axes,) = figure.axes
    found = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            colour = to_hex(bars.get_facecolor()[0])
            found.setdefault(round(box.y0 + 0.41), []).append(
                (round(box.x0), round(box.x1), colour)
            )
    waits = [(0, 10), (20, 40), (75, 80), (85, 100)]
    expected = [(*span, pipelines.WAIT) for span in waits] + [(80, 85, pipelines.REST)]
    expected += [
        (10, 20, pipelines.COLOURS["F"]),
        (40, 60, pipelines.COLOURS["B"]),
        (60, 75, pipelines.COLOURS["W"]),
    ]
    assert {row: sorted(bars) for row, bars in found.items()} == {
        0: sorted(expected),
        1: sorted(expected),
    }
    assert [text.get_text() for text in axes.texts if text.get_text() == "3"] == ["3"] * 6
    assert (
        timeline_export.format_headline([run, run])
        == "Pipeline bubble: stock 55% of 100 ms  →  stock 55% of 100 ms"
    )
    timeline_export.write_merged_trace([run], tmp_path / "merged.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "merged.json.gz").read_bytes()))["traceEvents"]
    assert [
        event["dur"] for event in events if event.get("cat") == "ovpatch" and event["name"] == "0B3"
    ] == [20000] * 2


def _record(feature: bool) -> list[str]:
    """Return the labels of a step's outermost computations."""
    manager = PatchManager()
    timeline_worker._label_stages(manager)
    if feature:
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    try:
        schedule, _ = make_schedule(Case(microbatches=3))
        rows = torch.randn(3 * ROWS, 2, WIDTH)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
    finally:
        ovpatch.revert()
        manager.revert()
    events = [event for event in profile.events() if event.name.startswith("ovpatch::pipeline::")]
    ends, found = 0.0, []
    for event in sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end)):
        if event.time_range.start >= ends:
            ends = event.time_range.end
            found.append(event.name.removeprefix("ovpatch::pipeline::"))
    return found


@pytest.mark.parametrize("feature", [False, True])
def test_stock_and_the_feature_have_the_same_labels(ranks: Any, feature: bool) -> None:
    for rank, labels in enumerate(ranks(2)(_record, feature)):
        kinds = "FBW" if feature else "FB"
        assert sorted(labels) == sorted(
            f"{kind} ({rank}{kind}{number})" for kind in kinds for number in range(3)
        )

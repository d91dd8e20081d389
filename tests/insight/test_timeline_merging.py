"""The merged trace: every event of every rank once, nothing mixed up, clocks aligned, and tracks of our own."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from ovpatch.insight.timeline import timeline_export
from ovpatch.insight.timeline.summary import make_run, split_step
from ovpatch.insight.timeline.tracks import read_all_ranks
from tests.insight.traces import Synthetic, recorded


def merged(runs, path):
    timeline_export.write_merged_trace(runs, path)
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def rank(folder, number, *, late=0, zero=1_000_000):
    """Write the trace of a rank whose clock runs ``late`` and which uses the same ids as its peer."""
    trace = Synthetic(number, zero=zero + late).border(4, 0).border(5, 90)
    trace.gemm(0, 40, launch=1, occupancy=0.25).nccl(30, 70, launch=2).gemm(70, 100, launch=3)
    flow = {"cat": "ac2g", "name": "ac2g", "id": 7, "pid": 4242, "tid": 4242, "ts": trace.zero + 1}
    name = {
        "ph": "M",
        "name": "process_name",
        "pid": 4242,
        "tid": 0,
        "ts": trace.zero,
        "args": {"name": "python"},
    }
    order = {
        "ph": "M",
        "name": "process_sort_index",
        "pid": "Spans",
        "tid": 0,
        "args": {"sort_index": 536870912},
    }
    trace.events += [{"ph": "s", **flow}, {"ph": "f", "bp": "e", **flow}, name, order]
    return trace.write(folder / f"{zero}-{number}.json")


@pytest.fixture
def runs(tmp_path):
    stock = [rank(tmp_path, 0), rank(tmp_path, 1, late=25)]
    patched = [rank(tmp_path, 0, zero=9_000_000), rank(tmp_path, 1, zero=9_000_000, late=-5)]
    return [
        make_run(name, read_all_ranks(paths))
        for name, paths in (("stock", stock), ("patched", patched))
    ]


def owners(events):
    """The name of each process, by its number."""
    return {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }


def test_every_event_is_there_once_and_processes_are_told_apart(runs, tmp_path):
    events = merged(runs, tmp_path / "m.json.gz")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) == 4 * 3
    assert len({event["pid"] for event in kernels}) == 4, "device 0 of each rank is another"
    names = owners(events)
    assert sorted(names.values()) == sorted(
        f"{variant} rank {number}: {what}"
        for variant in ("stock", "patched")
        for number in (0, 1)
        for what in ("python", "summary")
    )
    assert {type(event[key]) for event in events for key in ("pid", "tid")} == {int}
    assert kernels[0]["args"]["occupancy"] == 0.25


def test_flows_join_two_ends_each_within_one_rank(runs, tmp_path):
    flows = [event for event in merged(runs, tmp_path / "m.json.gz") if event["ph"] in "sf"]
    assert set(Counter(event["id"] for event in flows).values()) == {2}
    assert all(
        len({event["pid"] for event in flows if event["id"] == flow}) == 1
        for flow in {f["id"] for f in flows}
    )


def test_variants_begin_at_zero_and_ranks_keep_their_distance(runs, tmp_path):
    events = merged(runs, tmp_path / "m.json.gz")
    names = owners(events)
    steps = {
        names[event["pid"]]: event["ts"]
        for event in events
        if event.get("cat") == "ovpatch" and event["name"] == "step 5"
    }
    assert steps == {
        "stock rank 0: summary": 0,
        "stock rank 1: summary": 25,
        "patched rank 0: summary": 5,
        "patched rank 1: summary": 0,
    }
    first = min(event["ts"] for event in events if event.get("cat") == "kernel")
    assert first == 0


def test_nothing_is_before_zero_where_perfetto_would_drop_it(tmp_path):
    """A host that runs ahead has launched the whole step before the device begins it."""
    trace = Synthetic(0).note("ProfilerStep#4", 0, 30).op("aten::mm", 5, 6)
    trace.gemm(0, 40).gemm(40, 90, launch=10, bandwidth=float("inf")).nccl(60, 95, launch=12)
    stock = make_run("stock", read_all_ranks([trace.write(tmp_path / "rank0.json")]))
    patched = make_run("patched", read_all_ranks([rank(tmp_path, 0)]))
    events = merged([stock, patched], tmp_path / "m.json.gz")
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert {event["ts"] for event in events if event["name"] in ("step 4", "step 5")} == {40}
    assert "Infinity" in {event.get("args", {}).get("bandwidth") for event in events}, (
        "text: JSON has no such number"
    )


def test_ranks_of_machines_whose_clocks_differ_stand_together(tmp_path):
    paths = [rank(tmp_path, 0), rank(tmp_path, 1, late=7_000_000)]
    run = make_run("stock", read_all_ranks(paths))
    assert len({tracks.steps[0].start for tracks in run.ranks}) == 1
    assert "clocks differ by more than a step" in run.remarks[0]
    assert split_step(run.ranks[0], run.ranks[0].steps[0]) == split_step(
        run.ranks[1], run.ranks[1].steps[0]
    )
    kernels = [
        event["ts"]
        for event in merged([run], tmp_path / "m.json.gz")
        if event.get("cat") == "kernel"
    ]
    assert kernels == [0, 30, 70] * 2


def test_what_is_exposed_is_a_track(runs, tmp_path):
    events = merged(runs, tmp_path / "m.json.gz")
    exposed = [event for event in events if event["name"] == "exposed communication"]
    assert [(event["ts"], event["dur"]) for event in exposed[:2]] == [(40, 30), (65, 30)]


def test_recorded_traces_keep_times_and_totals(tmp_path):
    run = make_run("stock", read_all_ranks(recorded("stock")))
    events = merged([run], tmp_path / "m.json.gz")
    for tracks in run.ranks:
        mine = {
            pid
            for pid, name in owners(events).items()
            if name == f"stock rank {tracks.rank}: summary"
        }
        parts = [split_step(tracks, step) for step in tracks.steps]
        for name, total in (
            ("exposed communication", sum(p.exposed for p in parts)),
            ("idle", sum(p.idle for p in parts)),
        ):
            found = sum(
                round(e["dur"] * 1000) for e in events if e["name"] == name and e["pid"] in mine
            )
            assert found == total
    spans = [event for event in events if event.get("name") == "gloo:all_reduce"]
    assert len(spans) == sum(len(tracks.communications) for tracks in run.ranks)
    assert {round(e["dur"] * 1000) for e in spans} == {
        c.end - c.start for tracks in run.ranks for c in tracks.communications
    }

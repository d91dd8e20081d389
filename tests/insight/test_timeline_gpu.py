"""The numbers of traces recorded on two H200 over NCCL, against a sweep over what the files say."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import pairwise

import pytest

from ovpatch.insight.timeline.summary import group_communications, make_run, split_step
from ovpatch.insight.timeline.tracks import read_all_ranks
from tests.insight.traces import recorded

VARIANTS = ("gpu-stock", "gpu-patched")
STEP = 12


def sweep(path):
    """Return the step's nanoseconds by the device's activity, from the file itself.

    A sweep over all moments counts the kernels that compute, NCCL's kernels and the copies that run at each of them.
    """
    data = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal, parse_int=Decimal)
    events = data["traceEvents"]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e["cat"].startswith("cuda_") and "args" in e
    }
    kinds = {"compute": [], "talk": [], "copy": []}
    for e in events:
        if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            copies = e["cat"] == "gpu_memcpy" and e["name"].startswith(
                ("Memcpy HtoD", "Memcpy DtoH")
            )
            kinds[
                "talk" if e["name"].startswith("nccl") else "copy" if copies else "compute"
            ].append(e)
    marks = {
        e["name"]: e["ts"] for e in events if e["name"].startswith("ovpatch::timeline::border")
    }

    def border(number):
        """Return when the device had finished the compute that was launched before the host's mark."""
        at = marks[f"ovpatch::timeline::border ({number})"]
        ends = (
            e["ts"] + e["dur"]
            for e in kinds["compute"]
            if launched.get(e["args"]["correlation"], 0) < at
        )
        return max([at, *ends])

    start, end = border(STEP - 1), border(STEP)
    changes = {start: {}, end: {}}
    for kind, kind_events in kinds.items():
        for e in kind_events:
            for time, by in ((e["ts"], 1), (e["ts"] + e["dur"], -1)):
                here = changes.setdefault(min(max(time, start), end), {})
                here[kind] = here.get(kind, 0) + by
    running = dict.fromkeys(kinds, 0)
    found = dict.fromkeys(("compute", "hidden", "exposed", "copies", "idle"), Decimal(0))
    for now, then in pairwise(sorted(changes)):
        for kind, by in changes[now].items():
            running[kind] += by
        busy = {kind: count > 0 for kind, count in running.items()}
        what = (
            "compute"
            if busy["compute"]
            else "exposed"
            if busy["talk"]
            else "copies"
            if busy["copy"]
            else "idle"
        )
        found[what] += then - now
        found["hidden"] += (then - now) * (busy["compute"] and busy["talk"])
    return {"step": round((end - start) * 1000)} | {
        name: round(time * 1000) for name, time in found.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_nanosecond_is_where_a_sweep_finds_it(variant):
    paths = recorded(variant)
    run = make_run(variant, read_all_ranks(paths))
    assert [(tracks.rank, tracks.device) for tracks in run.ranks] == [(0, "gpu 0"), (1, "gpu 1")]
    assert run.steps == (STEP,)
    for tracks, path in zip(run.ranks, paths, strict=True):
        found = vars(split_step(tracks, tracks.steps[0]))
        assert found == sweep(path)
        assert all(found[name] > 500_000 for name in ("compute", "hidden", "exposed", "idle"))


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("gpu-stock", {("nccl all_reduce", ""): 66}),
        (
            "gpu-patched",
            # Recorded when the step flags were labelled ballots.
            {
                ("nccl all_reduce", "ovpatch::ddp::all_reduce"): 14,
                ("nccl all_reduce", "ovpatch::ddp::ballot"): 1,
            },
        ),
    ],
)
def test_every_kernel_of_nccl_has_its_collective_and_what_launched_it(variant, expected):
    for tracks in make_run(variant, read_all_ranks(recorded(variant))).ranks:
        groups = group_communications(tracks, tracks.steps[0])
        assert {(group.collective, group.phase): group.calls for group in groups} == expected
        parts = split_step(tracks, tracks.steps[0])
        assert sum(group.exposed for group in groups) == parts.exposed
        assert sum(group.hidden for group in groups) == parts.hidden

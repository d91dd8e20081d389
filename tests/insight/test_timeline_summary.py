"""The numbers: on traces with known results, on any trace against a count of every point, and on recorded traces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovpatch.insight.timeline import summary
from ovpatch.insight.timeline.summary import (
    align_runs,
    compute_efficiency,
    group_communications,
    make_run,
    run_to_json,
    split_step,
)
from ovpatch.insight.timeline.trace import TraceError
from ovpatch.insight.timeline.tracks import (
    Communication,
    Intervals,
    RankTracks,
    Step,
    read_all_ranks,
)
from tests.insight.traces import Synthetic, recorded


def lanes(compute, communications, copies=(), steps=((1, 0, 100),), rank=0):
    return RankTracks(
        rank,
        "cpu",
        "",
        None,
        Intervals.union_of(compute),
        Intervals.union_of(copies),
        tuple(
            Communication("nccl all_reduce", label, start, end)
            for label, start, end in communications
        ),
        tuple(Step(*step) for step in steps),
        0,
    )


def parts(tracks):
    found = vars(split_step(tracks, tracks.steps[0]))
    assert found["compute"] + found["exposed"] + found["copies"] + found["idle"] == found["step"]
    return found


def test_a_step_by_hand():
    tracks = lanes(
        [(0, 40), (60, 70)], [("", 30, 50), ("", 45, 65), ("", 95, 130)], copies=[(35, 80)]
    )
    assert parts(tracks) == {
        "step": 100,
        "compute": 50,
        "hidden": 15,
        "exposed": 25,
        "copies": 10,
        "idle": 15,
    }
    assert split_step(tracks, tracks.steps[0]).hidden_share == 15 / 40


def test_what_crosses_a_border_is_split():
    tracks = lanes([(0, 150)], [("", 90, 210)], steps=((1, 0, 100), (2, 100, 200)))
    first, second = (split_step(tracks, step) for step in tracks.steps)
    assert (first.hidden, first.exposed) == (10, 0)
    assert (second.hidden, second.exposed) == (50, 50)


def test_without_communication_there_is_no_share():
    tracks = lanes([(0, 50)], [])
    assert split_step(tracks, tracks.steps[0]).hidden_share is None
    assert summary.format_percent(None) == "n/a"


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(SPANS, SPANS, SPANS, st.integers(0, 60), st.integers(1, 40))
def test_every_point_of_a_step_is_counted_once(compute, talk, copies, start, length):
    tracks = lanes(
        compute, [("", *span) for span in talk], copies, steps=[(1, start, start + length)]
    )
    expected = dict.fromkeys(("compute", "hidden", "exposed", "copies", "idle"), 0)
    for point in range(start, start + length):
        a, b, c = (any(s <= point < e for s, e in spans) for spans in (compute, talk, copies))
        expected["compute" if a else "exposed" if b else "copies" if c else "idle"] += 1
        expected["hidden"] += a and b
    assert parts(tracks) == {"step": length, **expected}


def test_groups_are_by_collective_and_phase_the_most_exposed_first():
    tracks = lanes(
        [(0, 50)],
        [("ovpatch::a::x (0)", 0, 10), ("ovpatch::a::x (1)", 5, 20), ("", 45, 60), ("", 200, 300)],
    )
    found = [
        (group.phase, group.calls, group.hidden, group.exposed)
        for group in group_communications(tracks, tracks.steps[0])
    ]
    assert found == [("", 1, 5, 10), ("ovpatch::a::x", 2, 20, 0)]


def with_exposed(*exposed, rank=0):
    """Steps of 100, in each of which so much is exposed."""
    steps = [(number, 100 * number, 100 * number + 100) for number in range(1, len(exposed) + 1)]
    return lanes(
        [],
        [("", start, start + time) for (_, start, _), time in zip(steps, exposed, strict=True)],
        (),
        steps,
        rank,
    )


def test_shown_is_the_median_step_by_its_worst_rank():
    run = make_run("stock", [with_exposed(10, 90, 20), with_exposed(50, 5, 40, rank=1)])
    assert run.shown == 1  # worst: 50, 90, 40
    worst, parts_ = run.find_worst_rank(run.shown)
    assert (worst.rank, parts_.exposed) == (1, 50)


def test_only_steps_that_all_ranks_have_count():
    run = make_run("stock", [with_exposed(1, 2, 3), with_exposed(1, 2, rank=1)])
    assert run.steps == (1, 2)
    with pytest.raises(TraceError, match="no step is in the traces of all ranks"):
        make_run("stock", [with_exposed(1), with_exposed(rank=1)])
    with pytest.raises(TraceError, match="there is no trace"):
        make_run("stock", [])


@pytest.mark.parametrize(
    ("stock", "patched", "expected"),
    [
        ((40, 40, 50), (10, 12, 8), (0.75, 0.7, 0.84)),
        ((40, 40, 40), (40, 40, 40), (0, 0, 0)),
        ((40, 40, 40), (60, 60, 60), (-0.5, -0.5, -0.5)),
        ((0, 40, 40), (10, 10, 10), None),
        ((40, 40), (10, 10, 10), None),
    ],
)
def test_efficiency_has_a_range_and_takes_three_steps(stock, patched, expected):
    found = compute_efficiency(
        make_run("stock", [with_exposed(*stock)]), make_run("patched", [with_exposed(*patched)])
    )
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("stock", "patched", "said"),
    [
        ((40, 40, 50), (10, 12, 8), "75%, 70% to 84% over the recorded steps"),
        ((40, 40, 40), (60, 60, 60), "more exposed than stock in all recorded steps"),
        ((40, 40, 40), (20, 20, 50), "50%, more exposed than stock to 50% over the recorded steps"),
    ],
)
def test_a_negative_efficiency_is_said_in_words(stock, patched, said):
    runs = [
        make_run("stock", [with_exposed(*stock)]),
        make_run("patched", [with_exposed(*patched)]),
    ]
    text = summary.format_tables(runs)
    assert f"overlap efficiency: {said}" in text
    assert "-" not in text[text.index("overlap efficiency: ") :].partition("(1 - ")[0]


def test_two_runs_have_medians_over_the_same_steps_and_show_the_same_one():
    """The steps differ by their work, so the median step of each would be another one."""
    alone = (
        make_run("stock", [with_exposed(10, 50, 90, 99, 99)]),
        make_run("patched", [with_exposed(80, 5, 40)]),
    )
    assert [run.shown for run in alone] == [3, 3]
    alone = (
        make_run("stock", [with_exposed(10, 50, 90)]),
        make_run("patched", [with_exposed(80, 5, 40, 1, 1)]),
    )
    assert [run.shown for run in alone] == [2, 2]
    stock, patched = align_runs(alone)
    assert (stock.counted, patched.counted, patched.steps) == (
        (1, 2, 3),
        (1, 2, 3),
        (1, 2, 3, 4, 5),
    )
    assert (stock.median_exposed, patched.median_exposed) == (50, 40)
    assert stock.shown == patched.shown
    assert compute_efficiency(stock, patched).median == pytest.approx(1 - 40 / 50)
    assert len(run_to_json(patched)["ranks"][0]["steps"]) == 5, "all steps are kept"


def test_runs_without_a_common_step_are_compared_as_they_are_and_that_is_said():
    later = lanes([], [("", 700, 720)], (), [(7, 700, 800)])
    runs = align_runs([make_run("stock", [with_exposed(40)]), make_run("patched", [later])])
    assert [run.counted for run in runs] == [(1,), (7,)]
    assert "have no step in common" in summary.format_tables(runs)
    assert "have no step in common" not in summary.format_tables(runs[:1])


TALKS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 60)), max_size=8
)


@given(SPANS, TALKS)
def test_the_groups_add_up_to_the_communication_of_the_step(compute, talks):
    tracks = lanes(compute, talks, steps=[(1, 10, 50)])
    groups = group_communications(tracks, tracks.steps[0])
    step_parts = split_step(tracks, tracks.steps[0])
    assert sum(group.hidden for group in groups) == step_parts.hidden
    assert sum(group.exposed for group in groups) == step_parts.exposed


@pytest.fixture
def variants(tmp_path):
    """A stock and a patched run of one step on two GPUs: 38 of 210 ms exposed, 12 of 184."""

    def rank(number, length, exposed):
        trace = (
            Synthetic(number)
            .border(4, 0)
            .border(5, 190_000)
            .note("ovpatch::ddp::all_reduce (bucket 0)", 10, 20)
        )
        trace.gemm(0, 100_000, launch=5).nccl(20_000, 100_000 + exposed, launch=15)
        trace.gemm(100_000 + exposed, length, launch=25)
        return trace.write(tmp_path / f"{length}-{number}.json")

    return [
        make_run(name, read_all_ranks([rank(0, length, exposed), rank(1, length, exposed - 2000)]))
        for name, length, exposed in (("stock", 210_000, 38_000), ("patched", 190_000, 12_000))
    ]


def test_the_text(variants):
    found = summary.format_tables(variants)
    lines = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in found.splitlines()}
    assert ("stock", "0 <- most exposed", "210", "172", "80.0", "38.0", "0", "0", "68%") in lines
    assert ("patched", "1", "190", "180", "80.0", "10.0", "0", "0", "89%") in lines
    assert ("patched", "nccl all_reduce", "ovpatch::ddp::all_reduce", "1", "80.0", "12.0") in lines
    assert "overlap efficiency: too few steps to judge (1; record 3 or more by --steps)" in found
    assert "stock: 38.0 of 210 ms are exposed communication (rank 0, step 5)" in found


def test_the_json_has_every_step_in_nanoseconds(variants):
    data = json.loads(json.dumps(run_to_json(variants[0])))
    (step,) = data["ranks"][1]["steps"]
    assert (step["number"], step["step"], step["exposed"], step["idle"]) == (
        5,
        210_000_000,
        36_000_000,
        0,
    )
    assert step["hidden_share"] == 80 / 116
    assert step["collectives"][0]["collective"] == "nccl all_reduce"


# --- recorded ---


def test_recorded_collectives_have_the_labels_of_the_feature():
    stock, patched = (
        make_run(variant, read_all_ranks(recorded(variant))) for variant in ("stock", "patched")
    )
    assert {c.label for tracks in stock.ranks for c in tracks.communications} == {""}
    for tracks in patched.ranks:
        names = [c.label for c in tracks.communications if c.label]
        assert (
            names
            == ["ovpatch::ddp::all_reduce (bucket 0)", "ovpatch::ddp::all_reduce (bucket 1)"] * 2
        )

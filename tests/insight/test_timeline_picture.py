"""The picture: what is exposed is red where it is exposed, and nowhere else; the headline says the numbers."""

from __future__ import annotations

import sys

import pytest

from ovpatch.insight.timeline import timeline_export
from ovpatch.insight.timeline.summary import make_run
from ovpatch.insight.timeline.tracks import read_all_ranks
from tests.insight.traces import Synthetic

#: The hidden part of each communication, in microseconds.
HIDDEN = 10_000
RED = tuple(int(timeline_export.EXPOSED[i : i + 2], 16) for i in (1, 3, 5))


@pytest.fixture
def run(tmp_path):
    """One step of 100 ms a rank, of which the given spans of milliseconds are exposed."""

    def run(name, *exposed, ranks=2, steps=1, copies=False):
        paths = []
        for rank in range(ranks):
            trace = Synthetic(rank).border(4, 0)
            for step in range(steps):
                begin = step * 100_000
                trace.border(5 + step, begin + 99_990)
                at = begin
                for start, end in exposed:
                    trace.gemm(at, begin + start * 1000, launch=begin + 1).nccl(
                        begin + start * 1000 - HIDDEN, begin + end * 1000
                    )
                    at = begin + end * 1000
                trace.gemm(at, begin + 100_000, launch=begin + 3)
            if copies:
                trace.on_device("Memcpy HtoD (Pinned -> Device)", 5, 6, category="gpu_memcpy")
            paths.append(trace.write(tmp_path / f"{name}{rank}.json"))
        return make_run(name, read_all_ranks(paths))

    return run


def red_share(path):
    """The share of the picture's pixels in the colour of exposed communication, and the bounds of where they are."""
    import numpy
    from matplotlib.image import imread

    pixels = (imread(path)[:, :, :3] * 255).round().astype(int)
    red = (numpy.abs(pixels - RED).max(axis=2) <= 2)[: int(len(pixels) * 0.8)]  # without the legend
    columns = numpy.flatnonzero(red.any(axis=0)) / pixels.shape[1]
    return red.sum() / red.size, columns


def test_exposed_is_red_and_as_long_as_it_took(run, tmp_path):
    files = {name: tmp_path / f"{name}.png" for name in ("none", "ten", "forty")}
    for (name, path), spans in zip(files.items(), ((), ((50, 60),), ((50, 90),)), strict=True):
        timeline_export.draw_picture([run(name, *spans)], [path])
    none, ten, forty = (red_share(path) for path in files.values())
    assert none[0] == 0
    # The numbers, which are written in white, cover a part of it.
    assert forty[0] / ten[0] == pytest.approx(4, rel=0.2)
    width = ten[1].max() - ten[1].min()
    assert 0.08 < width < 0.1, "a tenth of the axis, which is not quite as wide as the picture"


def test_stock_stands_above_patched_on_one_scale(run, tmp_path):
    figure = timeline_export._figure([run("stock", (50, 90)), run("patched", (50, 60))])
    above, below = figure.axes
    assert above.get_position().y0 > below.get_position().y1
    assert above.get_xlim() == below.get_xlim() == (0, 100)
    assert above.get_title(loc="left").startswith("stock: 40.0 of 100 ms exposed (rank 0, step 5)")
    assert [label.get_text() for label in below.get_yticklabels()] == ["rank 0", "rank 1"]
    assert "step 5" in [text.get_text() for text in above.texts]
    assert "40.0" in [text.get_text() for text in above.texts]


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (
            (("stock", (62, 100)), ("patched", (88, 100))),
            "Exposed communication: stock 38.0 of 100 ms  →  patched 12.0 of 100 ms",
        ),
        ((("recorded", (62, 100)),), "Exposed communication: 38.0 of 100 ms per step"),
        ((("recorded",),), "No communication was recorded"),
    ],
)
def test_the_headline_says_the_result(run, variants, expected):
    assert (
        timeline_export.format_headline([run(name, *spans) for name, *spans in variants])
        == expected
    )


def test_of_many_steps_three_are_drawn_with_the_shown_one(run):
    many = run("stock", (50, 60), steps=6)
    start, end = timeline_export._window(many)
    assert (end - start) / 1e6 == pytest.approx(300, abs=1)
    shown = next(step for step in many.ranks[0].steps if step.number == many.shown)
    assert start <= shown.start < shown.end <= end


def test_a_rank_is_drawn_to_the_end_of_its_own_last_step(tmp_path):
    paths = []
    for rank, end in ((0, 100_000), (1, 60_000)):
        trace = (
            Synthetic(rank)
            .border(4, 0)
            .border(5, end - 10)
            .gemm(0, end, launch=1)
            .nccl(90_000, 120_000, launch=2)
        )
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    (axes,) = timeline_export._figure([make_run("stock", read_all_ranks(paths))]).axes
    ends = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            row = round(path.vertices[:, 1].mean())
            ends[row] = max(ends.get(row, 0), path.vertices[:, 0].max())
    assert ends == {1: pytest.approx(100, abs=0.1), 0: pytest.approx(60, abs=0.1)}


def test_copies_are_in_the_legend_only_if_there_are_any(run):
    def legend(drawn_run):
        return [
            text.get_text() for text in timeline_export._figure([drawn_run]).legends[0].get_texts()
        ]

    assert "copies only" not in legend(run("without"))
    assert "copies only" in legend(run("with", copies=True))


def test_an_svg_of_the_same_data_is_the_same_file(run, tmp_path):
    for name in ("a.svg", "b.svg"):
        timeline_export.draw_picture([run("stock", (50, 60))], [tmp_path / name])
    a, b = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert timeline_export.EXPOSED in a
    assert a == b


def test_many_small_gaps_make_no_large_file(tmp_path):
    trace = Synthetic().border(4, 0).border(5, 99_990)
    for start in range(0, 100_000, 4):
        trace.gemm(start, start + 3, launch=1)
    timeline_export.draw_picture(
        [make_run("stock", read_all_ranks([trace.write(tmp_path / "rank0.json")]))],
        [tmp_path / "a.svg"],
    )
    assert (tmp_path / "a.svg").stat().st_size < 300_000


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(timeline_export, "find_spec", lambda name: None)
    with pytest.raises(timeline_export.OutputError, match=r"pip install 'ovpatch\[plot\]'"):
        timeline_export.check_matplotlib()


def test_importing_the_module_does_not_import_matplotlib():
    import subprocess

    code = "import sys, ovpatch.insight.timeline.timeline_export; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Predictions of a step on other numbers of hosts: the model by hand, its questions, and the measured steps on file."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks import tables
from benchmarks.hosts import pool_rows, predict_row
from benchmarks.models import GPT, SIZES
from ovpatch.insight.bench import scaling
from ovpatch.insight.bench.scaling import (
    ARMS,
    NCCL_SLOWDOWN_MS_PER_GB,
    Layout,
    MeasuredRun,
    Ring,
    StepFacts,
    answer_question,
    isolate_compute,
    list_layouts,
    merge_facts,
    parse_question,
    predict,
    resolve,
)
from ovpatch.settings.settings import SettingsError

# Two buckets of 1 MB; a forward of 10 ms, a backward of 20 ms, and 5 ms of other work.
FACTS = StepFacts(35.0, 10.0, 20.0, (1_000_000, 1_000_000))
# A link takes 1 ms for 1 MB.
LINK = Ring(1e9)

# --- the model ---

MODEL = {
    "alone": ("stock", FACTS, Layout(1, 1), 35.0, 0.0),
    # Each bucket takes 2 * 1/2 ms. The last one is ready at the end of the backward.
    "the last bucket is exposed": ("stock", FACTS, Layout(2, 1, None, LINK), 36.0, 2.0),
    "4 ranks send 3/4 twice": ("ddp", FACTS, Layout(4, 1, None, LINK), 36.5, 3.0),
    "a slow link": ("stock", FACTS, Layout(2, 1, None, Ring(5e7)), 35.0 + 30.0, 40.0),
    "messages": ("stock", FACTS, Layout(2, 1, None, Ring(1e9, 0.5)), 35.0 + 2.0, 4.0),
    "within a host": ("stock", FACTS, Layout(1, 4, LINK), 36.5, 3.0),
    # NCCL's rings cross each link as often as a ring over all ranks.
    "the slower link counts": ("ddp", FACTS, Layout(2, 2, Ring(1e12), LINK), 36.5, 3.0),
    # Within: 1 ms, across: 1 ms, within: 0.5 ms; the second bucket is exposed.
    "sums by host": (
        "ddp",
        replace(FACTS, is_gloo=True),
        Layout(2, 2, LINK, LINK),
        37.5,
        2.5 + 1.0,
    ),
    "stock does not sum by host": (
        "stock",
        replace(FACTS, is_gloo=True),
        Layout(2, 2, LINK, LINK),
        36.5,
        3.0,
    ),
    # Half a ring after the backward, and half a ring before the first layers of the next forward.
    "shards": ("dist_optimizer", FACTS, Layout(2, 1, None, LINK), 36.0, 2.0),
    "shards may be slower than all-reduces": (
        "dist_optimizer",
        FACTS,
        Layout(2, 1, None, Ring(1e9, 0.0, 0.5)),
        37.0,
        4.0,
    ),
    # Each of two ranks updates half.
    "a sharded optimizer": (
        "dist_optimizer",
        replace(FACTS, optimizer_ms=4.0),
        Layout(2, 1, None, LINK),
        34.0,
        2.0,
    ),
    "an optimizer whose shards each host has": (
        "dist_optimizer",
        replace(FACTS, optimizer_ms=4.0, is_gloo=True),
        Layout(2, 2, LINK, LINK),
        35.0,
        3.5,
    ),
    # An all-reduce of 1.5 ms, and gathers of 0.75 ms.
    "gloo reduces to shards by an all-reduce on one host": (
        "dist_optimizer",
        replace(FACTS, is_gloo=True),
        Layout(1, 4, LINK, None),
        35.0 + 1.5 + 0.75,
        3.0 + 1.5,
    ),
    # An exchange of 0.75 ms, and gathers of 0.75 ms.
    "gloo exchanges shards between hosts": (
        "dist_optimizer",
        replace(FACTS, is_gloo=True),
        Layout(4, 1, None, LINK),
        35.0 + 0.75 + 0.75,
        1.5 + 1.5,
    ),
    # Reduced to shards within: 0.5 ms, across: 1 ms, gathered within: 0.5 ms.
    "shards by host": (
        "dist_optimizer",
        replace(FACTS, is_gloo=True),
        Layout(2, 2, LINK, LINK),
        35.0 + 1.5 + 0.5,
        2.5 + 1.0,
    ),
}


@pytest.mark.parametrize("name", MODEL)
def test_a_step_is_simulated_bucket_by_bucket(name):
    arm, facts, layout, step_ms, communication_ms = MODEL[name]
    found = predict(arm, facts, layout)
    assert found.step_ms == pytest.approx(step_ms)
    assert found.communication_ms == pytest.approx(communication_ms)
    assert 0 <= found.hidden <= 1


def test_more_hosts_and_slower_links_never_make_a_step_shorter():
    facts = replace(FACTS, is_gloo=True)
    for arm in ARMS:
        for slower in (LINK, Ring(1e8), Ring(1e7)):
            steps = [predict(arm, facts, Layout(h, 2, LINK, slower)).step_ms for h in (1, 2, 4, 8)]
            assert steps == sorted(steps)


# --- the question ---

BAD = {
    "": "the number of hosts is missing",
    "gpus=8": "the number of hosts is missing",
    "hosts": "hosts= is no integer",
    "hosts=0": "hosts=0 is no integer",
    "hosts=-1": "hosts=-1 is no",
    "hosts=two": "hosts=two is no",
    "hosts=²": "hosts=² is no",
    "hosts=1.5": "hosts=1.5 is no",
    "hosts=2,hosts=3": "hosts is given twice",
    "hosts=2,gpu=8": "'gpu' is unknown (did you mean 'gpus'?)",
    "hosts=2,gpus=none": "gpus=none is no",
    "hosts=2,link=": "link= is no rate",
    "hosts=2,link=200": "link=200 is no rate",
    "hosts=2,link=200Gb": "link=200Gb is no rate",
    "hosts=2,link=0Gbit": "link=0Gbit is no rate",
    "hosts=2,link=-1Gbit": "link=-1Gbit is no rate",
    "hosts=2,link=fast": "link=fast is no rate",
    "hosts=2,link=1e3Gbit": "link=1e3Gbit is no rate",
    "hosts=2,local=nvlink": "local=nvlink is no rate",
    "hosts=99999999": "99999999 ranks are more than",
}


@pytest.mark.parametrize("text", BAD)
def test_a_question_that_cannot_be_parsed_is_an_error_that_names_it(text):
    with pytest.raises(SettingsError, match=r"--what-if") as error:
        parse_question(text)
    assert BAD[text].casefold() in str(error.value).casefold()
    # The remedy is the last sentence.
    assert re.search(r"[.?] (Write|Give) [^.]*(\.[^ ]*)*\.$", str(error.value)), error.value


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200Gbit", 25e9),
        ("200gbit/s", 25e9),
        ("25GB", 25e9),
        ("25 GB".replace(" ", ""), 25e9),
        ("0.5tbit", 62.5e9),
        ("200mbit", 25e6),
        ("8bit", 1.0),
        ("3kB/s", 3000.0),
        ("7bytes", 7.0),
    ],
)
def test_rates_have_units(text, rate):
    assert parse_question(f"hosts=2, gpus=4, link={text}").link_bytes_per_s == rate


def test_rates_that_are_neither_given_nor_measured_are_an_error():
    question = parse_question("hosts=4,gpus=8")
    with pytest.raises(SettingsError, match=r"between 4 hosts is not known. Add .* link=200Gbit"):
        resolve(question, Layout(1, 8, LINK))
    with pytest.raises(SettingsError, match=r"between 8 devices .* not known. Add .* local=300GB"):
        resolve(question, Layout(2, 1, None, LINK))
    assert resolve(question, Layout(2, 2, LINK, Ring(5.0))) == Layout(4, 8, LINK, Ring(5.0))
    given = parse_question("hosts=4,link=1GB,local=2GB")
    assert resolve(given, Layout(1, 8)) == Layout(
        4, 8, Ring(2e9), Ring(scaling._PAYLOAD * 1e9, scaling._HOP_MS)
    )


def test_rows_double_up_to_the_cluster_and_end_with_it():
    layouts = list_layouts(Layout(6, 8, LINK, LINK))
    assert [layout.world for layout in layouts] == [1, 2, 4, 8, 16, 32, 48]
    assert [layout.hosts for layout in layouts] == [1, 1, 1, 1, 2, 4, 6]
    assert [layout.world for layout in list_layouts(Layout(1, 1))] == [1]
    assert [layout.world for layout in list_layouts(Layout(3, 1, None, LINK))] == [1, 2, 3]


# --- the facts of a run ---


def rank_facts(rank, host="a", **changes):
    ring = {"size": 2, "bytes": 1_000_000, "large_ms": 2.5, "small_ms": 0.5, "shard_ms": 2.5}
    found = {
        "rank": rank,
        "host": host,
        "backend": "gloo",
        "forward_ms": 10.0,
        "backward_ms": 20.0,
        "exposed_ms": 3.0,
        "optimizer_ms": 4.0,
        "buckets": [1_000_000, 500_000],
        "rings": {"within": ring},
    }
    return {**found, **changes}


def test_facts_are_of_the_slowest_rank():
    slow = {"size": 2, "bytes": 1_000_000, "large_ms": 4.5, "small_ms": 0.5, "shard_ms": 2.5}
    ranks = [rank_facts(0), rank_facts(1, exposed_ms=5.0, rings={"within": slow})]
    run = merge_facts(ranks, {"stock": 50.0})
    assert run.facts == StepFacts(45.0, 10.0, 20.0, (1_000_000, 500_000), 4.0, True)
    assert run.layout == Layout(1, 2, Ring(1_000_000 / 4e-3, 0.25, 1.0))
    assert run.remarks == ()
    # A reduce-scatter and an all-gather send as much as an all-reduce.
    slow["shard_ms"] = 8.5
    assert merge_facts(ranks, {"stock": 50.0}).layout.within.shard_efficiency == 0.5


def test_compute_that_nccl_slowed_is_faster_alone_but_not_for_free():
    ranks = [rank_facts(rank, backend="nccl", exposed_ms=0.0) for rank in range(2)]
    run = merge_facts(ranks, {"stock": 50.0})
    slowed = NCCL_SLOWDOWN_MS_PER_GB * 1.5e-3
    assert run.facts.compute_ms == pytest.approx(50.0 - slowed)
    four = replace(run.layout, per_host=4)
    for arm in ARMS:
        gain = predict(arm, run.facts, four).step_ms
        quiet = predict(arm, replace(run.facts, slowdown_ms_per_gb=0.0), four).step_ms
        # Copy engines gather parameters, which are half of the bytes that dist_optimizer sends.
        assert gain - quiet == pytest.approx(slowed * (0.75 if arm == "dist_optimizer" else 1.5))
    huge = [rank_facts(0, backend="nccl", exposed_ms=0.0, buckets=[10**12])] * 2
    assert merge_facts(huge, {"stock": 50.0}).facts.compute_ms == 40.0


def test_hosts_are_counted_and_a_backward_is_no_longer_than_the_step():
    ranks = [rank_facts(rank, "ab"[rank // 2], exposed_ms=None) for rank in range(4)]
    run = merge_facts(ranks, {"stock": 15.0})
    assert (run.layout.hosts, run.layout.per_host) == (2, 2)
    facts = run.facts
    assert facts.compute_ms == 15.0
    assert facts.forward_ms + facts.backward_ms + facts.optimizer_ms == pytest.approx(15.0)
    assert facts.backward_ms == 2 * facts.forward_ms


def test_without_ddp_the_backward_is_assumed_and_that_is_reported():
    ranks = [rank_facts(0, forward_ms=None, backward_ms=None, exposed_ms=None, rings={})]
    run = merge_facts(ranks, {"stock": 30.0})
    assert run.facts.backward_ms == 2 * run.facts.forward_ms == pytest.approx(20.0 * 30 / 34)
    assert "no DistributedDataParallel" in run.remarks[0]


# --- the predictions ---


def measured():
    facts = StepFacts(240.0, 80.0, 160.0, tuple([25 << 20] * 100))
    return MeasuredRun(
        facts, Layout(1, 4, Ring(2e11, 0.001)), {"stock": 250.0, "ddp": 200.0}, ("assumed",)
    )


def test_the_text_has_a_table_the_error_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    answer = answer_question(parse_question("hosts=4,gpus=8,link=200Gbit"), measured())
    text = scaling.format_answer(answer, width=120)
    rows = [line.split("|")[1:4] for line in text.splitlines() if re.match(r"\| +\d", line)]
    assert [tuple(map(str.strip, row))[:2] for row in rows] == [
        ("1", "1"),
        ("2", "1"),
        ("4", "1"),
        ("8", "1"),
        ("16", "2"),
        ("32", "4"),
    ]
    assert "stock: predicted 240.2 ms, measured 250 ms, -3.9%" in text
    assert "ddp: predicted 240.2 ms, measured 200 ms, +20.1%" in text
    assert "- assumed" in text
    data = json.loads(json.dumps(scaling.answer_to_json(answer)))
    assert data["errors"]["ddp"]["measured_ms"] == 200.0
    assert data["rows"][-1]["hosts"] == 4
    for suffix in ("svg", "png"):
        scaling.draw_answer(answer, tmp_path / f"steps.{suffix}")
    picture = (tmp_path / "steps.svg").read_text()
    assert "ddp, measured (the model is off by +20.1%)" in picture
    scaling.draw_answer(answer, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == picture


def test_a_picture_without_a_known_format_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match=r"ends with none of .png, .svg, .pdf. Give"):
        scaling.check_figure(tmp_path / "steps.txt")


# --- measured steps ---

# Neither the rate of NVLink nor the time of the optimizer is on file with the steps. Rings of NCCL on H100
# reach 250 GB/s or more, and a fused AdamW passes 28 bytes of a parameter through memory of some 2.7 TB/s.
NVLINK = Ring(250e9, 0.002)
OPTIMIZER_BYTES_PER_S = 2.7e12


def median_step(files, size, compile, world, arm):
    """Return the median step over all runs of a model on H100 with one microbatch, in ms."""
    steps = [
        row["median_ms"]
        for file in files
        for run in tables.read_results(file)
        if (run["world"], run["settings"]["size"]) == (world, size)
        and (run["settings"]["compile"] or None, run["settings"]["accumulate"]) == (compile, 1)
        and "H100" in run["device"]
        for row in run["summary"]
        if row["arm"] == arm
    ]
    return statistics.median(steps)


FILES = ("zero_step", "zero_step_2_h100")


def count_params(size):
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(**SIZES[size]).parameters())


def facts_of_two_gpus(size, compile):
    measured = median_step(FILES, size, compile, 2, "stock, bucket view")
    numel = count_params(size)
    optimizer_ms = 28 * numel / OPTIMIZER_BYTES_PER_S * 1e3
    # A backward takes twice the forward.
    forward_ms = (measured - optimizer_ms) / 3
    buckets = (25 << 20,) * (4 * numel // (25 << 20))
    facts = StepFacts(
        measured,
        forward_ms,
        2 * forward_ms,
        buckets,
        optimizer_ms,
        slowdown_ms_per_gb=NCCL_SLOWDOWN_MS_PER_GB,
    )
    return isolate_compute(facts, Layout(1, 2, NVLINK))


@pytest.mark.parametrize(("size", "compile"), [("1b", None), ("1b", "blocks"), ("2b", "blocks")])
def test_four_gpus_are_predicted_from_two(size, compile):
    facts = facts_of_two_gpus(size, compile)
    arms = {"stock": "stock, bucket view", "ddp": "ovpatch, ddp alone"}
    arms["dist_optimizer"] = "ovpatch, where faster" if size == "2b" else "ovpatch"
    for arm, name in arms.items():
        found = predict(arm, facts, Layout(1, 4, NVLINK)).step_ms
        assert found == pytest.approx(median_step(FILES, size, compile, 4, name), rel=0.1), arm


@pytest.mark.parametrize("compile", [None, "blocks"])
def test_one_gpu_is_predicted_from_two(compile):
    # One rank of eight ran alone, without its peers.
    alone = median_step(("zero_alone",), "1b", compile, 8, "stock, bucket view")
    found = predict("stock", facts_of_two_gpus("1b", compile), Layout(1, 1))
    assert found.step_ms == pytest.approx(alone, rel=0.1)


def test_nccl_slows_compute_by_what_a_profiled_step_has_lost():
    profile = json.loads((tables.RESULTS / "ddp_profile.json").read_text())["arms"]
    quiet, stock = profile["no sync"], profile["stock, bucket view, 100 MiB"]
    lost = stock["span"] - stock["nccl_exposed"] - quiet["span"]
    # An all-reduce over 8 GPUs sends 7 quarters of the gradients.
    sent = 2 * 7 / 8 * 4 * count_params("3.8b") / 1e9
    assert pytest.approx(lost / sent, rel=0.02) == NCCL_SLOWDOWN_MS_PER_GB


def test_steps_on_slow_links_are_predicted_and_ddp_is_not_slower_than_stock():
    rows = pool_rows(tables.read_results("hosts"))
    layouts = {(row["hosts"], row["per_host"], row["microbatches"]) for row, _ in rows}
    assert layouts == {(h, g, m) for h in (2, 4) for g in (1, 2) for m in (1, 8)}
    for row, settings in rows:
        name = f"{row['hosts']} x {row['per_host']}, {row['microbatches']} microbatches"
        for arm, predicted in predict_row(row, settings).items():
            assert predicted == pytest.approx(row["arms"][arm]["ms"], rel=0.1), (name, arm)
        stock, ddp = (row["arms"][arm] for arm in ("stock", "ddp"))
        # With one rank per host both send the same, and rounds differ by 4%.
        limit = 1.02 if row["per_host"] == 1 else 0.95
        assert ddp["ms"] <= limit * stock["ms"], name
        assert ddp["link_bytes"] <= 1.01 * stock["link_bytes"], name

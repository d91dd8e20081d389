"""The report as JSON and as a table, and reports of several processes merged into one."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ovpatch.patching import PatchState, PatchStatus
from ovpatch.session import script_names
from ovpatch.session.gains import describe_gains
from ovpatch.session.report_table import format_report, summarise_report
from ovpatch.session.session import Session
from ovpatch.session.session_report import (
    NEVER_CALLED,
    NO_WORK,
    STATES,
    FeatureReport,
    Report,
    did_work,
    explain_old_torch,
    to_plain_data,
)
from ovpatch.session.worker_reports import merge_reports
from ovpatch.settings.feature_options import OptionValue
from tests.support.golden import check_golden

PLUGINS = Path(__file__).parents[1] / "plugins" / "ovpatch_plugins"


def patch(target="m.f", state=PatchState.APPLIED, calls=1):
    return PatchStatus(target=target, feature="ddp", kind="wrap", state=state, calls=calls)


def feature(name="ddp", state="applied", reason="", **more):
    return FeatureReport(name, state, reason, distribution="ovpatch 1.0", **more)


def report(*features, rank=0, pid=None, restart=0, patches=()):
    pid = 100 + (rank or 0) if pid is None else pid
    made = Report("0.1", "2.13", "3.11", pid, rank, features or (feature(),), patches)
    return {**made.to_json(), "restart": restart}


# --- one process ---


def test_json_has_the_agreed_keys():
    made = feature(
        remarks=("r",),
        options={"size": OptionValue(25, "argument")},
        counters={"steps": 3},
        levels={"kept": "level"},
        summary="s",
        default=True,
    )
    data = report(made, patches=(patch(),))
    assert data["features"] == [
        {
            "name": "ddp",
            "state": "applied",
            "reason": "",
            "remarks": ["r"],
            "options": {"size": {"value": 25, "source": "argument"}},
            "counters": {"steps": 3},
            "levels": {"kept": "level"},
            "distribution": "ovpatch 1.0",
            "requires": [],
            "reorders_products": False,
            "work": [],
            "gains": [],
            "fits": "",
        }
    ]
    assert data["patches"] == [patch().to_json()]
    assert {key: data[key] for key in ("version", "torch", "python", "pid", "rank")} == {
        "version": "0.1",
        "torch": "2.13",
        "python": "3.11",
        "pid": 100,
        "rank": 0,
    }
    json.dumps(data)


def test_values_that_json_cannot_hold_become_text():
    value = {"path": Path("/a"), 1: (1, {2}), "none": None, "flag": True}
    assert to_plain_data(value) == {"path": "/a", "1": [1, [2]], "none": None, "flag": True}


def test_features_by_name():
    made = Report("0.1", "2.13", "3.11", 1, None, (feature("a"), feature("b", "skipped", "why")))
    assert made["b"].reason == "why"
    with pytest.raises(KeyError):
        made["c"]


def test_the_summary_says_what_is_on_and_why_others_are_not():
    made = Report(
        "0.1",
        "2.13",
        "3.11",
        1,
        None,
        (feature("a"), feature("b", "skipped", "why"), feature("c", "disabled", "x")),
    )
    assert made.summary() == "applied a; disabled c; skipped b (why)"


def test_the_table_is_plain_text_unless_colour_is_asked_for():
    made = Report(
        "0.1",
        "2.13",
        "3.11",
        1,
        None,
        (feature("a", "failed", "because [of] this", counters={"n": 3}),),
    )
    text = str(made)
    assert text.isascii()
    assert "\x1b" not in text
    assert "because [of] this" in text
    assert "n 3" in text
    assert "\x1b[31m" in made.table(colour=True)


@pytest.mark.parametrize("remark", [NEVER_CALLED, NO_WORK])
def test_an_idle_feature_is_not_green(remark):
    made = Report(
        "0.1", "2.13", "3.11", 1, None, (feature("a", remarks=(remark,), counters={"n": 0}),)
    )
    assert "applied, idle" in str(made)
    assert "\x1b[32m" not in made.table(colour=True)
    assert "\x1b[32m" in Report("0.1", "2.13", "3.11", 1, None, (feature("a"),)).table(colour=True)


def test_what_was_left_to_stock_is_no_work():
    assert not did_work({"stock_models": 3, "steps": 0})
    assert did_work({"stock_models": 3, "steps": 1})


def test_a_feature_may_name_the_counters_that_show_work():
    assert not did_work({"models": 2, "steps": 0}, ["steps"])
    assert did_work({"models": 2, "steps": 1}, ["steps"])
    merged = merge_reports(
        [report(feature(counters={"models": 2, "steps": 0}, work=("steps",)), rank=0)]
    )
    assert merged["features"][0]["work"] == ["steps"]


def test_the_table_shows_options_that_are_not_the_default():
    options = {
        "size": OptionValue(25, "environment OVPATCH_DDP_SIZE"),
        "other": OptionValue(1, "default"),
    }
    text = Report("0.1", "2.13", "3.11", 1, None, (feature(options=options),)).table(width=200)
    assert "size=25 (environment OVPATCH_DDP_SIZE)" in text
    assert "other" not in text


def test_a_notebook_shows_the_report_as_html():
    text = Report(
        "0.1", "2.13", "3.11", 1, None, (feature(reason="a < b\nthen", counters={"n": 3}),)
    )._repr_html_()
    assert text.startswith("<table>")
    assert "a &lt; b<br>then<br>n 3" in text


GAINS = ("{models:model}", "{early} of {all:bucket} early", "{whole-kept:bytes} less memory a rank")


def test_gains_are_words_and_units():
    counters = {"models": 1, "early": 60, "all": 64, "whole": 9 * 2**30, "kept": 2**30}
    assert (
        describe_gains(GAINS, counters)
        == "1 model, 60 of 64 buckets early, 8.0 GiB less memory a rank"
    )
    assert describe_gains(GAINS, {"models": 2000}) == "2,000 models", (
        "a clause of zeros is left out"
    )
    assert describe_gains(GAINS[2:], {"whole": 300, "kept": 12}) == "288 bytes less memory a rank"
    assert describe_gains((), {"n": 3, "stock_n": 2, "m": 0}) == "n 3"


def test_every_shipped_feature_says_its_gains_by_counters_that_exist():
    found = Session().report(with_fits=False)
    plan = Session().plan(environ={"OVPATCH": "all"}, should_check_machine=False)
    loaded = [record.feature for record in plan.records.values() if record.found.first_party]
    assert len(loaded) == len(found.features) >= 7
    for feature in loaded:
        assert feature.gains
        counters = FakeCounters()
        describe_gains(feature.gains, counters)
        hooks = importlib.import_module(
            f"ovpatch_plugins.{feature.name}.{feature.name}_feature"
        ).hooks
        assert counters.read <= set(hooks.ovpatch_counters()), feature.name


class FakeCounters(dict):
    """Counters that are all 1, and know which of them were read."""

    def __init__(self):
        super().__init__()
        self.read = set()

    def get(self, name, default=0):
        if name:
            self.read.add(name)
        return 1 if name else default


SCRIPT = """
import helper
def main():
    from torch.distributed.pipelining import Schedule1F1B as Schedule
    Trainer(gradient_checkpointing=True)
    helper.run(torch.utils.data)
"""


def test_a_script_is_known_by_the_names_in_its_code_and_on_its_command_line(monkeypatch, tmp_path):
    """Names in files of its folder count as well. Names in libraries do not, because the script uses few of them."""
    library = tmp_path / "site-packages"
    library.mkdir()
    for path in (tmp_path / "train.py", tmp_path / "helper.py", library / "library.py"):
        path.write_text(
            SCRIPT if path.stem == "train" else f"def {path.stem}_name(): use(megatron.core)\n"
        )
        monkeypatch.setitem(sys.modules, path.stem, SimpleNamespace(__file__=str(path)))
    monkeypatch.setattr(script_names, "_PROGRAM", str(tmp_path / "train.py"))
    monkeypatch.setattr(script_names, "_PROGRAM_PATH", tmp_path / "train.py")
    monkeypatch.setattr(sys, "argv", ["train.py", "--sequence-parallel=1", "data"])
    names = script_names.list_script_names()
    assert {
        "torch.distributed.pipelining",
        "Schedule1F1B",
        "gradient_checkpointing",
        "sequence_parallel",
    } <= names
    assert "helper_name" in names
    assert "library_name" not in names


GIB = 2**30


@pytest.mark.parametrize(
    ("name", "names", "counters", "reason"),
    [
        ("pipeline", {"ScheduleGPipe"}, {}, "uses ScheduleGPipe"),
        ("pipeline", {"Schedule"}, {}, ""),
        ("recompute", {"torch.utils.checkpoint"}, {}, "uses torch.utils.checkpoint"),
        ("recompute", {"torch.utils.data"}, {}, ""),
        ("megatron", {"megatron.core.transformer"}, {}, "uses megatron.core"),
        ("megatron", {"megatron.corelib"}, {}, ""),
        (
            "dist_optimizer",
            set(),
            {"ddp": {"bytes_reduced": 6 * GIB, "backwards": 2}},
            "keeps the full optimizer state for 3.0 GiB of gradients on each rank",
        ),
        ("dist_optimizer", set(), {"ddp": {"bytes_reduced": 6 * GIB, "backwards": 200}}, ""),
    ],
)
def test_a_feature_knows_whether_it_fits_a_script(name, names, counters, reason):
    hooks = importlib.import_module(f"ovpatch_plugins.{name}.{name}_feature").hooks
    assert hooks.ovpatch_fits(names, counters) == reason


def test_the_end_of_a_run_on_ranks_is_as_in_its_golden_file():
    counters = {"models": 1, "early": 60, "all": 64, "stock_models": 1}
    remarks = ("Tail keeps the stock reducer: it has a communication hook", "untested with torch 9")
    ddp = feature(counters=counters, gains=GAINS, work=("all",), remarks=remarks)
    features = [
        ddp,
        feature(
            "sharder",
            requires=("ddp",),
            remarks=("Net: off: too small", "m.f is pending: m", NEVER_CALLED),
        ),
        feature("broken", "failed", "boom"),
        feature("other", remarks=("no layer of it was found", NEVER_CALLED)),
        feature("pipes", "disabled", "off by default", fits="uses Schedule1F1B"),
        feature("off", "disabled", "off by OVPATCH=-off"),
    ]
    merged = merge_reports([report(*features, rank=rank) for rank in (0, 1)])
    check_golden("run-two-ranks", summarise_report(merged, "torchrun train.py", width=100))
    lines = summarise_report(merged, "torchrun train.py", width=60).splitlines()
    assert all(len(line) <= 60 for line in lines[:-1])


def test_the_end_of_a_run_that_gained_nothing_gives_the_next_command():
    merged = merge_reports([report(feature(remarks=(NEVER_CALLED,)), rank=rank) for rank in (0, 1)])
    text = summarise_report(merged, "torchrun train.py", width=200)
    assert text.startswith(
        "ovpatch:     nothing was accelerated: the script used nothing that a feature patches"
    )
    assert text.endswith("  next       ovpatch run --full -- torchrun train.py")
    merged = merge_reports([report(feature("pipes", "disabled", fits="uses Schedule1F1B"))])
    text = summarise_report(merged, "python train.py", width=200)
    assert text.startswith("ovpatch:     nothing to overlap on one process.")
    assert text.endswith("  next       ovpatch run --features=+pipes -- python train.py")


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("2.10.1", True),
        ("1.13", True),
        ("2.11.0a0+5228986", False),
        ("2.13.0+cpu", False),
        ("3.0", False),
        ("git", False),
    ],
)
def test_a_torch_that_is_too_old_is_named_with_the_remedy(monkeypatch, version, old):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    said = f"torch {version} is older than 2.11, and features may be unavailable. Install torch >= 2.11."
    assert explain_old_torch() == (said if old else "")


# --- several processes ---


def test_a_shipped_counter_that_falls_or_is_a_time_is_a_level():
    """A sum of it over processes would mean nothing."""
    features = [path.name for path in PLUGINS.iterdir() if (path / "__init__.py").exists()]
    assert "dist_optimizer" in features
    for feature in features:
        sources = [path.read_text(encoding="utf-8") for path in (PLUGINS / feature).rglob("*.py")]
        falling = set(re.findall(r"\bCOUNTERS\.(\w+) (?:-=|= max\()", "\n".join(sources)))
        hooks = importlib.import_module(f"ovpatch_plugins.{feature}.{feature}_feature").hooks
        levels, counters = hooks.ovpatch_levels(), hooks.ovpatch_counters()
        times = {name for name in counters if name.endswith("_ms")}
        assert falling | times <= levels.keys() <= counters.keys(), feature


def test_reports_of_versions_without_levels_are_merged():
    old = report(feature(counters={"n": 2, "bytes": 5}), rank=1)
    del old["features"][0]["levels"]
    new = report(feature(counters={"n": 3, "bytes": 4}, levels={"bytes": "level"}))
    for reports, total in (([old], 5), ([new, old], 5), ([old, old | {"rank": 2}], 10)):
        assert merge_reports(reports)["features"][0]["counters"]["bytes"] == total


def test_counters_are_summed_and_kept_by_process():
    merged = merge_reports(
        [
            report(feature(counters={"n": 2}), rank=1),
            report(feature(counters={"n": 3, "m": 1}), rank=0),
        ]
    )
    found = merged["features"][0]
    assert found["counters"] == {"n": 5, "m": 1}
    assert [(process["rank"], process["counters"]) for process in found["processes"]] == [
        (0, {"n": 3, "m": 1}),
        (1, {"n": 2}),
    ]
    assert merged["processes"] == [
        {"pid": 100, "rank": 0, "restart": 0},
        {"pid": 101, "rank": 1, "restart": 0},
    ]
    assert (found["state"], found["reason"]) == ("applied", "")
    assert (merged["pid"], merged["rank"]) == (None, None)
    format_report(merged)


def test_states_that_differ_are_said_and_the_worst_one_counts():
    merged = merge_reports(
        [report(rank=0), report(feature(state="skipped", reason="no GPU"), rank=1), report(rank=2)]
    )
    found = merged["features"][0]
    assert found["state"] == "skipped"
    assert "applied on rank 0, rank 2" in found["reason"]
    assert "skipped (no GPU) on rank 1" in found["reason"]


def test_one_state_with_two_reasons():
    merged = merge_reports(
        [
            report(feature(state="skipped", reason=why), rank=rank)
            for rank, why in enumerate(("x", "y"))
        ]
    )
    assert merged["features"][0]["reason"] == "rank 0: x; rank 1: y"


def test_a_feature_that_one_process_does_not_have():
    merged = merge_reports(
        [report(feature("a"), feature("b"), rank=0), report(feature("a"), rank=1)]
    )
    assert [row["name"] for row in merged["features"]] == ["a", "b"]
    assert merged["features"][1]["state"] == "unavailable"
    assert "not installed on rank 1" in merged["features"][1]["reason"]


def test_every_state_has_a_place_in_the_order():
    for state in STATES:
        assert merge_reports([report(feature(state=state))])["features"][0]["state"] == state


def test_options_that_differ_are_said():
    options = [{"size": OptionValue(value, "argument")} for value in (1, 2)]
    merged = merge_reports(
        [report(feature(options=values), rank=rank) for rank, values in enumerate(options)]
    )
    assert merged["features"][0]["options"]["size"] == {
        "value": 1,
        "source": "argument",
        "differs": {"rank 0": 1, "rank 1": 2},
    }
    same = merge_reports([report(feature(options=options[0]), rank=rank) for rank in (0, 1)])
    assert "differs" not in same["features"][0]["options"]["size"]


def test_remarks_are_said_once_with_whom_they_concern():
    merged = merge_reports(
        [report(feature(remarks=("all", "one")), rank=0), report(feature(remarks=("all",)), rank=1)]
    )
    assert merged["features"][0]["remarks"] == ["all", "one (rank 0)"]


def test_never_called_is_said_of_workers_but_not_of_a_parent_while_others_work():
    idle, busy = feature(remarks=(NEVER_CALLED,), counters={"n": 0}), feature(counters={"n": 1})
    assert merge_reports([report(idle, rank=0), report(idle, rank=1)])["features"][0][
        "remarks"
    ] == [NEVER_CALLED]
    assert merge_reports([report(busy, rank=0), report(idle, rank=1)])["features"][0][
        "remarks"
    ] == [NEVER_CALLED + " (rank 1)"]
    assert (
        merge_reports([report(busy, rank=0), report(idle, rank=None, pid=7)])["features"][0][
            "remarks"
        ]
        == []
    )


def test_a_rank_without_a_last_report_is_named_and_is_not_called_idle():
    killed = {
        **report(feature(remarks=(NEVER_CALLED, "r"), counters={"n": 0}), rank=1),
        "finished": False,
    }
    merged = merge_reports(
        [{**report(feature(remarks=("r",), counters={"n": 1})), "finished": True}, killed]
    )
    assert merged["features"][0]["remarks"] == ["r"]
    assert merged["unfinished"] == ["rank 1"]
    child = {**report(rank=None, pid=7), "finished": False}
    assert merge_reports([report(rank=0), child])["unfinished"] == [], "a helper is no rank"


def test_a_process_without_a_rank_that_never_imported_the_target_is_no_difference():
    """As the parent of spawned ranks, or a fork server: its patch stays pending."""
    pending = feature(state="pending", reason="m is not imported yet")
    merged = merge_reports([report(rank=0), report(pending, rank=None, pid=4130)])
    assert (merged["features"][0]["state"], merged["features"][0]["reason"]) == ("applied", "")
    merged = merge_reports([report(rank=0), report(pending, rank=1)])
    assert merged["features"][0]["state"] == "pending"
    assert "pending (m is not imported yet) on rank 1" in merged["features"][0]["reason"], (
        "a rank is one"
    )
    merged = merge_reports([report(pending, rank=None, pid=7)])
    assert merged["features"][0]["state"] == "pending", "where all are pending, that is the state"


def test_after_an_elastic_restart_the_last_generation_counts():
    first = [report(feature(counters={"n": 50}), rank=rank, pid=rank + 1) for rank in (0, 1)]
    second = [
        report(feature(counters={"n": 3}), rank=rank, pid=rank + 11, restart=1) for rank in (0, 1)
    ]
    merged = merge_reports(first + second)
    assert merged["features"][0]["counters"] == {"n": 6}
    assert len(merged["processes"]) == 4


def test_calls_of_patches_are_summed_and_states_kept_apart():
    merged = merge_reports(
        [
            report(rank=0, patches=(patch(calls=2), patch("m.g"))),
            report(rank=1, patches=(patch(calls=3), patch("m.g", PatchState.SKIPPED, 0))),
        ]
    )
    patches = [(patch["target"], patch["state"], patch["calls"]) for patch in merged["patches"]]
    assert patches == [
        ("m.f", "applied", 5),
        ("m.g", "applied", 1),
        ("m.g", "skipped", 0),
    ]


def test_versions_that_differ_are_both_said():
    older = {**report(rank=1), "torch": "2.11"}
    assert merge_reports([report(rank=0), older])["torch"] == "2.13, 2.11"


def test_nothing_to_merge():
    with pytest.raises(ValueError, match="no reports"):
        merge_reports([])

"""The driver of ``make demo`` fails when it should: each way a comparison can go wrong is made to happen."""

from __future__ import annotations

import argparse
import copy
import io
import json
import re
import sys

import pytest
from rich.console import Console

from examples import demo

STEPS = 8


def run_of(name, losses=None, **kwargs):
    losses = losses or [5.0 - 0.1 * step for step in range(STEPS)]
    entries = [
        {"step": i, "loss": loss, "grad_norm": 2 * loss, "ms": 10.0 + i}
        for i, loss in enumerate(losses)
    ]
    return demo.Run(name, [], entries, **kwargs)


@pytest.fixture
def report():
    counters = dict.fromkeys(demo.MUST_COUNT, 3) | {"stock_models": 0}
    worker = {"state": "applied", "reason": "", "counters": counters}
    feature = {
        "name": "ddp", "state": "applied", "reason": "", "remarks": [], "options": {}, "counters": counters, "work": [],
        "processes": [{"pid": 10 + rank, "rank": rank, **copy.deepcopy(worker)} for rank in (0, 1)],
    }  # fmt: skip
    patch = {"target": "torch.f", "feature": "ddp", "kind": "wrap", "state": "applied", "calls": 2}
    head = {"version": "1", "torch": "2", "python": "3"}
    return {
        **head,
        "processes": [{"rank": 0}, {"rank": 1}],
        "features": [feature],
        "patches": [patch],
    }


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "OUT", tmp_path)
    return tmp_path


def quiet():
    return Console(file=io.StringIO(), width=200)


# --- judging ---


def test_equal_runs_and_a_full_report_pass(report):
    assert demo.check_run(run_of("stock"), STEPS) == []
    assert demo.check_losses(run_of("stock"), run_of("patched")) == []
    assert demo.check_report(report, 2) == []


def test_two_ranks_must_agree_to_the_last_bit():
    stock, patched = run_of("stock"), run_of("patched")
    patched.records[3] = {**patched.records[3], "loss": patched.records[3]["loss"] + 2**-50}
    (problem,) = demo.check_losses(stock, patched)
    assert "first at step 3" in problem


def test_a_gradient_norm_that_differs_is_found_although_the_losses_agree():
    stock, patched = run_of("stock"), run_of("patched")
    patched.records[-1] = {**patched.records[-1], "grad_norm": 0.0}
    (problem,) = demo.check_losses(stock, patched)
    assert problem.startswith("grad_norm")


@pytest.mark.parametrize(("gap", "allowed"), [(1.9e-3, True), (2.1e-3, False)])
def test_more_ranks_may_differ_by_twice_what_stock_differs_by_with_other_buckets(gap, allowed):
    stock, reordered, patched = run_of("stock"), run_of("reordered"), run_of("patched")
    for run, by in ((reordered, 1e-3), (patched, gap)):
        run.records[4] = {key: value + by for key, value in run.records[4].items()}
    assert (demo.check_losses(stock, patched, reordered) == []) is allowed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_finite_in_one_run_only_disagrees(value):
    stock, patched = run_of("stock"), run_of("patched")
    patched.records[2] = {**patched.records[2], "loss": value}
    assert demo.check_losses(stock, patched)


@pytest.mark.parametrize("report", [{}, {"features": [], "patches": [], "processes": []}])
def test_no_report_is_no_patch(report):
    assert "no worker was patched" in demo.check_report(report, 2)[0]


def test_a_worker_missing_from_the_report_is_named(report):
    del report["features"][0]["processes"][1]
    assert demo.check_report(report, 2) == [
        "the worker of rank 1 was not patched: it is not in the report"
    ]


def test_a_worker_whose_feature_is_off_is_named_with_the_reason(report):
    report["features"][0]["processes"][1] |= {"state": "disabled", "reason": "OVPATCH=0"}
    (problem,) = demo.check_report(report, 2)
    assert "rank 1" in problem
    assert "OVPATCH=0" in problem


@pytest.mark.parametrize("counter", demo.MUST_COUNT)
def test_a_counter_that_is_zero_on_one_rank_is_named(report, counter):
    report["features"][0]["processes"][0]["counters"][counter] = 0
    (problem,) = demo.check_report(report, 2)
    assert "rank 0" in problem
    assert counter in problem


def test_a_model_that_fell_back_to_stock_is_a_failure(report):
    report["features"][0]["processes"][1]["counters"]["stock_models"] = 1
    assert len(demo.check_report(report, 2)) == 1


def test_a_report_without_the_feature_is_a_failure(report):
    report["features"] = []
    assert len(demo.check_report(report, 2)) == 1


def test_a_run_that_stopped_early_is_a_failure():
    assert "3 steps instead of 8" in demo.check_run(run_of("stock", [1.0, 2.0, 3.0]), STEPS)[0]


# --- running ---


def test_a_failed_command_shows_its_last_lines(out):
    code = "import sys; print('it began'); sys.exit('it broke')"
    run = demo.train("stock", [sys.executable, "-c", code], {}, STEPS, quiet())
    (problem,) = demo.check_run(run, STEPS)
    assert "exit status 1" in problem
    assert "it broke" in problem


def test_an_empty_report_fails_without_a_table(main, report):
    report.update(features=[], patches=[], processes=[])
    status, text, _ = main([], {"stock": run_of("stock"), "patched": run_of("patched")})
    assert status == 1
    assert "no worker was patched" in text


def test_a_run_that_hangs_is_ended(out, monkeypatch):
    monkeypatch.setattr(demo, "STALL_S", 0.3)
    run = demo.train(
        "stock", [sys.executable, "-c", "import time; time.sleep(60)"], {}, STEPS, quiet()
    )
    assert run.seconds < 30
    assert "hung" in demo.check_run(run, STEPS)[0]


def test_progress_without_a_terminal_is_lines(out):
    code = (
        "import json, sys, time\n"
        "for i in range(8):\n"
        "    print(json.dumps({'loss': 1.0}), file=open(sys.argv[1].partition('=')[2], 'a'))\n"
    )
    console = quiet()
    run = demo.train("stock", [sys.executable, "-c", code], {}, STEPS, console)
    assert len(run.records) == STEPS
    assert "stock: 8/8 steps, loss 1.0000" in console.file.getvalue()


def test_an_unfinished_line_of_the_log_waits(tmp_path):
    log = tmp_path / "log"
    log.write_text('{"loss": 1.0}\n{"lo')
    assert demo.read_log(log) == [{"loss": 1.0}]


@pytest.mark.parametrize(
    ("gpus", "nproc", "expected", "on_gpu"),
    [
        (0, None, 2, False),
        (1, None, 2, False),
        (2, None, 2, True),
        (16, None, 8, True),
        (4, 3, 3, True),
        (2, 3, 3, False),
    ],
)
def test_gpus_are_used_when_there_is_one_for_each_process(gpus, nproc, expected, on_gpu):
    got, script_args, _ = demo.plan(argparse.Namespace(nproc=nproc, steps=None, quick=False), gpus)
    assert got == expected
    assert ("--device=cpu" not in script_args) is on_gpu


# --- the whole ---


@pytest.fixture
def main(out, report, monkeypatch, capsys):
    """Run the driver with training replaced: returns its exit status and what it printed."""
    monkeypatch.setattr(demo.torch.cuda, "device_count", lambda: 0)

    def run(argv, runs):
        calls = []

        def train(name, command, env, steps, console):
            calls.append((name, command, env))
            if name == "patched":
                (out / "report.json").write_text(json.dumps(report))
            return runs[name]

        monkeypatch.setattr(demo, "train", train)
        status = demo.main([f"--steps={STEPS}", *argv])
        return status, capsys.readouterr().out, calls

    return run


def test_main_succeeds_and_runs_the_same_job_twice(main):
    status, text, calls = main([], {"stock": run_of("stock"), "patched": run_of("patched")})
    (stock, job, stock_env), (patched, wrapped, patched_env) = calls
    assert (status, stock, patched) == (0, "stock", "patched")
    assert wrapped[-len(job) :] == job
    assert wrapped[: wrapped.index("--")][1:4] == ["-m", "ovpatch", "run"]
    assert stock_env == {**patched_env, "OVPATCH": "0"}
    assert "bitwise equal" in text
    assert "(each of 2 ranks)" in text
    assert "ovpatch bench" in text


def test_single_runs_are_not_compared_by_their_times(main):
    """On a busy machine either run may be the slower one, by chance."""
    stock, patched = run_of("stock"), run_of("patched")
    patched.records = [{**entry, "ms": 777.0 * entry["ms"]} for entry in patched.records]
    status, text, _ = main([], {"stock": stock, "patched": patched})
    assert status == 0
    assert "777" not in text
    assert not re.search(r"\bms\b|time|patched over stock", text)


def test_main_fails_when_losses_disagree(main):
    status, text, _ = main(
        [], {"stock": run_of("stock"), "patched": run_of("patched", [5.0] * STEPS)}
    )
    assert status == 1
    assert "FAILED: loss differs" in text


def test_main_fails_when_a_worker_was_not_patched(main, report):
    report["features"][0]["processes"].pop()
    status, text, _ = main([], {"stock": run_of("stock"), "patched": run_of("patched")})
    assert status == 1
    assert "rank 1 was not patched" in text


def test_main_stops_at_a_stock_run_that_failed(main):
    status, text, calls = main([], {"stock": run_of("stock", returncode=3, output="no space left")})
    assert (status, len(calls)) == (1, 1)
    assert "no space left" in text


def test_main_measures_the_order_of_sums_on_more_than_two_ranks(main, report):
    report["features"][0]["processes"].append({**report["features"][0]["processes"][0], "rank": 2})
    nearly = run_of("patched")
    nearly.records[5] = {**nearly.records[5], "loss": nearly.records[5]["loss"] + 5e-7}
    status, _, calls = main(
        ["--nproc=3"], {"stock": run_of("s"), "patched": nearly, "reordered": run_of("r")}
    )
    assert (status, [name for name, *_ in calls]) == (0, ["stock", "patched", "reordered"])
    assert calls[2][2]["OVPATCH"] == "0"


def test_main_with_optimizer_state_by_parts(main, report):
    """Nothing is clipped in either run; losses are bitwise equal, and norms but for their last bits."""
    nearly = run_of("patched")
    nearly.records[5] = {
        **nearly.records[5],
        "grad_norm": nearly.records[5]["grad_norm"] * (1 + 1e-7),
    }
    runs = {"stock": run_of("stock"), "patched": nearly}
    argv = ["--features=+dist_optimizer"]
    status, text, _ = main(argv, runs)
    assert status == 1
    assert "FAILED: the feature dist_optimizer made no step" in text
    counters = {"steps": 3, "state_bytes": 2**23, "state_bytes_whole": 2**24}
    report["features"].append(
        {**report["features"][0], "name": "dist_optimizer", "counters": counters}
    )
    status, text, calls = main(argv, runs)
    assert (status, [call[2].get("OVPATCH") for call in calls]) == (0, ["0", "+dist_optimizer"])
    assert all("--clip=0" in command for _, command, _ in calls)
    assert "OK: losses are bitwise equal" in text
    assert "optimizer state per process: 8.0 MiB, where stock keeps 16.0 MiB" in text
    assert main([], runs)[0] == 1, "without the feature norms are bitwise equal, too"
    nearly.records[5] = {**nearly.records[5], "loss": nearly.records[5]["loss"] * (1 + 1e-7)}
    assert main(argv, runs)[0] == 1

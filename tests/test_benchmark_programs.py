"""The programs of the benchmarks: how their rounds take turns, what becomes of a failure, and the table."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import program_runs, programs, tables
from benchmarks.program_runs import Program, ProgramError
from benchmarks.programs import (
    SCRIPTS,
    SIZES,
    VARIANTS,
    Row,
    keep_goal,
    make_table,
    parse,
    summarize,
)
from ovpatch.insight.launch import find_processes
from tests.support import patience
from tests.support.preloaded import preloaded

RUN = {
    "device": "NVIDIA H100 80GB HBM3",
    "world": 2,
    "date": "2030-01-01",
    "is_cpu_time": False,
    "skipped": "",
}


def make_round(number, variant, ms, cpu_ms=1.0, peak_gib=1.0):
    return {"round": number, "variant": variant, "ms": ms, "cpu_ms": cpu_ms, "peak_gib": peak_gib}


def result(title, rounds=(), **more):
    return {
        **RUN,
        "title": title,
        "rounds": rounds,
        "summary": summarize(rounds),
        "failed": {},
        "worked": {},
        **more,
    }


GPT = [
    make_round(0, "stock", [30.0, 40.0, 41.0], peak_gib=13.25),
    make_round(0, "ovpatch", [36.0, 36.0, 90.0], peak_gib=12.0),
    make_round(1, "ovpatch", [38.0, 38.0, 38.0], peak_gib=12.5),
    make_round(1, "stock", [50.0, 50.0, 50.0], peak_gib=13.0),
    make_round(1, "dist_optimizer", [45.0], peak_gib=9.0),
]
ON_CPU = [
    make_round(n, v, [9.0], cpu_ms=ms) for n, v, ms in [(0, "stock", 110.0), (0, "ovpatch", 103.5)]
]
ON_CPU += [
    make_round(n, v, [9.0], cpu_ms=ms) for n, v, ms in [(1, "ovpatch", 140.0), (1, "stock", 100.0)]
]


def test_the_table_of_recorded_results():
    worked = {"stock": {}, "ovpatch": {"ddp": {"backwards": 3}}, "dist_optimizer": {}}
    failed = {"dist_optimizer": "OutOfMemoryError: out of memory"}
    results = [
        result("GPT", GPT, worked=worked, failed=failed),
        result(
            "Llama",
            GPT[:2],
            worked={"ovpatch": {"ddp": {"backwards": 3}, "dist_optimizer": {"steps": 3}}},
        ),
        result("on CPU", ON_CPU, device="cpu", is_cpu_time=True),
        result("Lightning", skipped="skipped: there is no package lightning"),
    ]
    assert make_table(results) == (
        "| program | where | stock | ovpatch | ovpatch, `dist_optimizer` |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| GPT | 2 H100, 2030-01-01, 2 rounds | 45.0 ms, 13.2 GiB | 37.0 ms (0.83x), 12.5 GiB"
        " | 45.0 ms (0.90x), 9.0 GiB, left to stock PyTorch |\n"
        "| Llama | 2 H100, 2030-01-01, 1 round | 40.0 ms, 13.2 GiB | 36.0 ms (0.90x), 12.0 GiB, "
        "sharded |  |\n"
        "| on CPU | 2 CPU ranks, 2030-01-01, 2 rounds | 100.0 ms | 103.5 ms (1.035x) |  |\n"
        "\n"
        "- GPT, ovpatch, `dist_optimizer`, in its last round: OutOfMemoryError: out of memory\n"
        "- Lightning: skipped: there is no package lightning"
    )


def test_pages_get_the_table_from_the_file_of_results(tmp_path, monkeypatch):
    (tmp_path / "programs.jsonl").write_text(json.dumps(result("GPT", GPT, torch="2.11")) + "\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    filled = tables.fill("<!-- table programs -->\n<!-- /table -->")
    assert (
        "| GPT | 2 H100, 2030-01-01, 2 rounds | 45.0 ms, 13.2 GiB | 37.0 ms (0.83x), 12.5 GiB |"
        in filled
    )
    assert "torch 2.11, random weights and data" in filled


def test_the_slowest_rank_counts_and_cpu_time_is_that_of_all_ranks(tmp_path):
    args = parse(["--size=tiny", f"--logs={tmp_path}"])
    measurement = programs.Measurement("GPT", SIZES["tiny"]["nano"], args, float("inf"))
    ranks = [
        {"ms": [1.0, 4.0], "cpu_ms": 2.0, "peak_gib": 3.0},
        {"ms": [2.0, 3.0], "cpu_ms": 1.0, "peak_gib": 4.0},
    ]
    program = SimpleNamespace(wait_for=lambda event, deadline, *, number: ranks)
    measurement._take_round(program, "stock", 1, 0)
    assert measurement.result()["rounds"] == [
        make_round(1, "stock", [2.0, 4.0], cpu_ms=3.0, peak_gib=4.0)
    ]


def test_a_variant_is_compared_with_the_stock_runs_of_its_rounds():
    stock, ovpatch, sharded = summarize(GPT)
    assert (stock["ratio"], ovpatch["ratio"], sharded["ratio"]) == (1.0, 0.83, 0.9)
    assert ovpatch["round_medians_ms"] == [36.0, 38.0]
    assert summarize(GPT[1:3])[0]["ratio"] is None


def test_cpu_time_over_the_goal_is_reported(capsys):
    assert not keep_goal([result("on CPU", ON_CPU, is_cpu_time=True)])
    assert "OVER THE GOAL of 1.03: on CPU, 1.035" in capsys.readouterr().out
    assert keep_goal([result("on CPU", ON_CPU)]), "times of GPUs have no goal"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--only nano-1b", "there is no program 'nano-1b' here. Choose from: nano-124m-compiled,"),
        ("--quick --only vit-l-16", "there is no program 'vit-l-16' here"),
        ("--quick --size tiny", "--quick has its own programs"),
        ("--quick --cpu-time", "--quick has its own programs"),
        ("--cpu-time --size full", "and none of size full"),
        ("--variants fsdp", "invalid choice: 'fsdp'"),
        ("--ranks 0", "--ranks is 0, but it must be at least 1"),
    ],
)
def test_wrong_arguments_are_errors(arguments, error, capsys):
    with pytest.raises(SystemExit):
        parse(shlex.split(arguments))
    assert error in capsys.readouterr().err


def test_quick_rows_are_rows_whose_variants_fit_together(capsys):
    rows = programs.choose_rows(
        parse(["--quick", "--ranks=2"] if not programs.CUDA else ["--quick"])
    )
    assert list(rows) == list(programs.QUICK)
    assert all(len(row.variants) <= row.max_together for row in rows.values())
    assert programs.main(["--list", "--only", "nano-774m", "--variants", "stock", "best"]) == 0
    assert capsys.readouterr().out == "nano-774m             nanoGPT 774M, batch 4: stock, best\n"


# --- processes ---

# It prints what a program prints, and needs no torch.
FAKE = """
import json, pathlib, sys, time
turns = pathlib.Path(next(a for a in sys.argv if a.startswith("--turns=")).partition("=")[2])
def report(event, **values):
    print("step_times: " + json.dumps({"event": event, "rank": 0, "device": "cpu", **values}), flush=True)
def wait(name):
    while not (turns / name).exists():
        time.sleep(0.01)
wait("start")
report("ready")
for number in range(2):
    wait(f"round-{number}")
    if "--best" in sys.argv:
        print("Traceback ...\\nValueError: not possible\\nChildFailedError: later", flush=True)
        sys.exit(3)
    report("round", round=number, ms=[1.0 + number], cpu_ms=2.0, peak_gib=3.0)
"""


# Its child has its own session, as the ranks of torchrun have.
HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print('step_times: {"event": "started", "rank": 0}', flush=True)
time.sleep(600)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(programs, "SCRIPTS", tmp_path)
    monkeypatch.setattr(program_runs, "make_launcher", lambda ranks: [sys.executable])
    row = Row("fake", "fake.py", "", variants=("stock", "best", "fsdp2"), has_fsdp2=True)
    absent = Row(
        "absent", "fake.py", "", packages=(("no_such_package", "nor_this"),), variants=("stock",)
    )
    monkeypatch.setitem(programs.SIZES, "tiny", {"fake": row, "absent": absent})
    monkeypatch.setattr(program_runs, "_EXIT_TIMEOUT_S", 30.0)
    return ["--size=tiny", "--ranks=1", f"--out={tmp_path / 'out'}", f"--logs={tmp_path / 'logs'}"]


def test_a_variant_that_fails_is_reported_and_the_others_take_their_rounds(
    fake, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(programs, "VARIANTS", {**VARIANTS, "fsdp2": VARIANTS["stock"]})
    monkeypatch.setattr(programs, "choose_rows", lambda args: programs.SIZES["tiny"])
    assert programs.main([*fake, "--rounds=2", "--variants", "stock", "best", "fsdp2"]) == 1
    measured, skipped = map(json.loads, (tmp_path / "out").read_text().splitlines())
    order = [(found["round"], found["variant"]) for found in measured["rounds"]]
    assert order == [(0, "stock"), (0, "fsdp2"), (1, "fsdp2"), (1, "stock")]
    assert measured["failed"]["best"].startswith("ValueError: not possible, see ")
    assert skipped["skipped"] == "skipped: there is no package no_such_package"
    printed = capsys.readouterr().out
    assert "| fake | 1 CPU ranks" in printed
    assert printed.count("ValueError: not possible") == 2
    assert programs.main([f"--table={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().out.strip() == printed[printed.index("| program") :].strip()


def test_rows_are_dropped_when_the_budget_is_spent(fake, tmp_path, capsys):
    assert programs.main([*fake, "--budget-s=0", "--only", "fake"]) == 0
    assert "- fake: dropped: the budget of 0 s is spent" in capsys.readouterr().out
    assert json.loads((tmp_path / "out").read_text())["rounds"] == []


def test_an_interrupted_run_keeps_its_rounds(fake, tmp_path, monkeypatch, capsys):
    def interrupt(measurement, program, variant):
        raise KeyboardInterrupt

    monkeypatch.setattr(programs.Measurement, "_finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        programs.main([*fake, "--rounds=2", "--only=fake", "--variants=stock"])
    assert "| fake | 1 CPU ranks, " in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out").read_text())["rounds"]) == 2


def test_a_variant_is_cut_off_when_the_budget_is_spent(fake, tmp_path):
    fake_script = tmp_path / "fake.py"
    fake_script.write_text(
        FAKE.replace("for number in range(2):", "time.sleep(600)\nfor number in range(2):")
    )
    assert (
        programs.main([*fake, "--budget-s=1", "--rounds=1", "--only=fake", "--variants=stock"]) == 1
    )
    assert json.loads((tmp_path / "out").read_text())["failed"] == {"stock": "cut off at 1 s"}


def test_a_program_that_hangs_is_cut_off_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(program_runs, "make_launcher", lambda ranks: [sys.executable])
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    program = Program([str(script)], None, 1, tmp_path / "run", has_turns=False)
    program.wait_for("started", time.monotonic() + 60)
    assert len(find_processes(program._mark_entry)) == 2
    with pytest.raises(ProgramError, match="cut off before its report 'ready'"):
        program.wait_for("ready", time.monotonic())
    program.end()
    assert not find_processes(program._mark_entry)


# --- the programs themselves ---


def test_rows_are_commands_that_their_scripts_take(tmp_path):
    """A script that waits for a turn without a controller ends before it uses the device."""
    scripts = {
        row.script: row for rows in SIZES.values() for row in rows.values() if not row.packages
    }
    shared = (SCRIPTS / "step_times.py").read_text()
    for row in [row for rows in SIZES.values() for row in rows.values()]:
        declared = re.findall(
            r'add_argument\(\s*"(--[\w-]+)"', shared + (SCRIPTS / row.script).read_text()
        )
        switches = ["--compile"] * row.is_compiled + ["--fsdp2"] * row.has_fsdp2
        assert {word.partition("=")[0] for word in [*shlex.split(row.arguments), *switches]} <= set(
            declared
        )
    assert set(scripts) == {"nano_gpt.py", "vision.py"}
    for row in scripts.values():
        run = [
            *preloaded(),
            str(SCRIPTS / row.script),
            *shlex.split(row.arguments),
            "--best",
            f"--turns={tmp_path}",
        ]
        done = subprocess.run(run, capture_output=True, text=True, timeout=patience.scale(100))
        assert "the process that gives turns has ended" in done.stderr


def test_a_tiny_program_takes_turns_with_itself_under_ovpatch(tmp_path, monkeypatch):
    monkeypatch.setattr(program_runs, "make_launcher", lambda ranks: preloaded(ranks))
    out = tmp_path / "out"
    arguments = [
        "--size=tiny",
        "--only=nano",
        "--ranks=2",
        "--rounds=2",
        "--steps=2",
        "--warmup=2",
        f"--out={out}",
    ]
    arguments += [f"--logs={tmp_path / 'logs'}", "--start-timeout-s=120"]
    assert programs.main([*arguments, "--variants", "stock", "ovpatch"]) == 0
    found = json.loads(out.read_text())
    order = [(round["round"], round["variant"]) for round in found["rounds"]]
    assert order == [(0, "stock"), (0, "ovpatch"), (1, "ovpatch"), (1, "stock")]
    assert all(
        len(round["ms"]) == 2 and min(round["cpu_ms"], round["peak_gib"]) > 0
        for round in found["rounds"]
    )
    assert found["worked"]["stock"] == {}
    # Both ranks run the warm-up, and in each round as many steps untimed as timed.
    assert found["worked"]["ovpatch"]["ddp"]["backwards"] == 2 * (2 + 2 * 4)

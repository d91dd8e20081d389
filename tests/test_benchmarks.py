"""The suite of benchmarks: rows are commands that benchmarks take, and one that fails or hangs is only one row."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import moe_layer, suite, tables
from benchmarks.message_clock import replay
from benchmarks.suite import SHORT, SUITE, Row, run
from tests.support import patience
from tests.support.rarely import RARELY


def test_operators_of_torch_are_there_in_a_fresh_process():
    code = "import torch, benchmarks.tp_operators\n" + "\n".join(
        f"torch.ops.symm_mem.{name}"
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=suite.ROOT,
        capture_output=True,
        text=True,
        timeout=patience.scale(100),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rows", [SHORT, *SUITE.values()], ids=["short", *SUITE])
def test_rows_are_commands_that_benchmarks_take(rows):
    for row in rows:
        benchmark = importlib.import_module(f"benchmarks.{row.benchmark}")
        args = benchmark.parser().parse_args([*shlex.split(row.arguments), "--json=here"])
        known = getattr(benchmark, "ARMS", None)
        assert args.json == Path("here")
        assert known is None or set(args.arms) <= set(known)
    command = rows[0].command(4, Path("there"))
    assert "--nproc-per-node=4" in command
    assert command[-1] == f"--json=there/{rows[0].benchmark}.jsonl"


@pytest.mark.parametrize(
    ("world", "shape", "found"),
    [(2, "mixtral", 1), (2, "dsv3", 2), (2, "qwen3", 4), (8, "dsv3", 4)],
)
def test_an_expert_gets_no_token_twice(world, shape, found):
    _, top_k, _, _, local = moe_layer.SHAPES[shape]
    assert moe_layer.skew_of(4, top_k, world * local) == found


@dataclass(frozen=True)
class Python(Row):
    """A row that runs some Python."""

    def command(self, world: int, results: Path) -> list[str]:
        return [sys.executable, "-c", self.arguments.format(world=world, results=results)]


def commands() -> Iterator[str]:
    """Yield the commands of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # The process may have ended since the folder was listed.
        with suppress(OSError):
            yield path.read_bytes().decode(errors="replace")


def test_a_row_that_fails_or_hangs_says_so_and_leaves_nobody(tmp_path):
    good = Python(
        "", "import os; print('{world}', '{results}', os.environ['MORE'])", env={"MORE": "told"}
    )
    assert run(good, 1, 3, tmp_path, tmp_path, 30) == ""
    assert (tmp_path / "01.log").read_text() == f"3 {tmp_path} told\n"
    wrong = run(Python("", "raise SystemExit(3)"), 2, 3, tmp_path, tmp_path, 30)
    assert wrong == f"ended with status 3, see {tmp_path / '02.log'}"

    child = f"import time; time.sleep(600); {str(tmp_path)!r}"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    assert run(Python("", hangs), 3, 3, tmp_path, tmp_path, 0.5).startswith("cut off after 0 s")
    assert not any("sleep(600)" in command and str(tmp_path) in command for command in commands())


def test_what_is_missing_is_counted(tmp_path, monkeypatch, capsys):
    large = Python("of more processes", "pass", least=4)
    rows = [
        Python("good", "pass"),
        large,
        Python("bad", "raise SystemExit(1)"),
        Python("good", "pass"),
    ]
    monkeypatch.setattr(suite, "SHORT", rows)
    monkeypatch.setattr(
        sys, "argv", ["suite", "--nproc=3", f"--logs={tmp_path / 'logs'}", f"--results={tmp_path}"]
    )
    assert suite.main() == 1
    shown = capsys.readouterr().out.splitlines()
    assert [("ok" in line, "status 1" in line) for line in shown] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--minutes=0", "--rows", "0", "2"])
    assert suite.main() == 2
    assert capsys.readouterr().out.count("no time left") == 2


@RARELY
def test_one_rank_of_eight_is_measured_alone(tmp_path):
    result = tmp_path / "result.jsonl"
    arms = ["ovpatch, NCCL", "ovpatch, gradients kept"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.zero_alone",
        "--world=8",
        "--size=tiny",
        "--rounds=1",
        "--steps=2",
    ]
    done = subprocess.run(
        [*command, "--batch=1", "--arms", *arms, "--json", result],
        cwd=suite.ROOT,
        capture_output=True,
        timeout=patience.scale(200),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(result.read_text())
    assert (told["world"], told["failed"]) == (8, {})
    fp32, row = told["rows"]
    counters = row["counters"]
    assert ([fp32["arm"], row["arm"]], len(row["ms"])) == (arms, 2)
    assert fp32["loss"] == row["loss"], "they work on different numbers"
    assert counters["state_bytes"] * 8 == counters["state_bytes_whole"] > 0
    assert min(counters[name] for name in ("grads_sharded", "gathers_overlapped")) > 0


def test_a_row_of_blocks_shows_what_its_runs_have(tmp_path, monkeypatch):
    """The suite's short rows have fewer arms than its long ones."""
    settings = {"size": "8b", "plain": False, "batch": 1}
    run = {
        "settings": settings,
        "world": 4,
        "device": "NVIDIA X100",
        "torch": "2.11",
        "date": "2030-01-01",
    }
    rows = [
        {"arm": "stock", "ms": [3.0, 5.0], "peak_gib": 2.0},
        {"arm": "ovpatch, bulk", "ms": [2.0], "peak_gib": 1.0},
    ]
    runs = [
        {**run, "rows": rows},
        {**run, "rows": rows[:1]},
        {**run, "rows": rows, "torch": "2.12"},
    ]
    (tmp_path / "tp_blocks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    _, _, both, alone, *_ = tables.tp_blocks().splitlines()
    assert both.startswith("| h 4096, 8 layers | 4 X100, 2030-01-01, 2 runs |  | 4.0 |")
    assert both.endswith(" 2.0 |  |  |  |  | 2.00 → 1.00 → ? |")
    assert alone.startswith("| h 4096, 8 layers | 4 X100, 2030-01-01 |")


def test_a_rank_waits_for_messages_on_the_clock_of_their_sender():
    message, answer = (0, 1, 0), (1, 0, 0)
    first = [
        ("step", None, 5.0),
        ("send", message, 7.0),
        ("post", answer, 7.0),
        ("wait for message", answer, 7.5),
    ]
    second = [
        ("step", None, 1.0),
        ("post", message, 2.0),
        ("wait for message", message, 2.0),
        ("send", answer, 5.0),
    ]
    first += [("step", None, 8.5)]
    second += [("wait for receiver", answer, 5.0), ("step", None, 6.0)]
    assert replay([first, second]) == [[0.0, 6.0], [0.0, 6.0]]
    with pytest.raises(RuntimeError, match="no rank sends"):
        replay([first, second[:3]])

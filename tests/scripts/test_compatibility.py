"""docs/compatibility.md has a row for each program that a test runs, made from the record and from nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import compatibility as record
from tests.support import patience

HERE = Path(__file__).parent
REPORT = {
    "state": "applied",
    "reason": "",
    "remarks": [],
    "counters": {"backwards": 4, "stock_models": 0},
}


def declared(text: str) -> list[str]:
    """Return the styles that tests record: what they call the fixture ``compatibility`` with."""
    styles = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and "compatibility" in [
            arg.arg for arg in function.args.args
        ]:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            found = [
                ast.literal_eval(call.args[0])
                for call in calls
                if ast.unparse(call.func) == "compatibility"
            ]
            assert found, f"{function.name} asks for the fixture and records nothing"
            assert ast.unparse(function.body[-1]).startswith("compatibility("), (
                f"{function.name} goes on after its row"
            )
            styles += found
    return styles


def test_the_page_is_up_to_date():
    text = record.PAGE.read_text(encoding="utf-8")
    assert record.fill(text, record.load(record.RECORD)) == text, (
        "run python -m tests.scripts.compatibility"
    )


def test_there_is_a_row_for_every_program_and_no_other():
    styles = [
        style
        for path in HERE.glob("test_*.py")
        for style in declared(path.read_text(encoding="utf-8"))
    ]
    assert len(set(styles)) == len(styles), "two tests record the same style"
    known = {row["style"] for row in record.load(record.RECORD)}
    remedy = "run pytest tests/scripts --compatibility docs/compatibility.json"
    assert set(styles) - known == set(), remedy
    assert known - set(styles) == set(), (
        "no test records these any more: take them out of docs/compatibility.json"
    )


def test_a_program_that_no_test_runs_is_noticed():
    text = "def test_x(compatibility):\n    pass\n    compatibility('a', 1)\ndef test_y(tmp_path):\n    pass\n"
    assert declared(text) == ["a"]
    with pytest.raises(AssertionError, match="test_x asks for the fixture and records nothing"):
        declared("def test_x(compatibility):\n    pass\n")
    with pytest.raises(AssertionError, match="test_x goes on after its row"):
        declared("def test_x(compatibility):\n    compatibility('a', 1)\n    assert 0\n")


@pytest.mark.parametrize(
    ("changes", "counters", "outcome"),
    [
        ({}, {}, "reducer ran"),
        ({}, {"backwards": 0}, "left alone: no model in DistributedDataParallel"),
        ({"remarks": ["why"]}, {"backwards": 0, "stock_models": 1}, "stock reducer: why"),
        ({"remarks": ["why"]}, {"stock_models": 1}, "reducer ran, stock reducer: why"),
        ({"state": "skipped", "reason": "why"}, {}, "left alone: why"),
    ],
)
def test_the_row_says_what_ovpatch_did(changes, counters, outcome):
    feature = {"name": "ddp", **REPORT, **changes, "counters": REPORT["counters"] | counters}
    row = record.row("style", {"features": [feature]}, compared="losses", libraries=["pytest"])
    assert row["ovpatch"] == outcome
    assert row["compared"] == "bitwise: losses"
    assert row["libraries"]["pytest"] == pytest.__version__


def test_a_newer_row_replaces_that_of_the_same_program_and_device():
    def row(style, device, date):
        return {"style": style, "device": device, "date": date}

    rows = record.merge(
        [row("b", "CPU", 1), row("a", "CPU", 1)],
        [row("b", "CPU", 2), row("b", "GPU", 2), row("a", "GPU", 2)],
    )
    assert rows == [row("a", "CPU", 1), row("a", "GPU", 2), row("b", "CPU", 2), row("b", "GPU", 2)]


PROGRAM_TESTS = """
from types import SimpleNamespace
import pytest

patched = SimpleNamespace(report={"features": [%r]})

def test_that_passes(compatibility):
    compatibility("passes", patched, compared="losses")

def test_that_fails(compatibility):
    compatibility("fails", patched, compared="losses")
    assert False

def test_that_is_skipped(compatibility):
    compatibility("is skipped", patched, compared="losses")
    pytest.skip()
"""


def test_only_tests_that_pass_have_rows(tmp_path):
    (tmp_path / "test_rows.py").write_text(PROGRAM_TESTS % {"name": "ddp", **REPORT})
    file = tmp_path / "record.json"
    file.write_text(json.dumps([{"style": "older", "device": "GPU"}]))
    options = ["-p", "tests.scripts.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--compatibility={file}", str(tmp_path)],
        cwd=record.ROOT,
        capture_output=True,
        text=True,
        timeout=patience.scale(60),
    )
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert [row["style"] for row in record.load(file)] == ["older", "passes"]

"""The tool that measures tests, and proposes which run nightly."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.environment import clean
from tools import test_times
from tools.test_times import ROOT


def test_each_fault_keeps_its_two_cheapest_catchers():
    times = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 0.1, "kept/f": 9.0}
    record = {"first": ["a", "b", "c"], "second": ["d", "e", "gone"], "third": ["a", "kept/f"]}
    assert test_times.propose(times, record, 1.0, ["kept/"]) == []
    assert test_times.propose(times, {"first": record["first"]}, 1.0, ["kept/"]) == ["a", "d"]
    assert test_times.propose(times, {"second": ["c", "e", "kept/f"]}, 1.0, ["kept/"]) == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_processor_time_is_measured_and_proposed(tmp_path, capsys):
    (tmp_path / "test_busy.py").write_text("def test_busy():\n    sum(range(10**7))\n")
    path = tmp_path / "times.jsonl"
    # The plugin is the tool itself, with another file of times.
    (tmp_path / "plugin.py").write_text(
        "from pathlib import Path\nfrom tools.test_times import *\nfrom tools import test_times\n"
        f"test_times.TIMES = Path({str(path)!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"]
    env = clean(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(test_times.read_times(path)) == ["test_busy.py::test_busy"]
    test_times.main([str(path), "--at-least", "0"])
    assert "1 of 1 tests" in capsys.readouterr().out


def test_a_missing_file_of_times_is_an_error_with_the_command(tmp_path, capsys):
    with pytest.raises(SystemExit):
        test_times.main([str(tmp_path / "times.jsonl")])
    assert "Measure first: make pytest" in capsys.readouterr().err

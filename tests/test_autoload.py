"""The entry point that torch calls: never an exception, its log name known to torch (off: test_overhead)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from ovpatch import api, autoload, logs
from ovpatch.session import worker_reports
from tests.support import patience
from tests.support.environment import clean, forget

STATE = """
import sys, json, os
import torch
state = {"modules": sorted(name for name in sys.modules if name.split(".")[0] in ("ovpatch", "ovpatch_plugins"))}
import ovpatch
state["before"] = ovpatch.report()["ddp"].state
state["after"] = ovpatch.apply()["ddp"].state
open(sys.argv[1], "w").write(json.dumps(state))
"""


@pytest.fixture
def start(tmp_path):
    def start(**environ):
        out = tmp_path / "state.json"
        done = subprocess.run(
            [sys.executable, "-c", STATE, str(out)],
            env={**clean(os.environ), **environ},
            capture_output=True,
            text=True,
            timeout=patience.scale(120),
            cwd=tmp_path,
        )
        assert done.stdout == ""
        return (json.loads(out.read_text()) if out.exists() else None), done.stderr

    return start


def test_auto_applies_before_the_script_whose_own_call_changes_nothing(start):
    state, stderr = start(OVPATCH_AUTO="1", TORCH_LOGS="+ovpatch")
    assert (state["before"], state["after"]) == ("applied", "applied")
    assert stderr.count("applied ddp") == 1
    assert "ovpatch" in state["modules"]


def test_torch_logs_shows_the_line_of_the_script(start):
    state, stderr = start(TORCH_LOGS="+ovpatch")
    assert state["modules"] == ["ovpatch", "ovpatch._version", "ovpatch.autoload"], (
        "torch looked for submodules"
    )
    assert state["after"] == "applied"
    assert stderr.count("applied ddp") == 1


def test_wrong_settings_break_neither_the_import_nor_the_silence_of_stdout(start, tmp_path):
    state, stderr = start(OVPATCH_AUTO="1", OVPATCH="dpp", OVPATCH_REPORT_DIR=str(tmp_path))
    assert state is None, "the script's own apply() raises, as it should"
    auto, _, script = stderr.partition("Traceback")
    assert "runs WITHOUT ovpatch" in auto
    assert auto.count("did you mean 'ddp'") == 1
    assert "SettingsError" in script
    (found,) = worker_reports.read_reports(tmp_path, "failed")
    assert "did you mean 'ddp'" in found["error"]


@pytest.fixture
def calls(monkeypatch):
    calls = []
    forget(monkeypatch)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(api, "apply", lambda: calls.append("apply"))
    return calls


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", 0), ("0", 0), ("off", 0), (" No ", 0), ("1", 1), ("on", 1), ("YES", 1), ("true", 1)],
)
def test_when_it_applies(calls, monkeypatch, value, expected):
    monkeypatch.setenv("OVPATCH_AUTO", value)
    autoload.on_torch_import()
    assert len(calls) == expected


def test_launchers_are_left_alone(calls, monkeypatch):
    monkeypatch.setenv("OVPATCH_AUTO", "1")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "torch.distributed.run", "train.py"])
    autoload.on_torch_import()
    assert calls == []


def test_a_value_that_says_nothing_is_complained_about(calls, monkeypatch, caplog):
    monkeypatch.setenv("OVPATCH_AUTO", "2")
    autoload.on_torch_import()
    assert calls == []
    assert "OVPATCH_AUTO=2 is neither on nor off" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("boom"), ImportError("gone"), AssertionError()])
def test_it_never_raises(calls, monkeypatch, caplog, error, tmp_path):
    def fail():
        raise error

    monkeypatch.setattr(api, "apply", fail)
    monkeypatch.setenv("OVPATCH_AUTO", "1")
    monkeypatch.setenv("OVPATCH_REPORT_DIR", str(tmp_path))
    autoload.on_torch_import()
    assert repr(error).partition("(")[0] in caplog.text or str(error) in caplog.text
    assert len(worker_reports.read_reports(tmp_path, "failed")) == 1


def test_it_never_raises_even_if_complaining_fails(calls, monkeypatch):
    monkeypatch.setattr(logs, "log_visibly", lambda message: 1 / 0)
    monkeypatch.setenv("OVPATCH_AUTO", "2")
    autoload.on_torch_import()


def test_a_torch_without_the_private_function_only_loses_the_log_name(calls, monkeypatch, caplog):
    import torch._logging._internal as internal

    monkeypatch.delattr(internal, "register_log")
    monkeypatch.setenv("TORCH_LOGS", "+ovpatch")
    autoload.on_torch_import()
    assert "Use OVPATCH_LOG=debug instead" in caplog.text


def test_a_complaint_reaches_stderr_when_nobody_listens(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("RANK", "3")
    before = list(logs.logger.handlers)
    logs.log_visibly("something")
    assert capsys.readouterr() == ("", "[ovpatch rank 3] ERROR: something\n")
    assert logs.logger.handlers == before


def test_ovpatch_log_listens_once(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(logs.logger, "handlers", list(logs.logger.handlers))
    level = logs.logger.level
    try:
        logs.log_to_stderr("info")
        logs.log_to_stderr("info")
        logs.logger.info("hello")
        logs.logger.debug("not this")
    finally:
        logs.logger.setLevel(level)
    assert capsys.readouterr() == ("", "[ovpatch] INFO: hello\n")

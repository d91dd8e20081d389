"""The loop over random programs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tools import random_runs
from tools.random_runs import Kind


def run_one(monkeypatch: pytest.MonkeyPatch, outcome: str) -> int:
    monkeypatch.setattr("sys.argv", ["random_runs", "--seconds", "0"])
    monkeypatch.setattr(random_runs, "Pool", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(random_runs, "run_seed", lambda *_: (outcome, "TypeError: x"))
    kind = Kind("program", lambda seed: None, lambda _: "any", lambda _: None, lambda _: ("", 1))
    return random_runs.main(kind)


def test_programs_that_all_fail_in_stock_pytorch_fail_the_run(monkeypatch, capsys):
    assert run_one(monkeypatch, "stock raises") == 1
    assert "1 of 1 fail in stock PyTorch" in capsys.readouterr().out
    assert run_one(monkeypatch, "equal") == 0
    assert run_one(monkeypatch, "failed") == 1

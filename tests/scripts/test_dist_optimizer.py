"""Whole programs with feature ``dist_optimizer`` on: they compute and save what stock computes and saves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.arms import PROGRAMS, WORLD, Arm, assert_applied, assert_same, needs
from tests.support import scripts
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = pytest.mark.slow

# Only programs that run rarely need them.
PRELOADED = ("transformers.trainer", "accelerate", "peft") if os.environ.get("ALL_CASES") else ()

# The programs' models are small; all but the smallest parameters are to be cut.
ON = {"OVPATCH": "+dist_optimizer", "OVPATCH_DIST_OPTIMIZER_MIN_PARAM_NUMEL": "16"}

BITWISE = {"dcgan": {}, "wgan_gp": {"marks": RARELY}}

# They clip, and a norm that is summed from parts differs in its last bit.
CLIPPING = {
    "nano": {"marks": RARELY},
    "accelerated": {"marks": [needs("accelerate"), RARELY]},
    "lora": {"marks": [needs("transformers", "peft"), RARELY]},
    "lightning_fit": {"marks": [needs("lightning"), RARELY]},
    "hf_trainer": {"marks": [needs("transformers"), RARELY]},
}

# They clip, and have parameters without a true gradient, in which Adam makes much of that bit.
SENSITIVE = {"classifier": {"marks": RARELY}}


def cases(programs: dict[str, dict[str, Any]]) -> list[Any]:
    return [pytest.param(name, **more) for name, more in programs.items()]


def both(runner: Any, name: str) -> tuple[Arm, Arm]:
    stock, patched = runner.both(name, env=ON)
    assert_applied(patched.report)
    parts = next(one for one in patched.report["features"] if one["name"] == "dist_optimizer")
    workers = [process for process in parts["processes"] if process["counters"]["steps"]]
    assert (parts["state"], len(workers)) == ("applied", WORLD), parts
    assert parts["counters"]["stock_optimizers"] == 0, parts["remarks"]
    return stock, patched


@pytest.mark.parametrize("name", cases(BITWISE))
def test_bitwise(runner, name):
    assert_same(*both(runner, name))


def test_what_a_script_shards_itself_stays_stock(runner):
    stock, patched = runner.both("zero", env=ON)
    assert_applied(patched.report)
    assert_same(stock, patched)
    (parts,) = (one for one in patched.report["features"] if one["name"] == "dist_optimizer")
    assert (parts["counters"]["optimizers"], parts["counters"]["steps"]) == (0, 0)
    assert any(
        "inside a ZeroRedundancyOptimizer, which shards the work" in remark
        for remark in parts["remarks"]
    )


@pytest.mark.parametrize("name", cases(CLIPPING))
def test_within_the_last_bits_of_a_norm(runner, name):
    stock, patched = both(runner, name)
    logs = [
        [{k: v for k, v in rank.items() if k != "parameters"} for rank in arm.ranks]
        for arm in (stock, patched)
    ]
    close(*logs)
    close(stock.checkpoints, patched.checkpoints)


def close(stock: Any, patched: Any) -> None:
    """All is there under the same names, of the same kind, and equal but for rounding."""
    far = [
        row
        for row in compare(stock, patched).worst(1000)
        if row.max_abs_diff is None or row.max_abs_diff > 1e-5
    ]
    assert not far, far[:5]


@pytest.mark.parametrize("name", cases(SENSITIVE))
def test_verified(tmp_path, name):
    outcome, bin = tmp_path / "outcome.json", Path(sys.executable).parent
    verify = [
        bin / "ovpatch",
        "verify",
        "--features=+dist_optimizer",
        "--steps=4",
        f"--json={outcome}",
    ]
    script = [bin / "torchrun", "--nproc-per-node=2", PROGRAMS / f"{name}.py", tmp_path / "out"]
    done = scripts.run(
        [str(word) for word in (*verify, "--", *script)], env=ON | {"OVPATCH": None}, timeout=280
    )
    found = json.loads(outcome.read_text())
    assert found["verdict"] in ("bitwise equal", "equal within noise"), done.stdout
    assert found["counters"]["dist_optimizer"]["steps"] >= 2 * 4
    assert found["counters"]["dist_optimizer"]["grads_sharded"] > 0

"""The example of pipeline, data and tensor parallelism in one job: stock's bits on 2 x 2 x 2 ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.examples.probe import assert_same_training, train_both
from tests.support import scripts
from tests.support.preloaded import preloaded
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "three_d.py"
STEPS, MICROBATCHES = 2, 3
SMALL = [
    f"--steps={STEPS}",
    f"--microbatches={MICROBATCHES}",
    "--layers=2",
    "--width=16",
    "--context=8",
    "--rows=1",
]

pytestmark = pytest.mark.slow


def test_three_dimensions_train_to_stocks_bits(tmp_path, forks):
    env = {"OVPATCH": "pipeline", "OVPATCH_PIPELINE_SCHEDULE": "zb-h1"}
    stock, patched, counters = train_both(forks, tmp_path, 8, [str(SCRIPT), *SMALL], env)
    assert_same_training(stock, patched, ranks=8, steps=STEPS, loss=r"loss (\S+),")
    pipeline = counters["pipeline"]
    assert (pipeline["schedules"], pipeline["steps"], pipeline["stock_steps"]) == (8, 8 * STEPS, 0)
    assert pipeline["messages"] == 8 * MICROBATCHES * STEPS
    # Six linears of the block of each stage, and the head of the last one; not in the first microbatch.
    assert pipeline["weight_grads"] == (8 * 6 + 4) * (MICROBATCHES * STEPS - 1)


@RARELY
def test_verify_passes(tmp_path):
    file = tmp_path / "verify.json"
    options = ["--features=pipeline", "--steps=2", "--json", str(file)]
    verify = [sys.executable, "-m", "ovpatch", "verify", *options, "--"]
    command = [*preloaded(ranks=8), str(SCRIPT), *SMALL]
    scripts.run(
        [*verify, *command], env={"OVPATCH_PIPELINE_SCHEDULE": "zb-h1"}, timeout=400
    ).check()
    assert json.loads(file.read_text())["verdict"] == "bitwise equal"

"""The example on Megatron-Core: stock's bits on two stages of two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.probe import assert_same_training, train_both
from tests.scripts.arms import needs
from tests.support import scripts
from tests.support.preloaded import Server
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_megatron.py"
STEPS, MICROBATCHES = 3, 3
SMALL = ["--layers=2", "--width=32", "--context=16", "--batch-size=2", "--device=cpu"]
LINE = [str(SCRIPT), *SMALL, f"--steps={STEPS}", f"--microbatches={MICROBATCHES}"]
HEAVY = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
)
SCHEDULE = {"OVPATCH_MEGATRON_PIPELINE_SCHEDULE": "zb-h1"}

pytestmark = [pytest.mark.slow, needs("megatron")]


@pytest.fixture(scope="module")
def forks():
    """A server that has imported Megatron, which four ranks would each take seconds for."""
    server = Server(*HEAVY)
    yield server
    server.close()


def check_counters(counters: dict[str, Any]) -> None:
    delayed = STEPS - 1  # a weight's first step is Megatron's
    assert counters["calls"]
    assert counters["stock_calls"] == 0
    assert counters["models"] == 4
    assert counters["pipeline_steps"] == 4 * STEPS, "of both stages' two ranks"
    assert counters["weight_grads"] == 2 * (4 + 1) * MICROBATCHES * delayed, (
        "linears of a layer, and the output layer"
    )
    assert counters["early_sends"] == 2 * (MICROBATCHES - 1) * delayed, "one backward is behind"


def test_it_trains_to_stocks_bits(tmp_path, forks):
    stock, patched, counters = train_both(
        forks, tmp_path, 4, LINE, {"OVPATCH": "megatron", **SCHEDULE}
    )
    assert_same_training(stock, patched, ranks=4, steps=STEPS, loss=r"loss (\S+)")
    check_counters(counters["megatron"])


@RARELY
def test_verify_finds_stocks_bits(tmp_path, forks):
    file = tmp_path / "verify.json"
    options = ["--features=megatron", f"--steps={STEPS}", "--json", str(file)]
    verify = [sys.executable, "-m", "ovpatch", "verify", *options, "--"]
    scripts.run([*verify, *forks.command(4), *LINE], env=SCHEDULE, timeout=400).check()
    found = json.loads(file.read_text())
    assert found["verdict"] == "bitwise equal", found
    check_counters(found["counters"]["megatron"])

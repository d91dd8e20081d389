"""The example of data and tensor parallelism over a mesh, with all that overlaps there turned on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.preloaded import preloaded
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_2d.py"
SMALL = ["--layers=1", "--width=64", "--context=32", "--batch-size=2", "--device=cpu"]
FEATURES = "ddp,dist_optimizer,tp_linear"
DIVIDED = {"OVPATCH_DIST_OPTIMIZER_MIN_PARAM_NUMEL": "64"}  # all but norms are cut
STEP = re.compile(r"step +(\d+)  loss (\S+)")

pytestmark = pytest.mark.slow


def losses(result: scripts.Result) -> list[float]:
    return [float(loss) for _, loss in STEP.findall(result.check().stdout)]


def test_all_features_train_the_same(tmp_path, forks):
    args, report = [*SMALL, "--steps=3", "--accumulate=2"], tmp_path / "report.json"
    stock = losses(forks.torchrun(4, SCRIPT, *args, env={"OVPATCH": "0"}, timeout=240))
    patched = losses(
        forks.torchrun(
            4, SCRIPT, *args, env={"OVPATCH": FEATURES, **DIVIDED}, report=report, timeout=240
        )
    )
    assert len(stock) == 3
    assert patched == pytest.approx(stock, abs=2e-4)
    features = {feature["name"]: feature for feature in json.loads(report.read_text())["features"]}
    ddp, optimizer, linears = (features[name]["counters"] for name in FEATURES.split(","))
    assert (ddp["models"], ddp["stock_models"], ddp["backwards"]) == (4, 0, 4 * 3)  # of four ranks
    assert optimizer["steps"] == 4 * 3
    assert optimizer["grads_sharded"] > 0
    assert optimizer["gathers_overlapped"] == optimizer["gathers"] > 0
    assert (linears["linears"], linears["calls"], linears["stock_calls"]) == (4 * 8, 4 * 8 * 6, 0)
    assert linears["shared_calls"] == 4 * 5 * 6


@RARELY
def test_verify_passes(tmp_path):
    file = tmp_path / "verify.json"
    options = [f"--features={FEATURES}", "--steps=3", "--json", str(file)]
    verify = [sys.executable, "-m", "ovpatch", "verify", *options, "--"]
    command = [*preloaded(ranks=4), str(SCRIPT), *SMALL, "--steps=4"]
    scripts.run([*verify, *command], env=DIVIDED, timeout=400).check()
    found = json.loads(file.read_text())
    assert found["verdict"] == "equal within noise", found
    assert found["noise"]["rerun"] == "all bits equal"

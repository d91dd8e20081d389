"""The example of tensor parallelism: ``verify`` passes on it, and either arm goes on from the other's checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.preloaded import preloaded
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_tp.py"
SMALL = ["--layers=2", "--width=64", "--context=32", "--batch-size=2", "--device=cpu"]
STEP = re.compile(r"step +(\d+)  loss (\S+)  norm (\S+)")

pytestmark = pytest.mark.slow


def train(torchrun, *args, features, **how):
    done = torchrun(2, SCRIPT, *SMALL, *args, env={"OVPATCH": features}, timeout=240, **how).check()
    return [(int(step), float(loss), float(norm)) for step, loss, norm in STEP.findall(done.stdout)]


@RARELY
def test_verify_passes(tmp_path):
    file = tmp_path / "verify.json"
    options = ["--features=tp_linear", "--steps=3", "--json", str(file)]
    verify = [sys.executable, "-m", "ovpatch", "verify", *options, "--"]
    scripts.run(
        [*verify, *preloaded(ranks=2), str(SCRIPT), *SMALL, "--steps=4"], timeout=400
    ).check()
    found = json.loads(file.read_text())
    assert found["verdict"] == "equal within noise", found
    assert found["noise"]["rerun"] == "all bits equal"
    assert "values moved" in found["noise"]["reordered"]


@RARELY
def test_each_goes_on_from_the_checkpoint_of_the_other(tmp_path, forks):
    saved, copied = tmp_path / "saved", tmp_path / "copied"
    first = train(scripts.torchrun, f"--checkpoint={saved}", "--steps=2", features="+tp_linear")
    shutil.copytree(saved, copied)
    stock = train(forks.torchrun, f"--checkpoint={saved}", "--steps=4", features="0")
    patched = train(forks.torchrun, f"--checkpoint={copied}", "--steps=4", features="+tp_linear")
    assert [step for step, *_ in first + stock] == [0, 1, 2, 3]
    assert [step for step, *_ in patched] == [2, 3]
    for ours, theirs in zip(patched, stock, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)

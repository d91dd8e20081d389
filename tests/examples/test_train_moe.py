"""The example of expert parallelism: ``verify`` passes on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scripts.arms import needs
from tests.support import scripts
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=2", "--steps=2"]
HEAVY = "transformers,transformers.models.qwen3_moe.modeling_qwen3_moe,torch.distributed.fsdp"

pytestmark = [pytest.mark.slow, needs("transformers")]


def verified(tmp_path, *arguments):
    file = tmp_path / "verify.json"
    torchrun = [sys.executable, str(scripts.FORKING), "2"]
    verify = [sys.executable, "-m", "ovpatch", "verify", "--features=pipe_experts", "--steps=2", "--json", str(file)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(scripts.free_port()), "PRELOAD": HEAVY}
    scripts.run([*verify, "--", *torchrun, str(SCRIPT), *SMALL, *arguments], env=where, timeout=400).check()
    return json.loads(file.read_text())


def test_verify_passes(tmp_path):
    found = verified(tmp_path)
    assert found["verdict"] == "equal within noise", found
    assert found["noise"]["rerun"] == "all bits equal"


@RARELY
def test_verify_passes_in_half_precision(tmp_path):
    found = verified(tmp_path, "--dtype=bfloat16", "--layers=3", "--width=64", "--context=64", "--batch-size=8")
    assert found["verdict"] == "equal within noise", found

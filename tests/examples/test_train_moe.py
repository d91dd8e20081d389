"""The example of expert parallelism: it trains the same stock and patched, and ``verify`` passes on it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.scripts.arms import needs, together
from tests.support import scripts
from tests.support.preloaded import Server
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=2"]
STEP = re.compile(r"step +(\d+)  loss (\S+)")
HEAVY = (
    "transformers",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torch.distributed.fsdp",
)

pytestmark = [pytest.mark.slow, needs("transformers")]


@pytest.fixture(scope="module")
def forks():
    """A server that has imported what the example imports."""
    server = Server(*HEAVY)
    yield server
    server.close()


def test_it_trains_the_same(tmp_path, forks):
    file = tmp_path / "report.json"

    def train(features, report=None):
        how = {"env": {"OVPATCH": features}, "report": report, "timeout": 240}
        done = forks.torchrun(2, SCRIPT, *SMALL, "--steps=11", **how).check()
        return [(int(step), float(loss)) for step, loss in STEP.findall(done.stdout)]

    stock, patched = together(lambda: train("0"), lambda: train("pipe_experts", file))
    assert [step for step, _ in stock] == [step for step, _ in patched] == [0, 10]
    assert stock[1][1] < stock[0][1], "it trains"
    for (_, ours), (_, theirs) in zip(patched, stock, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)
    (experts,) = (
        one for one in json.loads(file.read_text())["features"] if one["name"] == "pipe_experts"
    )
    calls = [
        process["counters"]["calls"]
        for process in experts["processes"]
        if any(process["counters"].values())
    ]
    assert len(calls) == 2
    assert min(calls) >= 11


def verified(tmp_path, forks, *arguments):
    file = tmp_path / "verify.json"
    verify = [
        sys.executable,
        "-m",
        "ovpatch",
        "verify",
        "--features=pipe_experts",
        "--steps=2",
        "--json",
        str(file),
    ]
    command = [*verify, "--", *forks.command(2), str(SCRIPT), *SMALL, "--steps=2", *arguments]
    scripts.run(command, timeout=400).check()
    return json.loads(file.read_text())


@RARELY
def test_verify_passes(tmp_path, forks):
    found = verified(tmp_path, forks)
    assert found["verdict"] == "equal within noise", found
    assert found["noise"]["rerun"] == "all bits equal"


@RARELY
def test_verify_passes_in_half_precision(tmp_path, forks):
    found = verified(
        tmp_path,
        forks,
        "--dtype=bfloat16",
        "--layers=3",
        "--width=64",
        "--context=64",
        "--batch-size=8",
    )
    assert found["verdict"] == "equal within noise", found

"""The example of pipeline, data and tensor parallelism in one job: stock's bits on 2 x 2 x 2 ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.forked import Server
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "three_d.py"
STEPS, MICROBATCHES = 3, 4
SMALL = [f"--steps={STEPS}", f"--microbatches={MICROBATCHES}", "--layers=2", "--width=16", "--context=8", "--rows=1"]
HEAVY = "torch.distributed.tensor.parallel,torch.distributed.fsdp,torch.distributed.pipelining"

# Runs the example, and writes a digest of this rank's shards behind each optimizer step.
PROBE = """
import hashlib, os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

folder, *sys.argv = sys.argv[1:]

def note(optimizer, args, kwargs):
    digest = hashlib.sha256()
    for param in optimizer.param_groups[0]["params"]:
        digest.update(param.detach().to_local().contiguous().numpy().tobytes())
    with open(os.path.join(folder, os.environ["RANK"]), "a") as file:
        print(digest.hexdigest(), file=file)

register_optimizer_step_post_hook(note)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = pytest.mark.slow


def _read(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().split() for path in folder.iterdir()}


@pytest.fixture
def forks():
    """A server that has imported what the example imports, which eight ranks would each take seconds for."""
    server = Server(*HEAVY.split(","))
    yield server
    server.close()


def test_three_dimensions_train_to_stocks_bits(tmp_path, forks):
    probe, report = tmp_path / "probe.py", tmp_path / "report.json"
    probe.write_text(PROBE)
    folders = [tmp_path / "stock", tmp_path / "patched"]
    for folder in folders:
        folder.mkdir()
    arguments = [[str(folder), str(SCRIPT), *SMALL] for folder in folders]
    stock = forks.torchrun(8, probe, *arguments[0], env={"OVPATCH": "0"}, timeout=240).check()
    env = {"OVPATCH": "pipeline", "OVPATCH_PIPELINE_SCHEDULE": "zb-h1", "PRELOAD": HEAVY}
    how = {"env": env, "forked": True, "timeout": 240}
    patched = scripts.torchrun(8, probe, *arguments[1], ovpatch=["--report", str(report)], **how).check()
    found = _read(folders[0])
    assert sorted(found) == [str(rank) for rank in range(8)]
    assert all(len(set(digests)) == STEPS for digests in found.values())
    assert _read(folders[1]) == found
    losses = [re.findall(r"loss (\S+),", result.stdout) for result in (stock, patched)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    features = {feature["name"]: feature for feature in json.loads(report.read_text())["features"]}
    counters = features["pipeline"]["counters"]
    assert (counters["schedules"], counters["steps"], counters["stock_steps"]) == (8, 8 * STEPS, 0)
    assert counters["messages"] == 8 * MICROBATCHES * STEPS
    # Six linears of the block of each stage, and the head of the last one.
    assert counters["weight_grads"] == (8 * 6 + 4) * MICROBATCHES * STEPS


@RARELY
def test_verify_passes(tmp_path):
    file = tmp_path / "verify.json"
    options = ["--features=pipeline", "--steps=2", "--json", str(file)]
    verify = [sys.executable, "-m", "ovpatch", "verify", *options, "--"]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(scripts.free_port()), "PRELOAD": HEAVY}
    where["OVPATCH_PIPELINE_SCHEDULE"] = "zb-h1"
    command = [sys.executable, str(scripts.FORKING), "8", str(SCRIPT), *SMALL]
    scripts.run([*verify, *command], env=where, timeout=400).check()
    assert json.loads(file.read_text())["verdict"] == "bitwise equal"

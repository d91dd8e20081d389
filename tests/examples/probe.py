"""Runs an example stock and patched, and notes what its parameters are behind each optimizer step."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.preloaded import Server
from tests.support.scripts import Result

# Runs a program, and writes a digest of this rank's parameters, or of its shards, behind each optimizer step.
PROBE = """
import hashlib, os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

folder, *sys.argv = sys.argv[1:]

def note(optimizer, args, kwargs):
    digest = hashlib.sha256()
    for param in optimizer.param_groups[0]["params"]:
        own = param.detach()
        digest.update((own.to_local() if hasattr(own, "to_local") else own).contiguous().numpy().tobytes())
    with open(os.path.join(folder, os.environ["RANK"]), "a") as file:
        print(digest.hexdigest(), file=file)

register_optimizer_step_post_hook(note)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Trained(NamedTuple):
    """What a run has left: its streams, and by rank the digests of the parameters behind each step."""

    result: Result
    digests: dict[str, list[str]]


def train_both(
    server: Server, folder: Path, ranks: int, line: Sequence[str], env: dict[str, str]
) -> tuple[Trained, Trained, dict[str, Any]]:
    """Return the stock run, the patched one, and the counters of each feature in the patched one.

    Args:
        server: Forks the ranks.
        folder: For files.
        ranks: Their number.
        line: The program and its arguments.
        env: The environment of the patched run.
    """
    probe, report = folder / "probe.py", folder / "report.json"
    probe.write_text(PROBE)

    def train(name: str, **how: Any) -> Trained:
        to = folder / name
        to.mkdir()
        result = server.torchrun(ranks, probe, str(to), *line, timeout=240, **how).check()
        return Trained(result, {path.name: path.read_text().split() for path in to.iterdir()})

    stock, patched = train("stock", env={"OVPATCH": "0"}), train("patched", env=env, report=report)
    features = json.loads(report.read_text())["features"]
    return stock, patched, {feature["name"]: feature["counters"] for feature in features}


def assert_same_training(
    stock: Trained, patched: Trained, *, ranks: int, steps: int, loss: str
) -> None:
    """Demand the same parameters behind each step on all ranks, which each step changes, and the same losses.

    Args:
        stock: The stock run.
        patched: The patched run.
        ranks: Their number of ranks.
        steps: Their number of steps.
        loss: A pattern whose group is the loss of a step.
    """
    assert sorted(stock.digests) == [str(rank) for rank in range(ranks)]
    assert all(len(set(digests)) == steps for digests in stock.digests.values())
    assert patched.digests == stock.digests
    losses = [re.findall(loss, run.result.stdout) for run in (stock, patched)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == steps

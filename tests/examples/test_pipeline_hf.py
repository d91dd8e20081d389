"""The example of a pipeline of a model of transformers: all of its loops compute what the whole model computes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.scripts.arms import needs, together
from tests.support import scripts
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline_hf.py"
SMALL = ["--width=32", "--context=16", "--steps=4"]
STEP = re.compile(r"step +(\d+)  loss (\S+)")
HEAVY = "transformers,transformers.models.llama.modeling_llama,torch.distributed.pipelining"

pytestmark = [pytest.mark.slow, needs("transformers")]


def whole(*arguments: str) -> list[tuple[str, str]]:
    done = scripts.run([sys.executable, str(SCRIPT), *SMALL, "--loop=whole", *arguments], timeout=200).check()
    return STEP.findall(done.stdout)


def cut(*arguments: str, ranks: int = 2, **how: object) -> list[tuple[str, str]]:
    env = {"PRELOAD": HEAVY}
    done = scripts.torchrun(ranks, SCRIPT, *SMALL, *arguments, env=env, forked=True, timeout=240, **how).check()
    return STEP.findall(done.stdout)


def test_losses_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """In a plain loop, and with optimizer and scheduler prepared by accelerate."""
    file = tmp_path / "report.json"
    expected, plain = together(whole, lambda: cut(ovpatch=["--features=pipeline,ddp", "--report", str(file)]))
    assert [int(step) for step, _ in expected] == [0, 1, 2, 3]
    assert float(expected[3][1]) < float(expected[0][1]), "it trains"
    assert plain == expected
    (pipeline,) = (one for one in json.loads(file.read_text())["features"] if one["name"] == "pipeline")
    steps = [process["counters"]["steps"] for process in pipeline["processes"] if any(process["counters"].values())]
    assert steps == [4, 4]
    pytest.importorskip("accelerate")
    assert cut("--loop=accelerate", "--placement=vee") == expected


@RARELY
def test_two_replicas_of_a_pipeline() -> None:
    """Losses are one replica's: the first step's are the whole model's, and later ones fall."""
    found, expected = cut("--pipeline=2", ranks=4), whole()
    assert found[0] == expected[0]
    assert float(found[3][1]) < float(found[0][1])

"""The example of a pipeline of a model of transformers: all of its loops compute what the whole model computes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scripts.arms import needs, together
from tests.support.preloaded import Server
from tests.support.rarely import RARELY

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline_hf.py"
SMALL = ["--width=32", "--context=16", "--steps=4"]
STEP = re.compile(r"step +(\d+)  loss (\S+)")
HEAVY = ("transformers", "transformers.models.llama.modeling_llama", "torch.distributed.pipelining")

pytestmark = [pytest.mark.slow, needs("transformers")]


Run = Callable[..., list[tuple[str, str]]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs the example on forks of a process that has imported what it imports."""
    server = Server(*HEAVY)

    def run(*arguments: str, ranks: int = 2, report: Path | None = None) -> list[tuple[str, str]]:
        done = server.torchrun(
            ranks, SCRIPT, *SMALL, *arguments, report=report, timeout=240
        ).check()
        return STEP.findall(done.stdout)

    yield run
    server.close()


def test_losses_are_those_of_the_whole_model(tmp_path: Path, run: Run) -> None:
    """In a plain loop, and with optimizer and scheduler prepared by accelerate."""
    file = tmp_path / "report.json"
    expected, plain = together(lambda: run("--loop=whole", ranks=1), lambda: run(report=file))
    assert [int(step) for step, _ in expected] == [0, 1, 2, 3]
    assert float(expected[3][1]) < float(expected[0][1]), "it trains"
    assert plain == expected
    (pipeline,) = (
        one for one in json.loads(file.read_text())["features"] if one["name"] == "pipeline"
    )
    steps = [
        process["counters"]["steps"]
        for process in pipeline["processes"]
        if any(process["counters"].values())
    ]
    assert steps == [4, 4]
    pytest.importorskip("accelerate")
    assert run("--loop=accelerate", "--placement=vee") == expected


@RARELY
def test_two_replicas_of_a_pipeline(run: Run) -> None:
    """Losses are one replica's: the first step's are the whole model's, and later ones fall."""
    found, expected = run("--pipeline=2", ranks=4), run("--loop=whole", ranks=1)
    assert found[0] == expected[0]
    assert float(found[3][1]) < float(found[0][1])

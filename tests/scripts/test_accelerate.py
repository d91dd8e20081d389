"""accelerate, where it is installed: its launcher and its wrapper around DistributedDataParallel."""

from __future__ import annotations

import pytest

from tests.scripts.arms import PROGRAMS, WORLD, Runner, assert_applied, assert_same, together
from tests.support import scripts

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def test_accelerate_launch(tmp_path):
    runner = Runner(tmp_path)

    def start(patched, to):
        launch = ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={WORLD}", "--num_machines=1"]
        launch += ["--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={scripts.free_port()}"]
        return runner.python([*launch, str(PROGRAMS / "accelerated.py"), str(tmp_path / to)], patched=patched, to=to)

    stock, patched = together(lambda: start(False, "stock"), lambda: start(True, "patched"))
    assert len(stock.ranks[0]["losses"]) == 4
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=2)

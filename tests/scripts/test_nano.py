"""The style of nanoGPT: a model compiled inside or outside of the wrapper, and resumed before the wrapper exists."""

from __future__ import annotations

import pytest

from tests.scripts.arms import assert_applied, assert_same, crosswise
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = pytest.mark.slow

# Dynamo and AOTAutograd do here what they do under Inductor, whose code would take longer to build than all the rest.
BACKEND = "aot_eager"
PREFIX = "_orig_mod."


@pytest.fixture(scope="module")
def compiled(runner):
    return runner.both("nano", f"--compile_model={BACKEND}", to="compiled", launcher=[])


def assert_same_training(stock, patched):
    assert [len(rank["losses"]) for rank in stock.ranks] == [4, 4]
    assert [len(rank["eval"]) for rank in stock.ranks] == [2, 0], "rank 0 evaluates alone"
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=4)


@RARELY
def test_compiled_inside_of_the_wrapper(compiled, compatibility):
    stock, patched = compiled
    assert all(rank["graphs"] > 0 for rank in stock.ranks)
    assert all(name.startswith(PREFIX) for name in stock.checkpoints["ckpt2"]["model"])
    assert_same_training(stock, patched)
    compatibility(
        "nanoGPT, torch.compile inside the wrapper",
        patched,
        compared="losses, norms, graphs, checkpoints",
    )


@RARELY
def test_compiled_outside_of_the_wrapper(runner, compatibility):
    stock, patched = runner.both("nano", f"--compile_wrapper={BACKEND}", to="outside")
    assert all(rank["graphs"] > 0 for rank in stock.ranks)
    assert_same_training(stock, patched)
    compatibility(
        "nanoGPT, torch.compile around the wrapper",
        patched,
        compared="losses, norms, graphs, checkpoints",
    )


@RARELY
def test_checkpoints_resume_the_other_way_round(runner, compiled, compatibility):
    stock, patched = compiled

    def resume(arm, **options):
        file = f"--resume_file={arm.out / 'ckpt2.pt'}"
        return runner.torchrun("nano.py", "--init_from=resume", file, "--max_iters=6", **options)

    of_patched, of_stock = crosswise(resume, stock, patched)
    assert [rank["first"] for rank in of_patched.ranks] == [2, 2]
    assert list(of_patched.checkpoints) == ["ckpt2", "ckpt4"]
    saved = {
        name.removeprefix(PREFIX): value
        for name, value in stock.checkpoints["ckpt2"]["model"].items()
    }
    compare(saved, of_patched.checkpoints["ckpt2"]["model"]).assert_bitwise()
    assert_same_training(of_patched, of_stock)
    compatibility(
        "nanoGPT, resumed",
        of_stock,
        compared="losses, norms, checkpoints, each resumed from the other's",
    )

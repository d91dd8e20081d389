"""accelerate, where it is installed: its launcher and its wrapper around DistributedDataParallel."""

from __future__ import annotations

import pytest

from tests.scripts.arms import (
    PROGRAMS,
    WORLD,
    assert_applied,
    assert_same,
    crosswise,
    feature,
    needs,
    saved_folders,
    together,
)
from tests.support.environment import free_port
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = [pytest.mark.slow, needs("accelerate")]

LIBRARIES = ("accelerate",)
PRELOADED = LIBRARIES


def launch(runner, name, *args, patched, to, dynamo="no", by_accelerate=False):
    if not (
        patched and by_accelerate
    ):  # what accelerate's launcher says to the ranks, which it starts by torchrun
        said = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": dynamo.upper()}
        return runner.torchrun(name, *args, patched=patched, to=to, env=said)
    head = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        f"--num_processes={WORLD}",
        "--num_machines=1",
    ]
    head += [
        "--mixed_precision=no",
        f"--dynamo_backend={dynamo}",
        f"--main_process_port={free_port()}",
    ]
    return runner.python(
        [*head, str(PROGRAMS / name), str(runner.folder / to), *args], patched=True, to=to
    )


def both(runner, name, *args, to, **kwargs):
    stock, patched = together(
        lambda: launch(runner, name, *args, patched=False, to=f"{to}-stock", **kwargs),
        lambda: launch(runner, name, *args, patched=True, to=f"{to}-patched", **kwargs),
    )
    assert_same(stock, patched)
    return stock, patched


def states(arm):
    return saved_folders(arm, "state*", ".bin")


def assert_same_states(stock, patched):
    assert list(states(stock)) == list(states(patched)) == ["state1", "state2"]
    compare(states(stock), states(patched)).assert_bitwise()


@pytest.fixture(scope="module")
def accumulated(runner):
    return both(runner, "accelerated.py", to="accumulated", by_accelerate=True)


@RARELY
def test_launch_and_accumulate(accumulated, compatibility):
    stock, patched = accumulated
    assert [len(stock.ranks[0][name]) for name in ("losses", "norms")] == [8, 4]
    assert_same_states(stock, patched)
    assert_applied(patched.report, models=1, backwards=4)
    compatibility(
        "accelerate launch: prepare, accumulate, clipping, scheduler, save_state",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, parameters, saved states",
    )


@RARELY
def test_load_state_resumes_the_other_ways_state(runner, accumulated, compatibility):
    whole_stock, whole_patched = accumulated

    def resume(whole, **options):
        return launch(runner, "accelerated.py", f"--resume={whole.out}/state1", **options)

    stock, patched = crosswise(resume, whole_stock, whole_patched)
    assert_same(stock, patched)
    for one, whole in zip(stock.ranks, whole_stock.ranks, strict=True):
        assert one["losses"] == whole["losses"][4:]
        assert one["norms"] == whole["norms"][2:]
        assert one["parameters"] == whole["parameters"]
    for arm in (stock, patched):
        compare(states(whole_stock)["state2"], states(arm)["state2"]).assert_bitwise()
    assert_applied(patched.report, models=1, backwards=2)
    compatibility(
        "accelerate load_state: patched from stock's, stock from patched's",
        patched,
        libraries=LIBRARIES,
        compared="against the run that was not interrupted: losses, gradient norms, parameters, saved states",
    )


@RARELY
def test_compiled_outside_the_wrapper(runner, compatibility):
    stock, patched = both(
        runner, "accelerated.py", to="compiled", dynamo="aot_eager", by_accelerate=True
    )
    assert {rank["class"] for rank in stock.ranks} == {"OptimizedModule"}
    assert all(rank["frames"] for rank in stock.ranks)
    assert_same_states(stock, patched)
    assert_applied(patched.report, models=1, backwards=4)
    compatibility(
        "accelerate with --dynamo_backend=aot_eager: torch.compile around DistributedDataParallel",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, parameters, saved states",
    )


@RARELY
def test_sync_triggered_in_backward(runner, compatibility):
    stock, patched = both(runner, "trigger_sync.py", to="trigger")
    assert stock.ranks[0]["gradients"] == stock.ranks[1]["gradients"], "gradients were synchronized"
    assert_applied(patched.report, models=1, backwards=3)
    compatibility(
        "accelerate trigger_sync_in_backward: forwards without synchronization, the last backward "
        "with it",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradients, parameters",
    )


@RARELY
def test_a_communication_hook_keeps_the_stock_reducer(runner, accumulated, compatibility):
    stock, patched = both(runner, "accelerated.py", "--comm-hook", to="hook")
    assert stock.ranks[0]["norms"] != accumulated[0].ranks[0]["norms"], "the hook rounds"
    assert_same_states(stock, patched)
    ddp = feature(patched.report)
    counters = [process["counters"] for process in ddp["processes"]]
    assert [(one["stock_models"], one["backwards"]) for one in counters if any(one.values())] == [
        (1, 0)
    ] * WORLD
    assert any("a communication hook is registered" in remark for remark in ddp["remarks"])
    compatibility(
        "accelerate with a communication hook (float16)",
        patched,
        libraries=LIBRARIES,
        compared="losses, gradient norms, parameters, saved states",
    )

"""What distributes more than DistributedDataParallel does, beside it or instead of it.

Where it is instead, the feature has nothing to do, and the report says so.
"""

from __future__ import annotations

import pytest

from tests.scripts.arms import assert_applied, assert_same, assert_stood_down
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = pytest.mark.slow

NO_MODEL = (
    "no model was wrapped in DistributedDataParallel; FSDP, tensor parallelism and other engines "
    "reduce "
    "gradients themselves"
)


@RARELY
def test_zero_redundancy_optimizer(runner, compatibility):
    stock, patched = runner.both("zero")
    assert list(stock.checkpoints) == ["view0", "view1"]
    for checkpoint in stock.checkpoints.values():
        assert len(checkpoint["optimizer"]["state"]) == len(checkpoint["model"]), (
            "the states of all ranks are there"
        )
    assert_same(stock, patched)
    assert_applied(patched.report, models=2, backwards=12)
    compatibility(
        "ZeroRedundancyOptimizer", patched, compared="losses, parameters, consolidated checkpoints"
    )


@RARELY
def test_replicate_has_a_wrapper_inside(runner, compatibility):
    stock, patched = runner.both("replicated")
    for (plain, cut), (plain_too, cut_too) in zip(stock.ranks, patched.ranks, strict=True):
        compare(plain, plain_too).assert_bitwise()
        # Sums of tensor parallelism are added up in another order, and parameters are logged as a digest.
        del cut["parameters"], cut_too["parameters"]
        compare(cut, cut_too).assert_equal()
    assert_applied(patched.report, models=2, backwards=6)
    compatibility(
        "composable replicate(), also with tensor parallelism",
        patched,
        compared="losses, norms, parameters",
    )


# --- instead of it ---


def test_fsdp2(runner, compatibility):
    stock, patched = runner.both("fsdp2")
    assert list(stock.checkpoints) == ["fully_shard", "replicate"]
    assert_same(stock, patched)
    why = (
        "gradients are left to FSDP2 (fully_shard): no model is wrapped in DistributedDataParallel"
    )
    assert_stood_down(patched.report, why)
    compatibility(
        "FSDP2: fully_shard, and torchtitan's replicate",
        patched,
        compared="losses, norms, checkpoints",
    )


@RARELY
def test_tensor_parallelism_in_the_style_of_torchtitan(runner, compatibility):
    stock, patched = runner.both("tensor_parallel")
    assert stock.ranks[0] == stock.ranks[1]
    assert_same(stock, patched)
    # At the end of the process, when it is asked, the model is gone.
    assert_stood_down(patched.report, NO_MODEL)
    compatibility(
        "torchtitan style: meta device, tensor parallelism",
        patched,
        compared="losses, norms, checkpoint",
    )


@RARELY
def test_an_engine_in_the_style_of_deepspeed(runner, compatibility):
    stock, patched = runner.both("engine")
    assert list(stock.checkpoints) == ["zero_pp_rank_0_optim_states", "zero_pp_rank_1_optim_states"]
    assert stock.ranks[0]["parameters"] == stock.ranks[1]["parameters"]
    assert_same(stock, patched)
    assert_stood_down(patched.report, NO_MODEL)
    compatibility(
        "DeepSpeed style engine, hooks and collectives of its own",
        patched,
        compared="losses, parameters",
    )

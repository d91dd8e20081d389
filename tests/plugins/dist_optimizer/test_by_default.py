"""The feature under a plain ``apply()``: it is on, and applies most patches only once a model is sharded."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR

import ovpatch
from ovpatch.patching import PatchError, PatchManager
from ovpatch_plugins.dist_optimizer import dist_optimizer_feature
from tests.plugins.ddp.arms import Record, data
from tests.plugins.ddp.arms import both as run_both
from tests.plugins.dist_optimizer.checks import check, ddp, params, train_step
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.plugins.dist_optimizer.test_sharding_choice import SAVED, saved_threshold

STEPS = 6
FEATURE = "dist_optimizer"
WORK = {
    "torch.optim.optimizer.Optimizer.zero_grad",
    "torch.nn.utils.clip_grad._get_total_norm",
    "optimizer step",
}


def plain() -> Any:
    """Call ``apply()`` without names, with an option that shards the small models of the tests."""
    return ovpatch.applied(options={FEATURE: {"min_param_numel": 8}})


def patched() -> set[str]:
    return {
        status.target
        for status in ovpatch.report().patches
        if status.feature == FEATURE and status.state == "applied"
    }


def shard_option() -> Any:
    return ovpatch.report()[FEATURE].options["shard"].value


# --- the value of the option ---


def test_a_plain_apply_chooses_by_model_and_a_named_feature_always_shards():
    with ovpatch.applied():
        assert shard_option() == "auto"
    with ovpatch.applied("ddp", FEATURE):
        assert shard_option() == "always"
    with ovpatch.applied(options={FEATURE: {"shard": "always"}}):
        assert shard_option() == "always"


@pytest.mark.parametrize(
    "variable", [("OVPATCH", "+dist_optimizer"), ("OVPATCH_DIST_OPTIMIZER", "1")]
)
def test_a_feature_named_by_the_environment_always_shards(monkeypatch, variable):
    monkeypatch.setenv(*variable)
    with ovpatch.applied():
        assert shard_option() == "always"


def test_a_later_plain_call_does_not_undo_a_name():
    with ovpatch.applied("ddp", FEATURE):
        ovpatch.apply()
        assert shard_option() == "always"
        ovpatch.apply("ddp")
        assert shard_option() == "always"
        # New options of ddp turn both features off and on again.
        ovpatch.apply(options={"ddp": {"bucket_cap_mb": 8}})
        ovpatch.apply()
        assert shard_option() == "always"


def test_without_ddp_the_feature_is_off_and_an_error_only_if_it_was_named(monkeypatch):
    monkeypatch.setenv("OVPATCH", "-ddp")
    monkeypatch.setenv("OVPATCH_STRICT", "1")
    with ovpatch.applied():
        assert ovpatch.report()[FEATURE].state == "disabled"
    monkeypatch.setenv("OVPATCH_DIST_OPTIMIZER", "1")
    with pytest.raises(ovpatch.FeatureError, match="requires 'ddp'"):
        ovpatch.apply()


# --- the patched targets by time ---


def test_until_a_model_is_sharded_only_steps_are_patched(ranks):
    for at_first, unsharded, sharded, another, left in ranks(2)(patches_by_time):
        assert {name.rpartition(".")[2] for name in at_first} == {"step"}
        assert unsharded == at_first
        assert sharded > unsharded | WORK
        assert another == sharded
        assert left == set()


def patches_by_time() -> list[set[str]]:
    with plain():
        found = [patched()]
        for least in (SAVED + 1, SAVED, SAVED):
            with saved_threshold(least):
                ddp(net())
            found.append(patched())
    return [*found, patched()]


# --- training ---


def train(scheduled: bool = False) -> list[Record]:
    """Train with an optimizer, and perhaps a scheduler that keeps its step, made before the model is wrapped."""
    inner = net()
    opt = OPTIMIZERS["adamw"](inner.parameters())
    scheduler = LambdaLR(opt, lambda epoch: 1.0 / (1 + epoch)) if scheduled else None
    model, records = ddp(inner), []
    for step in range(STEPS):
        train_step(model, opt, step)
        records.append(params(model))
        if scheduler is not None:
            scheduler.step()
    return records


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("least", [SAVED, SAVED + 1])
def test_a_plain_apply_has_the_bits_of_stock_pytorch(ranks, scheduled, least):
    results = ranks(2)(both_plain, least, scheduled)
    check(results, steps=STEPS if least == SAVED else 0)


def both_plain(least: int, scheduled: bool) -> dict[str, Any]:
    with saved_threshold(least):
        return run_both(functools.partial(train, scheduled), apply=plain)


def train_with_names_from_before(clip: Callable[..., Any]) -> list[Record]:
    """Clip by a function that the script keeps in a variable, and take norms by one that it imported by name."""
    inner = net()
    opt, model, records = OPTIMIZERS["sgd"](inner.parameters()), ddp(inner), []
    for step in range(STEPS):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        norms = {
            "clip": clip(model.parameters(), 0.1),
            "total": get_total_norm([p.grad for p in model.parameters()]),
        }
        opt.step()
        records.append(norms | params(model))
    return records


def both_with_names_from_before() -> dict[str, Any]:
    with saved_threshold(SAVED):
        return run_both(
            functools.partial(train_with_names_from_before, clip_grad_norm_), apply=plain
        )


def test_functions_that_were_imported_before_the_patches_use_shards(ranks):
    results = ranks(2)(both_with_names_from_before)
    # Norms are summed from shards, in another order than in stock PyTorch.
    check(results, steps=STEPS, bitwise=False)
    for result in results:
        # The third backward is the first that shards gradients.
        assert result["counters"]["norms"] >= 2 * (STEPS - 2)
        assert result["counters"]["grads_read"] == 0


@pytest.mark.parametrize("kind", [PatchError, OSError])
def test_if_a_patch_cannot_be_applied_on_one_rank_no_rank_shards(ranks, kind):
    results = ranks(2)(both_without_patches, kind)
    check([result for result, _ in results], steps=0)
    for _, remarks in results:
        assert any("(shard=auto): off: no room for it" in text for text in remarks)


def both_without_patches(kind: type[Exception]) -> tuple[dict[str, Any], list[str]]:
    remarks: list[str] = []
    apply = PatchManager.apply

    def refuse(manager: PatchManager, *names: str) -> None:
        if names == (FEATURE,) and torch.distributed.get_rank() == 1:
            raise kind("no room for it")
        apply(manager, *names)

    def loop() -> list[Record]:
        with mock.patch.object(PatchManager, "apply", refuse):
            train()
            records = train()  # a second model is not sharded either
        remarks[:] = ovpatch.report()[FEATURE].remarks
        return records

    with saved_threshold(SAVED):
        return run_both(loop, apply=plain), remarks


# --- other threads ---


def test_two_models_at_once_wait_for_the_patches():
    applied: list[int] = []
    inside = threading.Barrier(2)

    def apply() -> None:
        inside.wait(60)
        time.sleep(0.2)
        applied.append(1)

    late = dist_optimizer_feature._LatePatches(apply)
    first = threading.Thread(target=late.prepare)
    first.start()
    inside.wait(60)
    assert late.prepare() == ""
    assert applied == [1]
    first.join()

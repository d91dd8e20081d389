"""Parameters that are kept and gathered in bf16 have the values of fp32 parameters, in every loop, for every reader."""

from __future__ import annotations

from typing import Any

import pytest

from ovpatch.insight.verify.values import keep
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer import test_loop_styles, test_models
from tests.plugins.dist_optimizer.checks import all_cases, check, check_all, ddp, on, params, some
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS
from tests.plugins.dist_optimizer.test_reads_of_parameters import HOWS, ON_CPU, Follower
from tests.plugins.dist_optimizer.under_autocast import OPTIONS, cast_net, read_at_the_end


def check_kept(results: list[dict[str, Any]], **demands: Any) -> None:
    """Check a case, and that there were parameters in bf16."""
    check(results, **demands)
    for result in results:
        assert result["counters"]["params_in_param_dtype"] > 0, result["counters"]


def styled(style: str) -> list[Record]:
    return read_at_the_end(test_loop_styles, "train", style=style)


STYLES = (
    "zero_before_forward, None: False", "skipped", "closure", "accumulated, quiet: True, None: True", "never_zeroed",
    "accumulated_with_an_early_zero", "step_without_backward", "group_added", "zero_after_step, None: True",
)  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_styles(ranks, world):
    cases = on(world, {style: {"style": style} for style in STYLES})
    check_all(ranks(world)(all_cases, styled, cases, options=OPTIONS), check=check_kept)


def modelled(case: str, clip: float = 0.0) -> list[Record]:
    return read_at_the_end(test_models, "train", clip=clip, **test_models.CASES[case])


MODELS = (
    "owns a few", "disjoint optimizers", "shared parameters", "static graph", "small buckets", "tied", "odd", "frozen",
    "unused", "unused by rank, gradients stay", "checkpointed, static", "checkpointed, reentrant",
)  # fmt: skip


def test_models_and_optimizers(ranks):
    cases = {case: {"case": case} for case in MODELS}
    check_all(ranks(2)(all_cases, modelled, cases, options=OPTIONS), check=check_kept, steps=9)
    clipped = {case: {"case": case, "clip": 0.1} for case in ("groups", "tied")}
    check_all(ranks(2)(all_cases, modelled, clipped, options=OPTIONS), check=check_kept, steps=9, bitwise=False)


def followed(how: str, at: tuple[int, ...] = (4, 7)) -> list[Record]:
    model = ddp(cast_net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    follow = Follower(how, model, opt)
    records = []
    for step in range(10):
        opt.zero_grad()
        loss = model(data(step, 5, 6)).square().mean()
        loss.backward()
        opt.step()
        records.append({"loss": loss.detach(), "found": follow(step) if step in at else None})
    records.append(params(model))
    return records


HELD = ("state_dict held", "views held")  # whose memory is never released


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_are_new_after_step_for_every_reader(ranks, world):
    cases = {how: {"how": how} for how in HOWS if how not in (*HELD, *ON_CPU)}
    chosen = cases if world == 2 else some(some(cases))
    check_all(ranks(world)(all_cases, followed, chosen, options=OPTIONS), check=check_kept)
    if world == 2:
        held = {how: {"how": how, "at": range(10)} for how in HELD}
        check_all(ranks(world)(all_cases, followed, held, options=OPTIONS))
        often = {how: {"how": how, "at": range(10)} for how in some(some(cases))}
        check_all(ranks(world)(all_cases, followed, often, options=OPTIONS))


def observed() -> list[Record]:
    """Train, while somebody watches all parameters after each step, as verify does."""
    model = ddp(cast_net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    records: list[Record] = []
    for step in range(10):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append({name: keep(param).values for name, param in model.named_parameters()})
    return records


@pytest.mark.parametrize("world", [2, 3])
def test_who_watches_a_script_reads_nothing(ranks, world):
    results = ranks(world)(all_cases, observed, {"observed": {}}, options=OPTIONS)
    check_all(results, check=check_kept)
    for result in results:
        counters = result["observed"]["counters"]
        assert counters["params_read_whole"] == counters["grads_read"] == 0
        assert counters["params_in_param_dtype"] >= 6 * 4

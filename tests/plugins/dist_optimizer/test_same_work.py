"""Optimizers whose work is not the same on all ranks stay stock, and nobody waits for anybody in vain."""

from __future__ import annotations

import gc
import io
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch_plugins.dist_optimizer import agreement
from ovpatch_plugins.dist_optimizer.optimizer_attach import find_sharded
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import (
    SMALL,
    all_cases,
    apply,
    both,
    ddp,
    params,
    train_steps,
)
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support.equality import compare

STEPS = 5


def shared_out(who: str) -> list[Record]:
    """The script divides the work itself: each rank has an optimizer over other parameters, or none at all."""
    model = ddp(net())
    mine = [p for i, p in enumerate(model.parameters()) if i % 2 == dist.get_rank()]
    opt = torch.optim.AdamW(mine if who == "all" else list(model.parameters()), 0.01)
    records = []
    for step in range(STEPS):
        model.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        if who == "all" or dist.get_rank() == 0:
            opt.step()
        for index, param in enumerate(model.parameters()):
            dist.broadcast(param.data, src=index % 2 if who == "all" else 0)
        records.append(params(model))
    return records


def timed(who: str, patience: float, smallest: int) -> tuple[dict[str, Any], float]:
    begin = time.monotonic()
    with mock.patch.object(agreement, "FIRST_STEP_TIMEOUT_S", patience):
        result = all_cases(shared_out, {"": {"who": who}}, options={"min_param_numel": smallest})
    return result[""], time.monotonic() - begin


@pytest.mark.parametrize("smallest", [1, 20])  # with 20, none of rank 1's parameters can be cut
def test_what_scripts_share_out_by_hand_stays_stock(ranks, smallest):
    for result, took in ranks(2)(timed, "all", 60.0, smallest):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["stock_optimizers"] == 1
        assert result["counters"]["steps"] == result["counters"]["optimizers"] == 0
        assert took < 50, "somebody waited for an answer that never came"


def test_an_optimizer_that_one_rank_alone_steps_stays_stock(ranks):
    for rank, (result, took) in enumerate(ranks(2)(timed, "rank 0", 1.0, 8)):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["stock_optimizers"] == (rank == 0)
        assert took > 1


def warned(silence: float) -> list[str]:
    """Rank 0 alone steps an optimizer; return what it logs while it waits for rank 1."""
    logger, heard = logging.getLogger("ovpatch.dist_optimizer"), io.StringIO()
    handler = logging.StreamHandler(heard)
    logger.addHandler(handler)
    try:
        with mock.patch.object(agreement, "WARNING_DELAY_S", silence):
            timed("rank 0", 1.0, 8)
    finally:
        logger.removeHandler(handler)
    return [line for line in heard.getvalue().splitlines() if "waits for the first step" in line]


@pytest.mark.parametrize("silence", [0.2, 60.0])
def test_a_rank_that_waits_for_the_others_says_so(ranks, silence):
    for rank, lines in enumerate(ranks(2)(warned, silence)):
        assert len(lines) == (rank == 0 and silence < 1)
        assert all("create the same optimizers" in line for line in lines)
        assert all(f"rank 1 did not reach it within {silence:g} s" in line for line in lines)


def made_anew(kind: str, by: str, beside: str) -> tuple[list[Record], float]:
    """In the fourth step some ranks make a new optimizer; return also how long the longest step took.

    They go on with it, or it steps once, before or after the one that they have; or they go on with it after both have
    stepped, or make it before the backward. In these cases the old one is gone.
    """
    model = ddp(net())
    opt = OPTIMIZERS["sgd" if kind == "same" else "adamw"](model.parameters())
    records, longest = [], 0.0
    for step in range(8):
        anew = step == 4 and (by == "all" or dist.get_rank() == 0)
        if anew and beside == "early":
            opt = OPTIMIZERS["sgd"](model.parameters())
        model.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        begin = time.monotonic()
        if anew and beside != "early":
            new = OPTIMIZERS["sgd"](model.parameters())
            opts = {"": [new], "before": [new, opt]}.get(beside, [opt, new])
            opt = new if beside in ("", "alone") else opt
        else:
            opts = [opt]
        while opts:
            opts.pop(0).step()
        longest = max(longest, time.monotonic() - begin)
        records.append(params(model))
    dist.barrier()
    return records, longest


def timed_arms(
    loop: Callable[..., tuple[list[Record], float]], *args: Any
) -> tuple[Any, Any, dict[str, int], float]:
    """Return the records of stock and of the feature, its counters, and how long its longest step took."""
    result = both(loop, *args, options={"min_param_numel": 1})
    return result["stock"][0], result["patched"][0], result["counters"], result["patched"][1]


ANEW = [
    ("same", "all", ""),  # on the same terms
    ("same", "one", ""),  # momentum differs from then on
    ("same", "one", "before"),
    ("same", "one", "after"),
    ("same", "one", "alone"),
    ("same", "one", "early"),
    ("other", "all", ""),
    ("other", "one", ""),  # ranks differ from then on, as they do under stock
    ("other", "all", "before"),
    ("other", "one", "before"),
    ("other", "one", "after"),
    ("other", "one", "alone"),
]
ON_THREE = [
    ("same", "all", ""),
    ("same", "one", "alone"),
    ("other", "one", ""),
    ("other", "all", "before"),
]


@pytest.mark.parametrize(
    ("kind", "by", "beside", "world"),
    [*((*one, 2) for one in ANEW), *((*one, 3) for one in ON_THREE)],
)
def test_a_new_optimizer_that_one_rank_alone_makes_stalls_nobody(ranks, world, kind, by, beside):
    for stock, patched, counters, longest in ranks(world)(timed_arms, made_anew, kind, by, beside):
        if world == 2:
            compare(stock, patched).assert_bitwise()
        else:
            compare(stock, patched).assert_equal()
        assert longest < 50
        is_agreed = by == "all"
        assert counters["steps"] == (
            8 + bool(beside) if is_agreed else 4 + (beside in ("after", "alone"))
        )
        assert (counters["stock_optimizers"] > 0) == (not is_agreed)


def beside_accumulation() -> tuple[list[Record], float]:
    """Rank 0 alone steps an optimizer of its own after a backward after which the others do not step."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    records, longest = [], 0.0
    for step in range(6):
        model(data(step, 5, 6)).square().mean().backward()
        begin = time.monotonic()
        if step == 2 and dist.get_rank() == 0:
            OPTIMIZERS["sgd"](model.parameters()).step()
        if step % 2:
            opt.step()
            opt.zero_grad()
        longest = max(longest, time.monotonic() - begin)
        records.append(params(model))
    dist.barrier()
    return records, longest


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_of_one_rank_alone_waits_for_no_step_of_the_others(ranks, world):
    for stock, patched, _, longest in ranks(world)(timed_arms, beside_accumulation):
        compare(stock, patched).assert_equal()
        assert longest < 50


def one_of_two(which: str) -> tuple[list[Record], float]:
    """Each rank steps two optimizers; in the fourth step rank 0 steps a new one in the second one's place."""
    model = ddp(net())
    params_of = list(model.parameters())
    opts = [OPTIMIZERS["adamw"](params_of[:2]), OPTIMIZERS["adamw"](params_of[2:])]
    records, longest = [], 0.0
    for step in range(8):
        model.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        begin = time.monotonic()
        if step == 4 and dist.get_rank() == 0:
            opts[1] = OPTIMIZERS["sgd"](params_of if which == "all" else params_of[2:])
        for opt in opts:
            opt.step()
        longest = max(longest, time.monotonic() - begin)
        records.append(params(model))
    dist.barrier()
    return records, longest


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("which", ["its own", "all"])
def test_of_two_optimizers_one_is_made_anew_by_one_rank(ranks, world, which):
    """One rule: what ranks do not do together ends the sharding of all optimizers over the model, on all ranks."""
    for stock, patched, counters, longest in ranks(world)(timed_arms, one_of_two, which):
        compare(stock, patched).assert_equal()
        assert longest < 50
        assert counters["steps"] == 9
        assert counters["stock_optimizers"] == 2


def local_first() -> Any:
    """Rank 0 adds to its gradients under no_sync() from the first step on, the others do not."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    for number in range(2):  # in the second forward ranks agree on buckets, as under stock
        model(data(number, 5, 6)).square().mean().backward()
    records, longest = [], 0.0
    for step in range(3):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        if dist.get_rank() == 0:
            with model.no_sync():
                model(data(step, 5, 6)).square().mean().backward()
        begin = time.monotonic()
        opt.step()
        longest = max(longest, time.monotonic() - begin)
        records.append(params(model))
    dist.barrier()
    return records, longest


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_hear_at_the_first_step_that_one_is_local(ranks, world):
    for stock, patched, counters, longest in ranks(world)(timed_arms, local_first):
        compare(stock, patched).assert_equal()
        assert counters["steps"] == 0
        assert counters["stock_optimizers"] == 1
        assert longest < 50


class Zero(ZeroRedundancyOptimizer):
    """A class of our own: torch wraps ``step`` of each class that is instantiated, which guards would notice."""


def zero() -> list[Record]:
    """On rank 1 of the first optimizer's there is nothing: its work is known without asking."""
    # The votes of a group read the timeout when the first model is wrapped.
    with mock.patch.object(agreement, "FIRST_STEP_TIMEOUT_S", 0.0):
        model = ddp(net())
        opts = [
            Zero(ones, torch.optim.AdamW, lr=0.01)
            for ones in ([model.module[0].weight], list(model.module[2:].parameters()))
        ]
        records = []
        for step in range(STEPS):
            model.zero_grad()
            model(data(step, 5, 6)).square().mean().backward()
            for opt in opts:
                opt.step()
            records.append(params(model))
    return records


def test_optimizers_inside_of_zero_redundancy_optimizer_need_no_question(ranks):
    for rank, result in enumerate(ranks(2)(all_cases, zero, {"": {}})):
        compare(result[""]["stock"], result[""]["patched"]).assert_bitwise()
        # Both outer ones, and the inner ones that have parameters.
        assert result[""]["counters"]["stock_optimizers"] == (4 if rank == 0 else 3)


def in_any_order(kind: str) -> list[Record]:
    model = ddp(net())
    ones = list(model.parameters())
    opt = OPTIMIZERS[kind](ones if dist.get_rank() == 0 else ones[::-1])
    return train_steps(model, opt, STEPS)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_order_of_parameters_does_not_matter(ranks, kind):
    for result in ranks(2)(all_cases, in_any_order, {"": {"kind": kind}}):
        compare(result[""]["stock"], result[""]["patched"]).assert_bitwise()
        assert result[""]["counters"]["steps"] == STEPS


def over_two_groups() -> tuple[list[Record], int]:
    """Ranks 1 and 2 disagree in their group; rank 0, which is in the other one, must hear of it."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        mine = [
            DistributedDataParallel(net(), process_group=group)
            for number, group in enumerate(groups)
            if rank in (number, number + 1)
        ]
        ones = [p for model in mine for p in model.parameters()]
        opt = torch.optim.AdamW(ones[:-1] if rank == 2 else ones, 0.01)
        records = []
        for step in range(STEPS):
            opt.zero_grad()
            for model in mine:
                model(data(step, 5, 6)).square().mean().backward()
            opt.step()
            records += [params(model) for model in mine]
        dist.barrier()
        from ovpatch_plugins.dist_optimizer.optimizer_attach import find_sharded

        return records, find_sharded(opt) is not None


def test_a_disagreement_in_one_group_is_known_in_the_others(ranks):
    results = ranks(3)(over_two_groups)
    assert [divided for _, divided in results] == [False, False, False]
    first, second = results[0][0], results[1][0]
    compare(first, second[::2]).assert_bitwise()


def kept() -> list[bool]:
    """Make an optimizer anew on all ranks; return whether the first one's shards exist before and after its step."""
    with apply({"min_param_numel": 1}):
        model = ddp(net())
        opt = OPTIMIZERS["adamw"](model.parameters())
        for step in range(3):
            trained(model, step)
            opt.step()
        sharded_optimizer = find_sharded(opt)
        assert sharded_optimizer is not None
        (shards,) = map(weakref.ref, sharded_optimizer._states.values())
        del opt, sharded_optimizer
        gc.collect()
        opt = OPTIMIZERS["adamw"](model.parameters())
        trained(model, 3)
        found = [shards() is not None]
        opt.step()
        return [*found, shards() is not None]


def trained(model: DistributedDataParallel, step: int) -> None:
    model.zero_grad()
    model(data(step, 5, 6)).square().mean().backward()


def test_shards_of_a_dropped_optimizer_go_before_the_next_one_makes_its_own(ranks):
    # Until ranks agree on the next one, a rank may go on with the first one and ask for its shards.
    for found in ranks(2)(kept):
        assert found == [True, False]

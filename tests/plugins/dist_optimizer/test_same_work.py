"""Optimizers whose work is not the same on all ranks stay stock, and nobody waits for anybody in vain."""

from __future__ import annotations

import io
import logging
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.insight.equality import compare
from ovpatch_plugins.dist_optimizer import supported_optimizers
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.arms import SMALL
from tests.plugins.dist_optimizer.checks import all_cases, ddp, params
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net

STEPS = 5


def shared_out(who: str) -> list[Record]:
    """The script shares the work out itself: each rank has an optimizer over other parameters, or none at all."""
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
    with mock.patch.object(supported_optimizers, "PATIENCE_S", patience):
        result = all_cases(shared_out, {"": {"who": who}}, options={"min_param_numel": smallest})
    return result[""], time.monotonic() - begin


@pytest.mark.parametrize("smallest", [1, 20])  # with 20, none of rank 1's parameters can be cut
def test_what_scripts_share_out_by_hand_stays_stock(ranks, smallest):
    for result, took in ranks(2)(timed, "all", 60.0, smallest):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["stock_optimizers"] == 1
        assert result["counters"]["steps"] == result["counters"]["optimizers"] == 0
        assert took < 30, "somebody waited for an answer that never came"


def test_an_optimizer_that_one_rank_alone_steps_stays_stock(ranks):
    for rank, (result, took) in enumerate(ranks(2)(timed, "rank 0", 2.0, 8)):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["stock_optimizers"] == (rank == 0)
        assert took > 2


def warned(silence: float) -> list[str]:
    """Rank 0 alone steps an optimizer; return what it logs while it waits for rank 1."""
    logger, heard = logging.getLogger("ovpatch.dist_optimizer"), io.StringIO()
    handler = logging.StreamHandler(heard)
    logger.addHandler(handler)
    try:
        with mock.patch.object(supported_optimizers, "SILENCE_S", silence):
            timed("rank 0", 2.0, 8)
    finally:
        logger.removeHandler(handler)
    return [line for line in heard.getvalue().splitlines() if "waits for the other ranks" in line]


@pytest.mark.parametrize("silence", [0.2, 60.0])
def test_a_rank_that_waits_for_the_others_says_so(ranks, silence):
    for rank, lines in enumerate(ranks(2)(warned, silence)):
        assert len(lines) == (rank == 0 and silence < 2)
        assert all("make the same optimizers" in line for line in lines)


class Zero(ZeroRedundancyOptimizer):
    """A class of our own: torch wraps ``step`` of each class that is instantiated, which guards would notice."""


def zero() -> list[Record]:
    """On rank 1 of the first optimizer's there is nothing: its work is known without asking."""
    model = ddp(net())
    with mock.patch.object(supported_optimizers, "PATIENCE_S", 0.0):
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
    records = []
    for step in range(STEPS):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(model))
    return records


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
        from ovpatch_plugins.dist_optimizer.takeover import find_sharded

        return records, find_sharded(opt) is not None


def test_a_disagreement_in_one_group_is_known_in_the_others(ranks):
    results = ranks(3)(over_two_groups)
    assert [divided for _, divided in results] == [False, False, False]
    first, second = results[0][0], results[1][0]
    compare(first, second[::2]).assert_bitwise()

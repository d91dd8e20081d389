"""Optimizers whose work differs between ranks fall back to torch, and no rank waits for a step that never comes."""

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


def partitioned(who: str) -> list[Record]:
    """Partition the work as a script does: ranks step optimizers over different parameters, or rank 0 steps alone."""
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


def timed_cases(who: str, timeout_s: float, smallest: int) -> tuple[dict[str, Any], float]:
    """Run :func:`partitioned` with a timeout of the first step; return its result and its time in s."""
    begin = time.monotonic()
    with mock.patch.object(agreement, "FIRST_STEP_TIMEOUT_S", timeout_s):
        result = all_cases(partitioned, {"": {"who": who}}, options={"min_param_numel": smallest})
    return result[""], time.monotonic() - begin


# With 20, no parameter of rank 1 can be sharded.
@pytest.mark.parametrize("smallest", [1, 20])
def test_optimizers_that_a_script_partitions_itself_fall_back(ranks, smallest):
    for result, took in ranks(2)(timed_cases, "all", 60.0, smallest):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["stock_optimizers"] == 1
        assert result["counters"]["steps"] == result["counters"]["optimizers"] == 0
        assert took < 50, "a rank waited for a reply that never came"


def test_an_optimizer_that_one_rank_alone_steps_falls_back(ranks):
    for rank, (result, took) in enumerate(ranks(2)(timed_cases, "rank 0", 1.0, 8)):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["stock_optimizers"] == (rank == 0)
        assert took > 1


def warned(delay_s: float) -> list[str]:
    """Step an optimizer on rank 0 alone; return the lines that it logs while it waits for rank 1."""
    logger, logged = logging.getLogger("ovpatch.dist_optimizer"), io.StringIO()
    handler = logging.StreamHandler(logged)
    logger.addHandler(handler)
    try:
        with mock.patch.object(agreement, "WARNING_DELAY_S", delay_s):
            timed_cases("rank 0", 1.0, 8)
    finally:
        logger.removeHandler(handler)
    return [line for line in logged.getvalue().splitlines() if "waits for the first step" in line]


@pytest.mark.parametrize("delay_s", [0.2, 60.0])
def test_a_rank_that_waits_for_its_peers_logs_it(ranks, delay_s):
    for rank, lines in enumerate(ranks(2)(warned, delay_s)):
        assert len(lines) == (rank == 0 and delay_s < 1)
        assert all("create the same optimizers" in line for line in lines)
        assert all(f"rank 1 did not reach it within {delay_s:g} s" in line for line in lines)


def remade(kind: str, by: str, old: str) -> tuple[list[Record], float]:
    """Make a new optimizer in step 4; return the parameters, and the time of the longest step in s.

    Args:
        kind: "same" for two optimizers of one class, "other" for two classes.
        by: The ranks that make the new optimizer: "all", or "one" for rank 0.
        old: The use of the old optimizer. "": the new one replaces it. "before", "after": the new one steps once,
            before or after the old one, which continues. "alone": the new one replaces it after both have stepped.
            "early": the new one replaces it before the backward.
    """
    model = ddp(net())
    current = OPTIMIZERS["sgd" if kind == "same" else "adamw"](model.parameters())
    records, longest = [], 0.0
    for step in range(8):
        is_remade = step == 4 and (by == "all" or dist.get_rank() == 0)
        if is_remade and old == "early":
            current = OPTIMIZERS["sgd"](model.parameters())
        model.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        begin = time.monotonic()
        if is_remade and old != "early":
            new = OPTIMIZERS["sgd"](model.parameters())
            opts = {"": [new], "before": [new, current]}.get(old, [current, new])
            current = new if old in ("", "alone") else current
        else:
            opts = [current]
        while opts:
            opts.pop(0).step()
        longest = max(longest, time.monotonic() - begin)
        records.append(params(model))
    dist.barrier()
    return records, longest


def timed_arms(
    loop: Callable[..., tuple[list[Record], float]], *args: Any
) -> tuple[Any, Any, dict[str, int], float]:
    """Return the records of both arms, the counters of the feature, and the time of its longest step in s."""
    result = both(loop, *args, options={"min_param_numel": 1})
    return result["stock"][0], result["patched"][0], result["counters"], result["patched"][1]


REMADE = [
    # All ranks still do the same.
    ("same", "all", ""),
    # The momentum of rank 0 differs afterwards.
    ("same", "one", ""),
    ("same", "one", "before"),
    ("same", "one", "after"),
    ("same", "one", "alone"),
    ("same", "one", "early"),
    ("other", "all", ""),
    # The parameters of ranks diverge afterwards, as in stock PyTorch.
    ("other", "one", ""),
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
    ("kind", "by", "old", "world"),
    [*((*case, 2) for case in REMADE), *((*case, 3) for case in ON_THREE)],
)
def test_a_new_optimizer_that_one_rank_alone_makes_stalls_no_rank(ranks, world, kind, by, old):
    for stock, patched, counters, longest in ranks(world)(timed_arms, remade, kind, by, old):
        if world == 2:
            compare(stock, patched).assert_bitwise()
        else:
            compare(stock, patched).assert_equal()
        assert longest < 50
        is_agreed = by == "all"
        assert counters["steps"] == (
            8 + bool(old) if is_agreed else 4 + (old in ("after", "alone"))
        )
        assert (counters["stock_optimizers"] > 0) == (not is_agreed)


def while_peers_accumulate() -> tuple[list[Record], float]:
    """Step a second optimizer on rank 0 alone, after a backward after which its peers accumulate and do not step."""
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
def test_a_step_of_one_rank_alone_waits_for_no_step_of_its_peers(ranks, world):
    for stock, patched, _, longest in ranks(world)(timed_arms, while_peers_accumulate):
        compare(stock, patched).assert_equal()
        assert longest < 50


def one_of_two(which: str) -> tuple[list[Record], float]:
    """Step two optimizers on each rank; in step 4, rank 0 replaces the second one by a new optimizer."""
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
def test_of_two_optimizers_one_is_replaced_on_one_rank(ranks, world, which):
    """Check one rule: if ranks step differently, all optimizers over the model fall back, on all ranks."""
    for stock, patched, counters, longest in ranks(world)(timed_arms, one_of_two, which):
        compare(stock, patched).assert_equal()
        assert longest < 50
        assert counters["steps"] == 9
        assert counters["stock_optimizers"] == 2


def local_first() -> Any:
    """Add to the gradients of rank 0 under no_sync(), from the first step on, and not on its peers."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    # In the second forward ranks agree on buckets, as in stock PyTorch.
    for number in range(2):
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
def test_peers_of_a_rank_with_local_gradients_fall_back_at_the_first_step(ranks, world):
    for stock, patched, counters, longest in ranks(world)(timed_arms, local_first):
        compare(stock, patched).assert_equal()
        assert counters["steps"] == 0
        assert counters["stock_optimizers"] == 1
        assert longest < 50


class Zero(ZeroRedundancyOptimizer):
    """A class of this test. torch wraps ``step`` of each class that is instantiated, which guards would detect."""


def zero() -> list[Record]:
    """Train with two optimizers, of which the first has no parameter on rank 1, without any time to agree."""
    # The votes of a group read the timeout when the first model is wrapped.
    with mock.patch.object(agreement, "FIRST_STEP_TIMEOUT_S", 0.0):
        model = ddp(net())
        opts = [
            Zero(parameters, torch.optim.AdamW, lr=0.01)
            for parameters in ([model.module[0].weight], list(model.module[2:].parameters()))
        ]
        records = []
        for step in range(STEPS):
            model.zero_grad()
            model(data(step, 5, 6)).square().mean().backward()
            for opt in opts:
                opt.step()
            records.append(params(model))
    return records


def test_optimizers_inside_of_zero_redundancy_optimizer_fall_back_without_a_call(ranks):
    for rank, result in enumerate(ranks(2)(all_cases, zero, {"": {}})):
        compare(result[""]["stock"], result[""]["patched"]).assert_bitwise()
        # Both outer optimizers fall back, and the inner optimizers that have parameters.
        assert result[""]["counters"]["stock_optimizers"] == (4 if rank == 0 else 3)


def in_any_order(kind: str) -> list[Record]:
    model = ddp(net())
    parameters = list(model.parameters())
    opt = OPTIMIZERS[kind](parameters if dist.get_rank() == 0 else parameters[::-1])
    return train_steps(model, opt, STEPS)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_order_of_parameters_does_not_matter(ranks, kind):
    for result in ranks(2)(all_cases, in_any_order, {"": {"kind": kind}}):
        compare(result[""]["stock"], result[""]["patched"]).assert_bitwise()
        assert result[""]["counters"]["steps"] == STEPS


def over_two_groups() -> tuple[list[Record], int]:
    """Let ranks 1 and 2 disagree in their group, which rank 0, a member of the first group, must learn from rank 1."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        mine = [
            DistributedDataParallel(net(), process_group=group)
            for number, group in enumerate(groups)
            if rank in (number, number + 1)
        ]
        parameters = [p for model in mine for p in model.parameters()]
        opt = torch.optim.AdamW(parameters[:-1] if rank == 2 else parameters, 0.01)
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


def test_a_disagreement_in_one_group_reaches_the_other_groups(ranks):
    results = ranks(3)(over_two_groups)
    assert [is_sharded for _, is_sharded in results] == [False, False, False]
    first, second = results[0][0], results[1][0]
    compare(first, second[::2]).assert_bitwise()


def kept() -> list[bool]:
    """Replace an optimizer on all ranks; return whether shards of the first one exist before and after the step of the
    next one, and after the backward that follows.
    """
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
        found.append(shards() is not None)
        trained(model, 4)
        return [*found, shards() is not None]


def trained(model: DistributedDataParallel, step: int) -> None:
    model.zero_grad()
    model(data(step, 5, 6)).square().mean().backward()


def test_shards_of_a_dropped_optimizer_are_freed_after_a_step_of_the_next_one(ranks):
    # Until ranks agree on the next optimizer, a peer may continue with the first one and read its shards. In the step,
    # a slower peer may read them that has loaded them unread.
    for found in ranks(2)(kept):
        assert found == [True, True, False]

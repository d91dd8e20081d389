"""Collectives of the script's own on the model's process group, at places where stock torch issues none.

They may come before a step on one rank and after it on another, from the main thread or from one of the script's.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch.overlap.comm.step_communicators import (
    close_step_communicators,
    connect_step_communicator,
    step_communicator,
)
from ovpatch.overlap.kernels import copy_choice as selection
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params, some
from tests.plugins.dist_optimizer.test_gpu import NCCL
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net

STEPS = 6

KINDS = OPTIMIZERS | {"adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01)}


def run_with_all_reduce(run: Callable[[], Any], found: torch.Tensor) -> Any:
    """Call ``run``, which issues no collective in stock PyTorch; all-reduce before it on rank 0, after it on peers."""
    first = dist.get_rank() == 0
    work = dist.all_reduce(found, async_op=True) if first else None
    result = run()
    work = work or dist.all_reduce(found, async_op=True)
    work.wait()
    return result


def trained(place: str, optimizer: str = "adamw") -> list[Record]:
    model = ddp(net())
    opt = KINDS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler(device().type, init_scale=8.0, enabled=place == "unscale")
    records = []
    for step in range(STEPS):
        found = torch.full((100,), float(step + dist.get_rank()), device=device())
        opt.zero_grad()
        scaler.scale(model(data(step, 5, 6)).square().mean()).backward()
        if place == "unscale":
            run_with_all_reduce(lambda: scaler.unscale_(opt), found)
        if place == "clip":
            run_with_all_reduce(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05), found)
        run = (lambda: scaler.step(opt)) if place == "unscale" else opt.step
        run_with_all_reduce(run, found) if place == "step" else run()
        scaler.update() if place == "unscale" else None
        records.append({"found": found, "param": params(model)})
    return records


CASES = {
    **{f"step of {name}": {"place": "step", "optimizer": name} for name in KINDS},
    "unscale": {"place": "unscale"},
    "clip": {"place": "clip"},
}


@pytest.mark.parametrize("world", [2, 3])
def test_before_on_one_rank_and_after_on_another(ranks, world):
    cases = CASES if world == 2 else some(CASES)
    check_all(ranks(world)(all_cases, trained, cases), steps=STEPS, by_parts=None, bitwise=False)


def all_cases_in_a_hurry(*args: Any) -> Any:
    # The first step waits this long for an idle peer before it gives up copy engines.
    with mock.patch.object(selection, "IDLE_S", 2.0):  # expires
        return all_cases(*args)


# The first all-gather connects the communicator. Ranks that share a GPU use sockets, for which NCCL then allocates
# pinned memory, and this allocation waits for the script's collective.
@pytest.mark.gpu(2, own=True)
def test_before_on_one_rank_and_after_on_another_with_nccl(ranks):
    results = ranks(2)(all_cases_in_a_hurry, trained, CASES, **NCCL)
    check_all(results, steps=STEPS, by_parts=None, bitwise=False)


def by_a_thread() -> list[Record]:
    """Sum metrics on a thread while the main thread steps, at random in either order."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    pauses = random.Random(dist.get_rank())
    records = []
    for step in range(2 * STEPS):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        found = [torch.full((size,), float(step + dist.get_rank())) for size in (3, 1000)]

        def add_up(
            found: list[torch.Tensor] = found, pause: float = 0.002 * pauses.random()
        ) -> None:
            time.sleep(pause)
            for metric in found:
                dist.all_reduce(metric)

        thread = threading.Thread(target=add_up)
        thread.start()
        time.sleep(0.002 * pauses.random())
        opt.step()
        thread.join()
        records.append({"found": found, "param": params(model)})
    return records


@pytest.mark.parametrize(("overlap", "world"), [(False, 2), (True, 2), (True, 3)])
def test_a_thread_reduces_metrics_while_the_main_thread_steps(ranks, world, overlap):
    options = {"overlap_param_gather": overlap}
    check_all(ranks(world)(all_cases, by_a_thread, {"": {}}, options=options), steps=2 * STEPS)


def made(count: int) -> list[Any]:
    """Make communicators of groups in another order than the groups; return whether the groups' names stay the same."""
    groups = [dist.new_group([0, 1]) for _ in range(count - 1)]
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    groups.append(dist.new_group([0, 1]))
    dist.set_debug_level(before)
    names = [group.group_name for group in groups]
    found = []
    for group in [*reversed(groups), dist.group.WORLD]:
        communicator = step_communicator(group, torch.device("cpu"))
        assert communicator is not group
        assert communicator is step_communicator(group, torch.device("cpu"))
        assert communicator not in dist.distributed_c10d._world.pg_map
        connect_step_communicator(group, torch.device("cpu"))
        total = torch.ones(3) * dist.get_rank()
        dist.all_reduce(total, group=communicator)
        found.append((communicator.size(), communicator.rank(), total.tolist()))
    close_step_communicators(groups[0])
    assert step_communicator(groups[0], torch.device("cpu")).size() == 2
    return [found, [group.group_name for group in groups] == names]


def test_communicators_of_several_groups(ranks):
    for rank, (found, same) in enumerate(ranks(2)(made, 3)):
        assert found == [(2, rank, [1.0] * 3)] * 4
        assert same

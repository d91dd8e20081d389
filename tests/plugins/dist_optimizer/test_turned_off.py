"""Turning the feature off makes state and gradients full on each rank, whatever faster ranks do next."""

from __future__ import annotations

import contextlib
import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.dist_optimizer.checks import train_step
from tests.plugins.dist_optimizer.test_loops import net
from tests.support import signs
from tests.support.equality import compare
from tests.support.gloo import destroy_group
from tests.support.hosts import fake_hosts

OPTIONS = {"dist_optimizer": {"min_param_numel": 1, "shard_over": "world"}}


def nothing(group: dist.ProcessGroup) -> None:
    """Wait for the peers."""


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy the group of the model, by torch's own function."""
    destroy_group(group)
    gc.collect()


def destroy_and_start(group: dist.ProcessGroup) -> None:
    """Train in another group after that, whose server closes those of destroyed groups."""
    destroy_group(group)
    gc.collect()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with ovpatch.applied("ddp", "dist_optimizer", options=OPTIONS):
        model = DistributedDataParallel(net(), process_group=alone)
        train_step(model, torch.optim.AdamW(model.parameters()), 0)


NEXT = {"": nothing, "destroy": destroy, "destroy, start another": destroy_and_start}


def turned_off(first: int, after: str, *, patched: bool) -> list[Any]:
    """Return state and gradients after the end; all ranks but the first end later, when it has continued."""
    group = dist.new_group(timeout=timedelta(seconds=100))
    features = ovpatch.applied("ddp", "dist_optimizer", options=OPTIONS)
    is_first = dist.get_rank() == first
    name = f"{first} {after} {patched}"
    with features if patched else contextlib.nullcontext():
        model = DistributedDataParallel(net(), process_group=group)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        for step in range(4):
            train_step(model, opt, step)
        if not is_first:
            signs.await_rank(first, f"off {name}")
    if is_first:
        NEXT[after](group)
        signs.give(f"off {name}")
    found = [opt.state_dict()["state"], [param.grad for param in model.parameters()]]
    signs.give(f"done {name}")
    signs.await_others(f"done {name}")
    if not is_first and after == "destroy, start another":
        # In torch 2.14 ranks can make no common group once the numbers of their groups differ.
        destroy_group(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    if not (is_first and after):
        destroy_group(group)
    return found


def all_turned_off(hosts: tuple[int, ...]) -> list[tuple[str, list[Any], list[Any]]]:
    with fake_hosts(hosts):
        return [
            (
                f"{after}, first {first}",
                turned_off(first, after, patched=False),
                turned_off(first, after, patched=True),
            )
            for after in NEXT
            for first in range(dist.get_world_size())
        ]


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_slow_rank_finds_full_values_whatever_the_first_one_does_after_the_end(ranks, hosts):
    for found in ranks(2)(all_turned_off, hosts):
        for name, stock, patched in found:
            compare(stock, patched).assert_bitwise(), name

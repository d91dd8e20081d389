"""The report has the bytes of the state of optimizers that exist at the same time."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer.checks import SMALL, apply, reset_peaks

TIMES = 12


class Script:
    """A training loop whose optimizer ends in one of the ways of :data:`ENDS`, and continues with a new one."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        self.group: dist.ProcessGroup | None = None
        # Objects that keep a former optimizer.
        self.kept: list[Any] = []
        self.wrap()
        self.make()

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.net, process_group=self.group)

    def make(self) -> None:
        self.opt = torch.optim.AdamW(self.net.parameters(), 0.01)

    def train(self, steps: int = 3) -> None:
        for step in range(steps):
            self.opt.zero_grad()
            self.model(data(step, 5, 6)).square().mean().backward()
            self.opt.step()

    # --- the ends of an optimizer ---

    def replace(self) -> None:
        self.make()

    def collect_garbage(self) -> None:
        cycle = [self.opt]
        cycle.append(cycle)
        del self.opt, cycle
        gc.collect()
        self.make()

    def revert(self) -> None:
        """Turn the features off and on.

        The script keeps the former optimizer, and unread state that it has taken out of it.
        """
        self.kept += [self.opt, self.opt.state.pop(next(self.net.parameters()))]
        ovpatch.revert()
        ovpatch.apply("ddp", "dist_optimizer", options={"dist_optimizer": SMALL})
        self.wrap()
        self.make()

    def fall_back(self) -> None:
        """Step with local gradients, which leaves the former optimizer to torch."""
        self.opt.zero_grad()
        with self.model.no_sync():
            self.model(data(0, 5, 6)).square().mean().backward()
        self.opt.step()
        self.kept.append(self.opt)
        self.group = dist.new_group()
        self.wrap()
        self.make()

    def wrap_again(self) -> None:
        self.wrap()

    def exchange_parameters(self) -> None:
        """Train another model with the same optimizer."""
        self.net = copy.deepcopy(self.net)
        self.wrap()
        self.opt.state.clear()
        self.opt.param_groups[0]["params"] = list(self.net.parameters())

    def destroy_group(self) -> None:
        self._leave_group()
        self.make()

    def destroy_group_of_the_optimizer(self) -> None:
        """Continue with the same optimizer in another group."""
        self.opt.state_dict()
        self._leave_group()
        self.opt.state.clear()

    def _leave_group(self) -> None:
        former, self.group = self.group, dist.new_group()
        self.wrap()
        if former is not None:
            dist.destroy_process_group(former)


ENDS = [name for name in vars(Script) if name not in ("wrap", "make", "train") and name[0] != "_"]


def count(loop: Callable[[Script], None]) -> tuple[int, int]:
    """Return the bytes of state in the report after a loop: those of a rank, and of the full tensors."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    # Optimizers of earlier loops end here.
    gc.collect()
    with apply():
        script = Script()
        reset_peaks()
        loop(script)
        return COUNTERS.state_bytes, COUNTERS.state_bytes_whole


def end_often(end: str) -> tuple[int, int]:
    def loop(script: Script) -> None:
        for _ in range(TIMES):
            script.train()
            getattr(script, end)()
        script.train()

    return count(loop)


def keep(number: int) -> tuple[int, int]:
    def loop(script: Script) -> None:
        for _ in range(number):
            script.train()
            script.kept.append((script.model, script.opt))
            script.net = copy.deepcopy(script.net)
            script.wrap()
            script.make()

    return count(loop)


def all_ends() -> dict[str, tuple[int, int]]:
    return {"": keep(1), "two": keep(2), **{end: end_often(end) for end in ENDS}}


def test_optimizers_that_have_ended_do_not_count_and_all_living_ones_do(ranks):
    for found in ranks(2)(all_ends):
        kept, full = found.pop("")
        assert 0.45 < kept / full < 0.55
        assert found.pop("two") == (2 * kept, 2 * full)
        assert found == dict.fromkeys(ENDS, (kept, full))


def freed() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes in the report of a script that has freed its optimizer, before and after the end."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    living = keep(1)
    gc.collect()
    return living, (COUNTERS.state_bytes, COUNTERS.state_bytes_whole)


@pytest.mark.parametrize("world", [2])
def test_the_report_after_the_end_of_all_optimizers_has_what_they_saved(ranks, world):
    for living, ended in ranks(world)(freed):
        assert living == ended > (0, 0)

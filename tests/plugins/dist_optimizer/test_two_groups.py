"""Ranks that would wait for each other in votes and backwards continue as torch, within seconds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, on
from tests.plugins.dist_optimizer.test_loops import net
from tests.plugins.dist_optimizer.test_orders_by_rank import Script, Steps, checked


class TwoGroups(Steps):
    """Two models of two process groups step in another order on one rank."""

    def __init__(self) -> None:
        # Each case has its own groups, because votes that ended stay ended for their group.
        self.models = [ddp(net(), process_group=dist.new_group()) for _ in range(2)]
        self.opts = self.make()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False)


class LaterTwoGroups(TwoGroups):
    begin = 3


class FirstBackward(TwoGroups):
    """Rank 0 takes the first step of one model before the first backward of another model, its peers after it."""

    first = 0

    def backward(self, step: int) -> None:
        late = []
        for number in range(2):
            if number and step < self.first:
                continue
            self.models[number](data(step, 5, 6, micro=number)).square().mean().backward()
            if dist.get_rank() == 0:
                self.opts[number].step()
            else:
                late.append(number)
        for number in late:
            self.opts[number].step()

    def step(self, step: int) -> None:
        """Do nothing: each backward is followed by its step."""


class LaterFirstBackward(FirstBackward):
    """The other model's first backward comes when the first optimizer has stepped."""

    first = 2


class FirstBackwardInOneGroup(FirstBackward):
    def __init__(self) -> None:
        Script.__init__(self)


class OneSkips(Script):
    """Rank 0 alone leaves out a step, as after a loss that is NaN there. Its peers wait for it in the vote."""

    begin = 2

    def step(self, step: int) -> None:
        if step != self.begin or dist.get_rank() != 0:
            super().step(step)


class OthersSkip(OneSkips):
    """Rank 0 alone takes a step."""

    def step(self, step: int) -> None:
        if step != self.begin or dist.get_rank() == 0:
            Script.step(self, step)


CASES: dict[str, type[Script]] = {cls.__name__: cls for cls in (
    TwoGroups, LaterTwoGroups, FirstBackward, LaterFirstBackward, FirstBackwardInOneGroup, OneSkips, OthersSkip,
)}  # fmt: skip


def trained(name: str) -> list[Record]:
    return CASES[name]().train()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_wait_for_each_other_continue_with_the_values_of_torch(ranks, world):
    cases = {name: {"name": name} for name in CASES}
    # The timeout of the process group is half an hour, so a case that ends in time did not depend on it.
    check_all(ranks(world)(all_cases, trained, on(world, cases), timeout=120), check=checked)

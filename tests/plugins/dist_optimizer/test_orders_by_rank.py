"""Operations that stock PyTorch does not pair, in any order on ranks: steps, clips, reads, saves, constructions."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, apply, check_all, ddp, on, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.equality import compare
from tests.support.errors import error_of

STEPS = 6


def by_rank(items: Any) -> list[Any]:
    """Return items in an order that differs by rank, like the order of a set, which depends on addresses."""
    ordered = list(items)
    return ordered[::-1] if dist.get_rank() == 1 else ordered


class Script:
    """A script that trains two models of one process group together. The cases override a part of its loop."""

    # Ranks differ from this step on.
    begin = 0

    def __init__(self) -> None:
        # Ranks of a group that have voted on different subjects do not vote again, so each case has its own group.
        group = dist.new_group()
        self.models = [ddp(net(), process_group=group) for _ in range(2)]
        with torch.no_grad():
            for param in self.models[1].parameters():
                param.mul_(0.5)
        self.opts = self.make()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False)

    def make(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(model.parameters(), 0.01) for model in self.models]

    def backward(self, step: int) -> None:
        for number, model in enumerate(self.models):
            self.scaler.scale(model(data(step, 5, 6, micro=number)).square().mean()).backward()

    def reduced(self, step: int) -> None:
        """Run the operations of the case between backward and step."""

    def step(self, step: int) -> None:
        for opt in self.opts:
            opt.step()

    def stepped(self, step: int) -> None:
        """Run the operations of the case after the step."""

    def order(self, step: int, items: Any) -> list[Any]:
        return by_rank(items) if step >= self.begin else list(items)

    def train(self) -> list[Record]:
        records = []
        for step in range(STEPS):
            for opt in self.opts:
                opt.zero_grad()
            self.backward(step)
            self.reduced(step)
            self.step(step)
            self.stepped(step)
            records.append({"first": params(self.models[0]), "second": params(self.models[1])})
        records.append(
            {
                str(number): copy.deepcopy(opt.state_dict()["state"])
                for number, opt in enumerate(self.opts)
            }
        )
        return records


class Steps(Script):
    def step(self, step: int) -> None:
        for opt in self.order(step, self.opts):
            opt.step()


class LaterSteps(Steps):
    begin = 3


class NewOptimizers(LaterSteps):
    """New optimizers step for the first time in orders that differ."""

    def reduced(self, step: int) -> None:
        if step == self.begin:
            self.opts = self.make()


class OneNewOptimizer(LaterSteps):
    """One rank steps a new optimizer first, and its peers step an older optimizer first."""

    def reduced(self, step: int) -> None:
        if step == self.begin:
            self.opts[0] = self.make()[0]


class ThreeOptimizers(Script):
    begin = 2

    def make(self) -> list[torch.optim.Optimizer]:
        first, second = self.models
        rest = list(second.parameters())
        return [
            torch.optim.SGD(part, lr=0.1, momentum=0.9)
            for part in (first.parameters(), rest[:2], rest[2:])
        ]

    def step(self, step: int) -> None:
        turned = [1, 2, 0] if step >= self.begin and dist.get_rank() == 1 else [0, 1, 2]
        for number in turned:
            self.opts[number].step()


class Constructions(Script):
    def make(self) -> list[torch.optim.Optimizer]:
        made = {
            number: torch.optim.AdamW(self.models[number].parameters(), 0.01)
            for number in by_rank([0, 1])
        }
        return [made[0], made[1]]


class Params(Script):
    """One optimizer has the parameters of both models, in orders that differ between ranks."""

    def make(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(
                [p for model in by_rank(self.models) for p in model.parameters()], 0.01
            )
        ]

    def train(self) -> list[Record]:
        # The keys of the state are the numbers of the parameters, which differ.
        return super().train()[:-1]


class Groups(Params):
    def make(self) -> list[torch.optim.Optimizer]:
        groups = [
            {"params": list(model.parameters()), "weight_decay": 0.1} for model in self.models
        ]
        return [torch.optim.AdamW(by_rank(groups), 0.01)]


class Clips(Script):
    begin = 2

    def reduced(self, step: int) -> None:
        for model in self.order(step, self.models):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class ClipOfBoth(Script):
    """Ranks clip the parameters of both models in different orders, also within a model."""

    def reduced(self, step: int) -> None:
        both = [p for model in self.models for p in model.parameters()]
        nn.utils.clip_grad_norm_(self.order(step, both), 0.05)


class ClipOfOne(Script):
    """Each rank clips another model, so the parameters diverge."""

    begin = 2

    def reduced(self, step: int) -> None:
        for model in self.order(step, self.models)[: 1 if step >= self.begin else 2]:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class ClipByOne(Script):
    """One rank clips, and its peers do not."""

    begin = 2

    def reduced(self, step: int) -> None:
        if step < self.begin or dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(self.models[0].parameters(), 0.05)


class ClipByHand(Script):
    begin = 2

    def reduced(self, step: int) -> None:
        for model in self.order(step, self.models):
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, torch.tensor(0.5))


class ClipOfSome(Script):
    """Ranks clip different parameters of one model."""

    begin = 2

    def reduced(self, step: int) -> None:
        first = list(self.models[0].parameters())
        nn.utils.clip_grad_norm_(
            first[: 2 + dist.get_rank()] if step >= self.begin else first, 0.05
        )


class Unscales(Script):
    begin = 2

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def reduced(self, step: int) -> None:
        for opt in self.order(step, self.opts):
            self.scaler.unscale_(opt)

    def step(self, step: int) -> None:
        for opt in self.opts:
            self.scaler.step(opt)
        self.scaler.update()


class ClipOrUnscale(Unscales):
    """One rank clips gradients before it unscales them."""

    def reduced(self, step: int) -> None:
        clip = functools.partial(nn.utils.clip_grad_norm_, self.models[0].parameters(), 0.05)
        unscale = functools.partial(self.scaler.unscale_, self.opts[0])
        for do in self.order(step, [unscale, clip]):
            do()


class Reads(Script):
    def reduced(self, step: int) -> None:
        for model in by_rank(self.models) if step in (2, 3) else ():
            for param in by_rank(model.parameters()):
                param.grad.sum()


class Saves(Script):
    """All ranks save, in different orders; later one rank saves alone."""

    def stepped(self, step: int) -> None:
        for opt in (
            by_rank(self.opts)
            if step == 1
            else self.opts
            if step == 3 and dist.get_rank() == 0
            else ()
        ):
            copy.deepcopy(opt.state_dict())


class SaveBeforeOneModel(Script):
    """One rank saves one optimizer over both models, and the next losses use the first model only."""

    def make(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([p for model in self.models for p in model.parameters()], 0.01)]

    def backward(self, step: int) -> None:
        for number, model in enumerate(self.models[: 1 if step in (3, 4) else 2]):
            model(data(step, 5, 6, micro=number)).square().mean().backward()

    def stepped(self, step: int) -> None:
        if step in (2, 3) and dist.get_rank() == 0:
            copy.deepcopy(self.opts[0].state_dict())


class ReadsOfState(SaveBeforeOneModel):
    """Each rank reads the state of another model before the step of one optimizer over both models."""

    def backward(self, step: int) -> None:
        Script.backward(self, step)

    def reduced(self, step: int) -> None:
        if step in (2, 3):
            self.opts[0].state[self.models[dist.get_rank() % 2].module[0].weight]["exp_avg"].sum()


class NoGradient(Script):
    """One rank clears the gradient of one parameter in one step."""

    def reduced(self, step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            self.models[0].module[0].weight.grad = None


class Interleaved(Script):
    """One rank runs both backwards before it steps."""

    def is_first(self, step: int) -> bool:
        return step < self.begin or dist.get_rank() == 0

    def backward(self, step: int) -> None:
        if self.is_first(step):
            super().backward(step)

    def step(self, step: int) -> None:
        for number, (model, opt) in enumerate(zip(self.models, self.opts, strict=True)):
            if not self.is_first(step):
                model(data(step, 5, 6, micro=number)).square().mean().backward()
            opt.step()


class LaterInterleaved(Interleaved):
    begin = 2


CASES: dict[str, type[Script]] = {cls.__name__: cls for cls in (
    Steps, LaterSteps, NewOptimizers, OneNewOptimizer, ThreeOptimizers, Constructions, Params, Groups, Clips,
    ClipOfBoth, ClipOfOne, ClipByOne, ClipByHand, ClipOfSome, Unscales, ClipOrUnscale, Reads, Saves,
    SaveBeforeOneModel, ReadsOfState, NoGradient, Interleaved, LaterInterleaved,
)}  # fmt: skip


def trained(name: str) -> list[Record]:
    return CASES[name]().train()


def checked(results: list[dict[str, Any]]) -> None:
    """Demand the values of stock PyTorch, and that optimizers were sharded, or that the report gives the reason."""
    for result in results:
        compared = compare(result["stock"], result["patched"], reordered=result.get("reordered"))
        compared.assert_equal()
        assert result["counters"]["optimizers"] + result["counters"]["stock_optimizers"] > 0


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_in_the_order_of_operations_that_torch_does_not_pair(ranks, world):
    cases = {name: {"name": name} for name in CASES}
    results = ranks(world)(all_cases, trained, on(world, cases), timeout=120)
    check_all(results, check=checked)
    stock = {
        name for result in results for name, case in result.items() if not case["counters"]["steps"]
    }
    # In these cases ranks differ from the first step on.
    assert stock <= {"Steps", "Interleaved"}


WITHOUT_VOTES = {cls.__name__: cls for cls in (LaterSteps, Clips, LaterInterleaved, Params)}


def without_votes() -> dict[str, tuple[str, int]]:
    """Run cases without votes, as on GPUs; return by case the error, and the number of steps before it."""
    found = {}
    with apply(), mock.patch.object(ShardedGrads, "has_step_votes", False):
        for name, make in WITHOUT_VOTES.items():
            script = make()
            found[name] = (
                error_of(script.train),
                min(script.models[0].reducer.grad_reducer.steps, STEPS),
            )
            gc.collect()
    return found


def test_without_votes_different_orders_are_an_error_on_all_ranks(ranks):
    first, second = ranks(2)(without_votes, timeout=120)
    assert first == second
    for name, (error, steps) in first.items():
        if name in ("LaterInterleaved", "Params"):
            assert error == "no error"
        else:
            assert "in orders that differ" in error, name
            assert steps == WITHOUT_VOTES[name].begin + 2, (
                "the flags of the next backward report it"
            )

"""Operations that stock PyTorch does not pair, in any order on ranks: steps, clips, reads, saves, constructions."""

from __future__ import annotations

import copy
import functools
import gc
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch.overlap.comm import host_barrier
from ovpatch_plugins.dist_optimizer import sharded_grads
from ovpatch_plugins.dist_optimizer.sharded_optimizer import ShardedOptimizer
from tests.plugins.ddp.arms import Record, data, device, named, seeded
from tests.plugins.dist_optimizer.checks import all_cases, apply, check_all, ddp, on, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.support import signs
from tests.support.equality import compare
from tests.support.errors import error_of
from tests.support.rarely import RARELY

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
        self.group = dist.new_group(timeout=timedelta(seconds=60))
        self.models = [ddp(net(), process_group=self.group) for _ in range(2)]
        with torch.no_grad():
            for param in self.models[1].parameters():
                param.mul_(0.5)
        self.opts = self.make()
        self.scaler = torch.amp.GradScaler(device().type, init_scale=8.0, enabled=False)

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
        self.records: list[Record] = []
        records = self.records
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
        self.records = super().train()[:-1]
        return self.records


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
        self.scaler = torch.amp.GradScaler(device().type, init_scale=8.0)

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

    begin = 3

    def reduced(self, step: int) -> None:
        if step == self.begin and dist.get_rank() == 1:
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
    return AHEAD[name]().train()


def checked(results: list[dict[str, Any]]) -> None:
    """Demand the values of stock PyTorch, and that optimizers were sharded, or that the report gives the reason."""
    for result in results:
        compared = compare(result["stock"], result["patched"], reordered=result.get("reordered"))
        compared.assert_equal()
        assert result["counters"]["optimizers"] + result["counters"]["stock_optimizers"] > 0


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_ranks_that_differ_in_the_order_of_operations_that_torch_does_not_pair(ranks, world):
    cases = {name: {"name": name} for name in CASES}
    results = ranks(world)(all_cases, trained, on(world, cases), timeout=120)
    check_all(results, check=checked)
    stock = {
        name for result in results for name, case in result.items() if not case["counters"]["steps"]
    }
    # In these cases ranks differ from the first step on.
    assert stock <= {"Steps", "Interleaved"}


class LastSteps(Steps):
    begin = STEPS - 1


class LastStepsOfOne(Script):
    """In its last step each rank steps another optimizer, and none follows."""

    begin = STEPS - 1

    def step(self, step: int) -> None:
        for opt in self.order(step, self.opts)[: 1 if step >= self.begin else 2]:
            opt.step()


class FirstSteps(Steps):
    """Ranks differ while hosts still wait in each step."""

    begin = 1


class LastUnscales(Unscales):
    """Ranks unscale in different orders in the last step, where one gradient of one model is infinite."""

    begin = STEPS - 1

    def backward(self, step: int) -> None:
        super().backward(step)
        if step == self.begin:
            # Each rank has the infinity after the reduction.
            for param in self.models[1].parameters():
                param.grad.mul_(float("inf"))


class EarlyFallback(OneNewOptimizer):
    """The rank that steps a new optimizer has fallen back before its peer's step changes anything."""

    def step(self, step: int) -> None:
        store, key = dist.distributed_c10d._get_default_store(), self.group.group_name
        if step != self.begin:
            super().step(step)
        elif dist.get_rank() == 0:
            try:
                super().step(step)
            except RuntimeError:
                # The models are torch's now. The step of a new optimizer is what the script wanted.
                assert error_of(self.make()[0].step) == "no error"
                raise
            finally:
                store.set(key, "")
        else:
            prepare = ShardedOptimizer._prepare_update

            def wait(sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer) -> None:
                store.wait([key])
                prepare(sharded, optimizer)

            with mock.patch.object(ShardedOptimizer, "_prepare_update", wait):
                super().step(step)


class OneIsMissing(OneNewOptimizer):
    """The first vote of rank 0 ends without rank 2, which has promised it, after rank 1 has passed that vote."""

    def step(self, step: int) -> None:
        if step != self.begin:
            super().step(step)
            return
        name = self.group.group_name
        place = sharded_grads.find(self.models[0].module[0].weight)
        first, second = self.order(step, self.opts)
        if dist.get_rank() == 0:
            signs.await_rank(1, f"{name}: passed")
            # Rank 0 waits for no missing rank, so it ends the vote once the replies have come.
            votes = mock.Mock() if place is None else place[0].votes
            try:
                with mock.patch.object(votes, "_timeout_s", -1.0):
                    first.step()
            finally:
                signs.give(f"{name}: ended")
        elif dist.get_rank() == 1:
            first.step()
            signs.give(f"{name}: passed")
        else:
            signs.await_rank(0, f"{name}: ended")
            first.step()
        second.step()


class OneOverBoth(Script):
    """One rank steps a new optimizer over both models, and its peers step an older one."""

    begin = 3

    def make(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([p for model in self.models for p in model.parameters()], 0.01)]

    def reduced(self, step: int) -> None:
        if step == self.begin and dist.get_rank() == 0:
            self.opts = self.make()


class OneOverTwoGroups(Script):
    """One rank steps a new optimizer over models of two groups, and its peer older ones with a read between them."""

    begin = 3

    def __init__(self) -> None:
        super().__init__()
        group = dist.new_group(timeout=timedelta(seconds=60))
        self.models[1] = ddp(self.models[1].module, process_group=group)

    def step(self, step: int) -> None:
        if step != self.begin:
            super().step(step)
        elif dist.get_rank() == 0:
            OneOverBoth.make(self)[0].step()  # type: ignore[arg-type]
        else:
            self.opts[0].step()
            params(self.models[0])
            self.opts[1].step()


AHEAD = CASES | {cls.__name__: cls for cls in (
    LastSteps, LastStepsOfOne, FirstSteps, LastUnscales, EarlyFallback, OneOverBoth, OneOverTwoGroups, OneIsMissing,
)}  # fmt: skip

# These hosts find the difference in a first vote, or it makes none.
RIGHT_AHEAD = {
    "Steps", "NewOptimizers", "Constructions", "Params", "Groups", "ClipOfBoth", "Reads", "Saves",
    "SaveBeforeOneModel", "ReadsOfState", "LaterInterleaved",
}  # fmt: skip
# Hosts on GPUs wait for the timeout if a peer is in a backward while they are in a first vote.
RAISING_AHEAD = set(AHEAD) - RIGHT_AHEAD - {"Interleaved"}


def read_params(model: nn.Module) -> Record | None:
    """Return the parameters; None if a read raises an error."""
    found: list[Record] = []
    return found[0] if error_of(lambda: found.append(params(model))) == "no error" else None


def run_ahead(names: list[str]) -> dict[str, dict[str, Any]]:
    """Run cases stock, and patched with hosts that run ahead of their devices, as on GPUs.

    Returns:
        By case, the stock records, the patched records up to an error, the error, and the parameters of both models
        that can be read after it.
    """
    found = {name: {"stock": seeded(trained, name)} for name in names}
    with apply(), mock.patch.object(host_barrier, "is_needed", return_value=True):
        for name in names:
            with named(name):
                torch.manual_seed(0)
                script = AHEAD[name]()
                error = error_of(script.train)
                found[name] |= {"patched": script.records, "error": error}
                found[name]["read"] = [read_params(model) for model in script.models]
                del script
                gc.collect()
    return found


def check_read(stock: list[Record], step: int, read: list[Record | None]) -> None:
    """Demand that each element that a script can read after an error has its value before or after the step."""
    for model, found in zip(("first", "second"), read, strict=True):
        for name, value in (found or {}).items():
            moments = [stock[moment][model][name] for moment in (step - 1, step)]
            assert any_close(value, moments), (
                f"{name} of the {model} model has a value of another model"
            )


def any_close(value: torch.Tensor, moments: list[torch.Tensor]) -> bool:
    close = [torch.isclose(value, moment, rtol=0, atol=1e-5) for moment in moments]
    return bool((close[0] | close[1]).all())


ON_THREE = [
    "LaterSteps", "LastSteps", "LastStepsOfOne", "LastUnscales", "EarlyFallback", "OneIsMissing",
]  # fmt: skip
KNOWN_ERRORS = (
    "in orders that differ",
    "does not join this collective",
    "step different optimizers",
    "peers have already continued",
)


def check_raising(name: str, results: list[dict[str, Any]]) -> None:
    """Demand an error on all ranks in the step in which they differ; see :func:`run_ahead`."""
    for rank, case in enumerate(results):
        assert any(text in case["error"] for text in KNOWN_ERRORS), (name, rank, case["error"])
        assert len(case["patched"]) == AHEAD[name].begin, (name, rank)
        check_read(case["stock"], AHEAD[name].begin, case["read"])


@pytest.mark.parametrize("world", [2, 3])
def test_hosts_that_run_ahead_compute_what_stock_pytorch_does_or_all_raise(ranks, world):
    """Check the kind: any order that differs by rank, and no vote before a step, as on GPUs."""
    raising = sorted(RAISING_AHEAD) if world == 2 else ON_THREE
    right = sorted(RIGHT_AHEAD) if world == 2 else []
    results = ranks(world)(run_ahead, [*raising, *right], timeout=200)
    for name in raising:
        check_raising(name, [result[name] for result in results])
    for result in results if world == 2 else ():
        for name, case in result.items():
            compare(case["stock"][: len(case["patched"])], case["patched"]).assert_equal()
            assert name in raising or case["error"] == "no error", (name, case["error"])

"""``model.join()`` and ``Join([...])``, in which ranks step unevenly, and late hooks: optimizers fall back to torch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import (
    all_cases,
    check,
    check_all,
    ddp,
    params,
    some,
    train_step,
)
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.plugins.dist_optimizer.test_same_work import Zero
from tests.support.rarely import RARELY


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


def joined(
    before: int = 3,
    uneven: int = 1,
    optimizer: str = "adamw",
    entered: str = "join",
    clip: float = 0.0,
    keep: bool = False,
    inside: str = "",
    **wrap: Any,
) -> list[Record]:
    """Train evenly, then in a join with ``uneven`` more steps on each rank than on the rank before, then both again."""
    raw = net()
    if inside == "buffers":
        raw = nn.Sequential(nn.BatchNorm1d(6), raw)
    if inside == "unused":
        raw.unused = nn.Linear(6, 6)
        raw.forward = lambda x: nn.Sequential(*list(raw)[:-1])(x)
    model = ddp(raw, **wrap)
    opt = (OPTIMIZERS | {"adafactor": adafactor})[optimizer](model.parameters())
    records: list[Record] = []

    def backward(step: int) -> None:
        opt.zero_grad(set_to_none=not keep)
        model(data(step, 5, 6)).square().mean().backward()

    def train(steps: int, begin: int) -> None:
        for step in range(begin, begin + steps):
            backward(step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
            opt.step()
            records.append({"param": params(model), "norm": norm})

    def unevenly(begin: int) -> None:
        # The parameters of the last step are still being gathered, and no rank has read its gradients.
        with Join([model]) if entered == "Join" else model.join():
            train(uneven * dist.get_rank(), begin)
        records.append({"joined": params(model)})

    train(before, 0)
    if entered == "before step":
        backward(50)
        with model.join():
            pass
        opt.step()
    unevenly(100)
    train(2, 200)
    unevenly(300)
    records.append({"state": opt.state_dict()["state"], "param": params(model)})
    return records


CASES: dict[str, dict[str, Any]] = {
    **{f"after {before}": {"before": before} for before in range(6)},
    "in step": {"uneven": 0},
    "far apart": {"uneven": 3, "entered": "Join"},
    "the general way, after 4": {"before": 4, "entered": "Join"},
    "between backward and step": {"before": 4, "entered": "before step"},
    "momentum": {"optimizer": "sgd", "before": 4},
    "clipped": {"clip": 0.05, "before": 4},
    "gradients kept": {"clip": 0.05, "before": 5, "keep": True},
    "buffers": {"inside": "buffers", "before": 4},
    "unused": {"find_unused_parameters": True, "before": 4},
    "static": {"static_graph": True, "before": 2},
    "static, unused": {"static_graph": True, "inside": "unused"},
    "full parameters": {"optimizer": "adafactor", "before": 2},
}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_join(ranks, world):
    cases = CASES if world == 2 else some(CASES)
    results = ranks(world)(all_cases, joined, cases, timeout=120)
    for name, case in cases.items():
        before = case.get("before", 3)
        by_rank = [result[name] for result in results]
        check(
            by_rank,
            steps=before,
            by_parts=None,
            stock=1 if before else 0,
            bitwise="clip" not in case,
        )
        assert all(result["counters"]["steps"] == before for result in by_rank), name


def joined_with_zero(before: int) -> list[Record]:
    model = ddp(net())
    opt = Zero(model.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(before):
        train_step(model, opt, step)
    with Join([model, opt]):
        for step in range(2 * dist.get_rank()):
            opt.zero_grad()
            model(data(100 + step, 5, 6)).square().mean().backward()
            opt.step()
    return [{"param": params(model)}]


def test_join_of_model_and_zero_redundancy_optimizer(ranks):
    results = ranks(2)(
        all_cases, joined_with_zero, {str(before): {"before": before} for before in (0, 1, 2)}
    )
    for name in results[0]:
        check(
            [result[name] for result in results],
            steps=0,
            by_parts=False,
            stock=0 if name == "0" else 2,
        )


def ended_early(before: int) -> list[Record]:
    """Train with ``throw_on_early_termination``, which raises on all ranks when the first has no more inputs."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    records: list[Record] = []

    def train(steps: int, begin: int) -> None:
        for step in range(begin, begin + steps):
            train_step(model, opt, step)
            records.append({"param": params(model)})

    train(before, 0)
    for begin in (100, 200):
        with contextlib.suppress(RuntimeError), model.join(throw_on_early_termination=True):
            train(1 + dist.get_rank(), begin)
        records.append({"begin": begin, "param": params(model)})
    train(2, 300)
    return records


def test_join_that_ends_with_the_first_rank(ranks):
    check_all(
        ranks(2)(all_cases, ended_early, {"2": {"before": 2}, "3": {"before": 3}}),
        steps=2,
        by_parts=None,
        stock=1,
    )


def hooked_late(reduce: bool) -> list[Record]:
    """Register a communication hook after some steps. A hook that does not reduce leaves different gradients."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    records: list[Record] = []

    # Annotations in this module would be strings, which torch's check of hooks takes for wrong classes.
    def hook(group, bucket):
        if reduce:
            work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    for step in range(9):
        if step == 4:
            model.register_comm_hook(dist.group.WORLD, hook)
        train_step(model, opt, step)
        records.append({"param": params(model)})
    return records


def test_a_communication_hook_that_comes_late(ranks):
    cases = {"reduces": {"reduce": True}, "leaves gradients local": {"reduce": False}}
    check_all(ranks(2)(all_cases, hooked_late, cases), steps=4, by_parts=None, stock=1)

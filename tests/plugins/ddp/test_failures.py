"""Wrong use raises an error with a remedy, and training continues after an exception in a backward."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ovpatch
from tests.plugins.ddp.arms import (
    Record,
    all_both,
    data,
    device,
    is_patched,
    record_steps,
    reduced_in_place,
    seen,
    table,
)
from tests.plugins.ddp.checks import check_cases
from tests.plugins.ddp.refusal import raising
from tests.support.equality import compare
from tests.support.errors import error_of

Bomb = raising(RuntimeError, "CUDA out of memory. (not really)")


class Mined(nn.Module):
    """Layers with a function after each that may raise, so that a backward can fail at any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, bomb: int | None = None) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == bomb:
                x = Bomb.apply(x)
        return x


def train(
    steps: list[tuple[int, int | None]], ddp: dict[str, Any], *, set_to_none: bool = True
) -> list[Record]:
    """Train; each step is (data seed, layer at which its backward fails). Failed steps are skipped.

    If gradients are zeroed in place, rank 0 comes late to a backward that fails. Until then, collectives of its peers
    wait in their gradients.
    """
    torch.manual_seed(0)
    model = Mined().to(device())
    wrapped = DDP(model, **ddp)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    records = []
    for seed, bomb in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        Bomb.armed = bomb is not None
        time.sleep(0.3 * (Bomb.armed and not set_to_none and dist.get_rank() == 0))
        try:
            wrapped(data(seed, 4, 8), bomb).square().mean().backward()
        except RuntimeError as error:
            if "not really" not in str(error):
                raise
            continue
        optimizer.step()
        records.append(seen(model))
    return records


@reduced_in_place
def failing_on_all_ranks(
    ddp: dict[str, Any], depths: list[int], at_once: bool = False, **more: Any
) -> list[Record]:
    """Fail on every rank in the same steps, but not at the same layer. Stock PyTorch skips these steps.

    With ``at_once`` the first backward fails, on some rank perhaps before it has computed any gradient.
    """
    bombs = [depths[(dist.get_rank() + turn) % len(depths)] for turn in (0, 1)]
    steps = [(0, None), (1, None), (90, bombs[0]), (2, None), (91, bombs[1]), (3, None)]
    if at_once:
        steps = [(90, bombs[0]), (0, None), (1, None), (2, None)]
    if is_patched():
        return train(steps, ddp, **more)
    return train(
        [step for step in steps if step[1] is None],
        {"bucket_cap_mb": 0.0001} if at_once else ddp,
        **more,
    )


def require(results: list[dict[str, Any]], recovered: int) -> None:
    for result in results:
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["recovered"] == recovered


@pytest.mark.parametrize("world", [2, 3])
def test_training_continues_after_an_exception_in_backward_on_all_ranks(ranks, world):
    small = {"bucket_cap_mb": 0.0001}
    ddp = [small, {**small, "find_unused_parameters": True}]
    cases = table(ddp=ddp, depths=[[1], [3], [0, 3], [3, 1, 0]])
    check_cases(ranks(world), failing_on_all_ranks, cases, check=require, recovered=2)
    zeroed = table(ddp=ddp, depths=[[0]], set_to_none=[False])
    check_cases(ranks(world), failing_on_all_ranks, zeroed, check=require, recovered=2)


def test_training_continues_after_an_exception_in_the_first_backward(ranks):
    ddp = [{}, {"static_graph": True}, {"find_unused_parameters": True}]
    cases = table(
        ddp=[{"bucket_cap_mb": 0.0001, **kwargs} for kwargs in ddp],
        depths=[[0, 3], [3, 0], [3], [1]],
        at_once=[True],
    )
    check_cases(ranks(2), failing_on_all_ranks, cases, check=require, recovered=1)


def failing_alone(depth: int, good_steps: int = 1) -> str:
    """Fail on rank 1 after some good steps, and continue; its contribution is missing in the gradients of rank 0."""
    with ovpatch.applied("ddp"):
        wrapped = DDP(Mined().to(device()), bucket_cap_mb=0.0001)
        text = _fail_alone(wrapped, depth, good_steps)
        # A rank that continues reports a failure once.
        for step in range(2):
            wrapped.zero_grad()
            wrapped(data(step, 4, 8)).square().mean().backward()
        return text


def _fail_alone(wrapped: DDP, depth: int, good_steps: int) -> str:
    for step in range(good_steps):
        wrapped(data(step, 4, 8)).square().mean().backward()
    Bomb.armed = dist.get_rank() == 1
    deadline = time.monotonic() + 60
    try:
        with (
            pytest.raises(RuntimeError, match="not really")
            if Bomb.armed
            else contextlib.nullcontext()
        ):
            wrapped(data(1, 4, 8), depth).square().mean().backward()
        # On CUDA the flags arrive in the background.
        while time.monotonic() < deadline:
            wrapped(data(2, 4, 8))
            if dist.get_rank() == 1:
                return "continued"
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("depth", [0, 2, 3])
def test_a_rank_whose_peer_lost_a_backward_raises(ranks, depth):
    texts = ranks(2)(failing_alone, depth)
    assert "ended the backward of step 1 on another rank" in texts[0]
    assert "Restart from the last checkpoint" in texts[0]
    assert texts[1] == "continued"


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def unused_without_search(quiet: bool) -> str:
    with ovpatch.applied("ddp"):
        wrapped = DDP(Partial())
        wrapped(data(0, 2, 4)).sum().backward()
        with wrapped.no_sync() if quiet else contextlib.nullcontext():
            return error_of(wrapped, data(1, 2, 4))


@pytest.mark.parametrize("quiet", [False, True])
def test_unused_parameters_without_the_search_raise_as_in_stock_pytorch_and_are_named(ranks, quiet):
    for text in ranks(2)(unused_without_search, quiet):
        assert text.startswith("Expected to have finished reduction in the prior iteration")
        assert "spare.weight, spare.bias" in text
        assert "used.weight" not in text.replace("spare", "").split("find_unused")[0]
        assert "find_unused_parameters=True" in text


class Shared(nn.Module):
    """One layer in two reentrant checkpoints, which gives two contributions to its gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return x


def loop_reentrant_twice(static: bool = True) -> list[Record]:
    torch.manual_seed(0)
    model = Shared().to(device())
    wrapped = DDP(model, static_graph=static)
    return record_steps(model, (wrapped(data(step, 2, 4)).square().sum() for step in range(3)))


def reentrant_twice(static: bool) -> list[Record]:
    with ovpatch.applied("ddp"):
        return loop_reentrant_twice(static)


def test_a_second_contribution_is_an_error_without_static_graph_and_right_with_it(ranks):
    for text in ranks(2)(error_of, reentrant_twice, False):
        assert "ready only once" in text
        assert "twice.weight" in text or "twice.bias" in text
        assert "use_reentrant=False" in text
    compare(ranks(2)(loop_reentrant_twice), ranks(2)(reentrant_twice, True)).assert_bitwise()


def around_the_wrapper(fails_at: str) -> list[Record]:
    """Fail in a backward, then run a backward without the wrapper, which the hooks of both reducers see."""
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device()))
    for step in range(3):
        model.zero_grad()
        model(data(step, 4, 8)).square().mean().backward()
    output = model(data(3, 4, 8))
    watched = output if fails_at == "output" else model.module[0].weight
    handle = watched.register_hook(lambda grad: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        output.square().mean().backward()
    handle.remove()
    model.zero_grad()
    error = error_of(model.module(data(4, 4, 8)).square().mean().backward)
    return [{"fails": torch.tensor(error != "no error"), **seen(model)}]


def test_a_backward_around_the_wrapper_after_a_failed_one_is_counted_as_in_stock_pytorch(ranks):
    cases = {where: {"fails_at": where} for where in ("output", "first layer")}
    for result in ranks(2)(all_both, around_the_wrapper, cases):
        for name, case in result.items():
            compare(case["stock"], case["patched"]).assert_bitwise()
            assert bool(case["stock"][0]["fails"]) == (name == "first layer")

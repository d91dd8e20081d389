"""A second backward through a forward that was reduced before: reduced as well, or local as under stock."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch.overlap.comm.consensus import RankMismatchError
from tests.plugins.ddp.arms import Record, data, seen, table
from tests.plugins.ddp.checks import average_by_hand, check_cases, some
from tests.support.equality import compare

WORLDS = [2, 3]
TINY = 0.0001


class TwoHeads(nn.Module):
    """A stem and two heads, so that a loss may reach only a part of the parameters."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.main, self.aux = nn.Linear(8, 3), nn.Linear(8, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.reentrant:
            h = self.stem(x)
            return self.main(h), self.aux(h)
        h = checkpoint(self.stem, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.heads, h, use_reentrant=True)

    def heads(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.main(h), self.aux(h)


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[0].square().mean() + outputs[1].abs().mean()


Twice = Callable[[nn.Module, int, Callable[[], None]], None]


def retained(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    loss = loss_of(wrapped(data(step, 4, 6)))
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    losses = [loss_of(wrapped(data(step, 4, 6, micro=m))) for m in range(2)]
    for loss in losses:
        loss.backward()


def in_reverse(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    losses = [loss_of(wrapped(data(step, 4, 6, micro=m))) for m in range(2)]
    for loss in reversed(losses):
        loss.backward()


def zeroed_between(wrapped: nn.Module, step: int, zero: Callable[[], None]) -> None:
    loss = loss_of(wrapped(data(step, 4, 6)))
    loss.backward(retain_graph=True)
    zero()
    loss.backward()


def auxiliary(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    main, aux = wrapped(data(step, 4, 6))
    loss_of((main, aux)).backward(retain_graph=True)
    aux.square().sum().backward()


def auxiliary_alone(wrapped: nn.Module, step: int, zero: Callable[[], None]) -> None:
    """What the second loss does not reach has no gradient, before and after."""
    main, aux = wrapped(data(step, 4, 6))
    loss_of((main, aux)).backward(retain_graph=True)
    zero()
    aux.square().sum().backward()


def accumulated(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    with wrapped.no_sync() if isinstance(wrapped, DDP) else contextlib.nullcontext():
        loss_of(wrapped(data(step, 4, 6, micro=2))).backward()
    retained(wrapped, step, _zero)


def behind_a_local_one(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    loss = loss_of(wrapped(data(step, 4, 6)))
    loss.backward(retain_graph=True)
    with wrapped.no_sync() if isinstance(wrapped, DDP) else contextlib.nullcontext():
        loss_of(wrapped(data(step, 4, 6, micro=2))).backward()
    loss.backward()


def three_times(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    loss = loss_of(wrapped(data(step, 4, 6)))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


WAYS: dict[str, tuple[Twice, int]] = {
    "retained": (retained, 1),
    "two forwards": (two_forwards, 1),
    "in reverse": (in_reverse, 1),
    "zeroed between": (zeroed_between, 1),
    "auxiliary": (auxiliary, 1),
    "auxiliary alone": (auxiliary_alone, 1),
    "accumulated": (accumulated, 1),
    "behind a local one": (behind_a_local_one, 1),
    "three times": (three_times, 2),
}
STEPS = 3


def train(way: str, wrapped: nn.Module, model: nn.Module, *, by_hand: bool = False, set_to_none: bool = True) -> list:
    records = []
    for step in range(STEPS):
        WAYS[way][0](wrapped, step, lambda: wrapped.zero_grad(set_to_none=set_to_none))
        if by_hand:
            average_by_hand(model)
        records.append(seen(model))
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
        wrapped.zero_grad()
    return records


def by_hand_or_ours(way: str, ddp: dict[str, Any], reentrant: bool = False, **more: Any) -> list[Record]:
    """Where DistributedDataParallel is stock's, which leaves the second backward local, average by hand."""
    from ovpatch_plugins.ddp.grad_reducer import GradReducer

    model = TwoHeads(reentrant)
    wrapped = DDP(model, **ddp)
    if isinstance(wrapped.reducer, GradReducer):
        return train(way, wrapped, model, **more)
    local = copy.deepcopy(model)
    return train(way, local, local, by_hand=True, **more)


def require(results: list[dict[str, Any]], late: int) -> None:
    for result in results:
        compare(result["stock"], result["patched"]).assert_equal()
        compare(results[0]["patched"], result["patched"]).assert_bitwise()
        assert result["counters"]["late_backwards"] == STEPS * late
        assert result["counters"]["backwards"] == STEPS * (1 + late)
        assert result["counters"]["stock_models"] == result["counters"]["recovered"] == 0


def require_all(run: Any, ways: Collection[str], **axes: Any) -> list[dict[str, Any]]:
    """Train in some ways by hand and with the feature; ``three times`` has two late backwards a step."""
    found = []
    for late in (1, 2):
        chosen = [way for way in WAYS if way in ways and WAYS[way][1] == late]
        if chosen:
            cases = table(way=chosen, **axes)
            found += check_cases(run, by_hand_or_ours, cases, check=require, late=late)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_the_sum_of_both_backwards_is_averaged(ranks, world):
    ddp = [{}, {"bucket_cap_mb": TINY}, {"find_unused_parameters": True}]
    for name, case in require_all(ranks(world), WAYS, ddp=ddp)[0].items():
        if "auxiliary alone" in name:
            assert case["patched"][0]["grad"]["main.weight"] is None


def test_under_a_static_graph(ranks):
    # "accumulated" cannot begin under no_sync.
    require_all(ranks(2), WAYS.keys() - {"accumulated"}, ddp=[{"static_graph": True}])


def test_gradients_zeroed_in_place_between_the_backwards(ranks):
    ways = ["zeroed between", "auxiliary alone"]
    require_all(ranks(2), ways, ddp=[{"bucket_cap_mb": TINY}], set_to_none=[False])


@pytest.mark.parametrize("world", WORLDS)
def test_all_parameters_inside_reentrant_checkpoints(ranks, world):
    ways = ["retained", "two forwards", "in reverse", "zeroed between", "behind a local one", "three times"]
    require_all(ranks(world), ways, ddp=[{"bucket_cap_mb": TINY}] if world == 2 else [{}], reentrant=[True])


def loop(way: str, ddp: dict[str, Any]) -> list[Record]:
    model = TwoHeads()
    return train(way, DDP(model, **ddp), model)


def test_switched_off_the_second_backward_stays_local_as_under_stock(ranks):
    cases, off = table(way=WAYS, ddp=[{}, {"bucket_cap_mb": TINY}]), {"reduce_late_gradients": False}
    check_cases(ranks(2), loop, some(cases), options=off, backwards=STEPS)


def on_two_ranks_only() -> tuple[str, float]:
    with ovpatch.applied("ddp"):
        wrapped = DDP(TwoHeads(), process_group=dist.new_group(timeout=timedelta(seconds=3)))
        for step in range(2):
            loss = loss_of(wrapped(data(step, 4, 6)))
            loss.backward(retain_graph=True)
        begin, text = time.monotonic(), "alone"
        if dist.get_rank() != 2:
            with pytest.raises(RankMismatchError) as caught:
                loss.backward()
            text = str(caught.value)
        seconds = time.monotonic() - begin
        dist.barrier()
        return text, seconds


def test_a_second_backward_on_some_ranks_only_names_the_others_and_the_remedy(ranks):
    for text, seconds in ranks(3)(on_two_ranks_only)[:2]:
        assert "no reply from rank 2 within 3 s" in text
        assert "model.module(...)" in text
        assert "OVPATCH_DDP_REDUCE_LATE_GRADIENTS=0" in text
        assert seconds < 50


def on_one_rank_later() -> list[Record]:
    """Rank 1 comes to the second backward when rank 0 has waited for longer than for settings."""
    with ovpatch.applied("ddp", options={"ddp": {"agreement_timeout_s": 1.0}}):
        wrapped = DDP(TwoHeads())
        loss = loss_of(wrapped(data(0, 4, 6)))
        loss.backward(retain_graph=True)
        dist.barrier()
        time.sleep(2 * dist.get_rank())
        loss.backward()
        return [seen(wrapped.module)["grad"]]


def test_a_second_backward_waits_for_as_long_as_the_group_does(ranks):
    first, second = ranks(2)(on_one_rank_later)
    compare(first, second).assert_bitwise()

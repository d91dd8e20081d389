"""A second backward through a forward that was reduced before: reduced as well, or local as under stock."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch.insight.equality import compare
from ovpatch.overlap.comm.consensus import RankMismatchError
from tests.plugins.ddp.arms import Record, both, data, seen
from tests.plugins.ddp.checks import average_by_hand, check

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


def by_hand_and_ours(way: str, ddp: dict[str, Any], reentrant: bool = False, **more: Any) -> dict[str, Any]:
    from ovpatch_plugins.ddp.report import COUNTERS

    torch.manual_seed(0)
    model = TwoHeads(reentrant)
    local = copy.deepcopy(model)
    expected = train(way, local, local, by_hand=True, **more)
    with ovpatch.applied("ddp"):
        before = COUNTERS.as_dict()
        got = train(way, DDP(model, **ddp), model, **more)
        counters = {name: value - before[name] for name, value in COUNTERS.as_dict().items()}
    return {"by hand": expected, "ours": got, "counters": counters}


def require(results: list[dict[str, Any]], way: str) -> None:
    for result in results:
        compare(result["by hand"], result["ours"]).assert_equal()
        compare(results[0]["ours"], result["ours"]).assert_bitwise()
        assert result["counters"]["late_backwards"] == STEPS * WAYS[way][1]
        assert result["counters"]["backwards"] == STEPS * (1 + WAYS[way][1])
        assert result["counters"]["stock_models"] == result["counters"]["recovered"] == 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": TINY}, {"find_unused_parameters": True}], ids=str)
def test_the_sum_of_both_backwards_is_averaged(ranks, world, way, ddp):
    results = ranks(world)(by_hand_and_ours, way, ddp, timeout=30)
    require(results, way)
    if way == "auxiliary alone":
        assert results[0]["ours"][0]["grad"]["main.weight"] is None


@pytest.mark.parametrize("way", [way for way in WAYS if way != "accumulated"])  # which cannot begin under no_sync
def test_under_a_static_graph(ranks, way):
    require(ranks(2)(by_hand_and_ours, way, {"static_graph": True}, timeout=30), way)


@pytest.mark.parametrize("way", ["zeroed between", "auxiliary alone"])
def test_gradients_zeroed_in_place_between_the_backwards(ranks, way):
    require(ranks(2)(by_hand_and_ours, way, {"bucket_cap_mb": TINY}, set_to_none=False, timeout=30), way)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "way", ["retained", "two forwards", "in reverse", "zeroed between", "behind a local one", "three times"]
)
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": TINY}], ids=str)
def test_all_parameters_inside_reentrant_checkpoints(ranks, world, way, ddp):
    require(ranks(world)(by_hand_and_ours, way, ddp, reentrant=True, timeout=30), way)


def loop(way: str, ddp: dict[str, Any]) -> list[Record]:
    model = TwoHeads()
    return train(way, DDP(model, **ddp), model)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": TINY}], ids=str)
def test_switched_off_the_second_backward_stays_local_as_under_stock(ranks, world, way, ddp):
    check(ranks(world)(both, loop, way, ddp, options={"reduce_late_gradients": False}), backwards=STEPS)


def on_one_rank_only(who: int) -> tuple[str, float]:
    with ovpatch.applied("ddp"):
        wrapped = DDP(TwoHeads(), process_group=dist.new_group(timeout=timedelta(seconds=4)))
        for step in range(2):
            loss = loss_of(wrapped(data(step, 4, 6)))
            loss.backward(retain_graph=True)
        begin, text = time.monotonic(), "alone"
        if dist.get_rank() != who:
            with pytest.raises(RankMismatchError) as caught:
                loss.backward()
            text = str(caught.value)
        seconds = time.monotonic() - begin
        dist.barrier()
        return text, seconds


@pytest.mark.parametrize("who", [0, 2])
def test_a_second_backward_on_some_ranks_only_names_the_others_and_the_remedy(ranks, who):
    for rank, (text, seconds) in enumerate(ranks(3)(on_one_rank_only, who, timeout=40)):
        if rank != who:
            assert f"no answer from rank {who} within 4 s" in text
            assert "model.module(...)" in text
            assert "OVPATCH_DDP_REDUCE_LATE_GRADIENTS=0" in text
            assert seconds < 15


def on_one_rank_later(who: int) -> list[Record]:
    """One rank comes to the second backward when the others have waited for longer than for settings."""
    with ovpatch.applied("ddp", options={"ddp": {"agreement_timeout_s": 1.0}}):
        wrapped = DDP(TwoHeads())
        loss = loss_of(wrapped(data(0, 4, 6)))
        loss.backward(retain_graph=True)
        dist.barrier()
        time.sleep(7 if dist.get_rank() == who else 0)  # ranks but the first wait five seconds more
        loss.backward()
        return [seen(wrapped.module)["grad"]]


@pytest.mark.parametrize("who", [0, 1])
def test_a_second_backward_waits_for_as_long_as_the_group_does(ranks, who):
    first, second = ranks(2)(on_one_rank_later, who)
    compare(first, second).assert_bitwise()

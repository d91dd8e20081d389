"""A second backward through a forward that was reduced before: its gradients stay local, as in stock PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ovpatch
from tests.plugins.ddp.arms import Record, data, seen, table
from tests.plugins.ddp.checks import check_cases

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
    """Zero gradients before a second loss, so that parameters it does not reach have no gradient before and after."""
    main, aux = wrapped(data(step, 4, 6))
    loss_of((main, aux)).backward(retain_graph=True)
    zero()
    aux.square().sum().backward()


def accumulated(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
    with wrapped.no_sync() if isinstance(wrapped, DDP) else contextlib.nullcontext():
        loss_of(wrapped(data(step, 4, 6, micro=2))).backward()
    retained(wrapped, step, _zero)


def after_a_local_backward(wrapped: nn.Module, step: int, _zero: Callable[[], None]) -> None:
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


WAYS: dict[str, Twice] = {
    "retained": retained,
    "two forwards": two_forwards,
    "in reverse": in_reverse,
    "zeroed between": zeroed_between,
    "auxiliary": auxiliary,
    "auxiliary alone": auxiliary_alone,
    "accumulated": accumulated,
    "after a local backward": after_a_local_backward,
    "three times": three_times,
}
STEPS = 3


def loop(
    way: str, ddp: dict[str, Any], reentrant: bool = False, set_to_none: bool = True
) -> list[Record]:
    model = TwoHeads(reentrant)
    wrapped = DDP(model, **ddp)
    records = []
    for step in range(STEPS):
        WAYS[way](wrapped, step, lambda: wrapped.zero_grad(set_to_none=set_to_none))
        records.append(seen(model))
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_a_second_backward_through_one_forward_stays_local(ranks, world):
    ddp = [{}, {"bucket_cap_mb": TINY}, {"find_unused_parameters": True}]
    cases = table(way=WAYS, ddp=ddp)
    check_cases(ranks(world), loop, cases, backwards=STEPS)


def test_under_a_static_graph(ranks):
    # "accumulated" cannot begin under no_sync.
    ways = [way for way in WAYS if way != "accumulated"]
    check_cases(ranks(2), loop, table(way=ways, ddp=[{"static_graph": True}]), backwards=STEPS)


def test_gradients_zeroed_in_place_between_the_backwards(ranks):
    ways = ["zeroed between", "auxiliary alone"]
    cases = table(way=ways, ddp=[{"bucket_cap_mb": TINY}], set_to_none=[False])
    check_cases(ranks(2), loop, cases, backwards=STEPS)


def test_all_parameters_inside_reentrant_checkpoints(ranks):
    ways = [
        "retained",
        "two forwards",
        "in reverse",
        "zeroed between",
        "after a local backward",
        "three times",
    ]
    cases = table(way=ways, ddp=[{"bucket_cap_mb": TINY}], reentrant=[True])
    check_cases(ranks(2), loop, cases, backwards=STEPS)


@pytest.mark.parametrize("place", ["environment", "argument"])
def test_the_removed_option_that_averaged_them_is_refused_with_the_reason(monkeypatch, place):
    options: dict[str, Any] = (
        {"ddp": {"reduce_late_gradients": True}} if place == "argument" else {}
    )
    if place == "environment":
        monkeypatch.setenv("OVPATCH_DDP_REDUCE_LATE_GRADIENTS", "1")
    with pytest.raises(
        ovpatch.OptionError, match=r"no longer exists: .* stay local, as in stock"
    ) as caught:
        ovpatch.apply("ddp", options=options)
    assert str(caught.value).endswith(
        "Remove OVPATCH_DDP_REDUCE_LATE_GRADIENTS and the argument of that name."
    )

"""The first use of recomputed blocks inside of a mode of the script changes no later step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ovpatch
from ovpatch_plugins.recompute import recompute
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from tests.support.equality import compare
from tests.support.modes import FORWARD_ONLY, LEVELS, MODES

WIDTH = 12


class Block(nn.Module):
    """Two linears with dropout between them, batch norm, and a counter that the forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(WIDTH, 20),
            nn.Linear(20, WIDTH),
            nn.BatchNorm1d(WIDTH),
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training)
        result: Tensor = x + self.norm(self.down(hidden)) * (1 + 0.1 * self.calls)
        return result


def train(mode: str) -> list[dict[str, Any]]:
    """Train three steps; the first step is inside of the mode, or follows a forward in it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    recompute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        record: dict[str, Any] = {}
        if step == 0 and mode in FORWARD_ONLY:
            with MODES[mode]():
                before = model(x)
                # A fake tensor has a shape but no values.
                record["before"] = tuple(before.shape) if mode == "fake" else before.clone()
        with MODES[mode]() if step == 0 and mode not in FORWARD_ONLY else contextlib.nullcontext():
            loss = model(x).square().mean()
            loss.backward()
        record |= {"loss": loss.detach(), "random": torch.rand(1)}
        record |= {f"{name}.grad": param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        records.append(record | {name: value.clone() for name, value in model.state_dict().items()})
    return records


# Blocks that change buffers fail inside of a level; blocks that do not are in `TRANSFORMS`.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in LEVELS])
def test_the_first_use_inside_of_a_mode(mode: str) -> None:
    expected = train(mode)
    with ovpatch.applied("recompute"):
        before = COUNTERS.as_dict()
        found = train(mode)
        counted = {name: value - before[name] for name, value in COUNTERS.as_dict().items()}
    compare(expected, found).assert_bitwise()
    assert counted["calls"] == (12 if mode == "fake" else 9), counted


# Other features and schedules fail in stock PyTorch inside of these, as their functions have no rules for them.
TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones_like(x)),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x[0]),
}


class Stateless(nn.Module):
    """Two linears; transforms refuse a forward that changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def transform_and_train(transform: str) -> list[Any]:
    """Transform the model before each of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Stateless() for _ in range(3)))
    recompute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        records.append(TRANSFORMS[transform](model, x))
        model(x).square().mean().backward()
        records.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return records


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functorch_transforms_between_steps(transform: str) -> None:
    expected = transform_and_train(transform)
    with ovpatch.applied("recompute"):
        before = COUNTERS.recomputations
        found = transform_and_train(transform)
        recomputed = COUNTERS.recomputations - before
    compare(expected, found).assert_bitwise()
    assert recomputed == 9

"""Gradients whose memory other code uses during the backward. A reviewer found them corrupted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record, data, record_steps, reduced_in_place, table
from tests.plugins.ddp.checks import check_cases

# In MiB. Every gradient gets its own bucket.
TINY = 0.0001


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])


class Kept(torch.autograd.Function):
    """A function that returns a view of a tensor that it keeps as the gradient of its weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, kept: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.kept, ctx.x = kept, x
        ctx.shape = weight.shape
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.kept.append(grad.sum().expand(ctx.shape).contiguous())
        return grad, ctx.kept[-1].view_as(ctx.kept[-1]), None


class Reader(torch.autograd.Function):
    """A function that reads the tensor that :class:`Kept` keeps, later in the same backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, kept: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.kept, ctx.shape = kept, weight.shape
        return x * weight.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        value = ctx.kept[-1].mean()
        ctx.kept.clear()
        return grad, value.expand(ctx.shape).clone(), None


class Workspace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(16, 16)),
            nn.Parameter(torch.randn(16, 16)),
        )
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Kept.apply(Reader.apply(x, self.second, self.kept), self.first, self.kept)


class Conjugate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight.conj().mT + self.bias.conj()


class Tagged(torch.Tensor):
    """A subclass with torch's default ``__torch_function__``."""


def tagged() -> nn.Sequential:
    model = net()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Tagged))
    return model


MODELS = {"kept in Python": Workspace, "conjugates": Conjugate, "subclass": tagged}


@reduced_in_place
def loop_model(name: str, ddp: dict[str, Any]) -> list[Record]:
    model = MODELS[name]()
    wrapped = DDP(model, **ddp)
    losses = (wrapped(data(step, 4, 16)).abs().square().mean() for step in range(4))
    return record_steps(model, losses, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("world", [2, 3])
def test_models_with_odd_gradients(ranks, world):
    cases = table(
        name=MODELS,
        ddp=[{"bucket_cap_mb": TINY}, {"find_unused_parameters": True}, {"static_graph": True}],
    )
    check_cases(ranks(world), loop_model, cases, backwards=4)

"""The loops of other tests, with their models under bf16 autocast and their parameters read less often."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.plugins.ddp.arms import Record, device
from tests.plugins.dist_optimizer import checks
from tests.plugins.dist_optimizer.checks import params
from tests.plugins.dist_optimizer.test_loops import net

OPTIONS = {"param_dtype": "bf16"}


def autocast(**kwargs: Any) -> torch.autocast:
    return torch.autocast(device().type, torch.bfloat16, **kwargs)


class Net(nn.Sequential):
    """A model that opens its own context, and can be pickled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return super().forward(x).float()


def cast_net() -> nn.Module:
    return Net(*net())


def cast_ddp(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Wrap a model whose forward is replaced, as accelerate does it."""
    forward = model.forward

    @functools.wraps(forward)
    def under_autocast(*args: Any) -> torch.Tensor:
        with autocast():
            return forward(*args).float()

    if not isinstance(model, Net):
        model.forward = under_autocast
    return checks.ddp(model, **kwargs)


def read_at_the_end(module: ModuleType, loop: str, **kwargs: Any) -> list[Record]:
    """Run a loop of a test module; what it says of parameters is left out, but for the last, and its once third."""
    read: list[nn.Module] = []

    def seldom(model: nn.Module) -> Record:
        read.append(model)
        return params(model) if len(read) == 3 else {}

    with mock.patch.object(module, "ddp", cast_ddp), mock.patch.object(module, "params", seldom):
        records: list[Record] = getattr(module, loop)(**kwargs)
    return [*records, *map(params, dict.fromkeys(read))]

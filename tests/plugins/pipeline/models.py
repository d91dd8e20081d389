"""Modules of stages, in the variants that a deferred weight gradient must support."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 12, 3


class Block(nn.Module):
    """A residual block: norm, two linears and, by option, dropout and a checkpoint.

    Attributes:
        runs: Forwards so far, including recomputations.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        reentrant: bool | None = None,
        *,
        width: int = WIDTH,
        hidden: int = 20,
    ) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout, self.reentrant = dropout, reentrant
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self._compute(x)
        result: Tensor = checkpoint(self._compute, x, use_reentrant=self.reentrant)
        return result

    def _compute(self, x: Tensor) -> Tensor:
        self.runs += 1
        h = torch.tanh(self.up(self.norm(x)))
        result: Tensor = x + self.down(F.dropout(h, self.dropout, self.training))
        return result


class Part(nn.Module):
    """The blocks of one stage."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Autocast(nn.Module):
    """A module under autocast."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, **self.options):
            result: Tensor = self.inner(x).float()
            return result


class Raw(nn.Module):
    """Linears without anything before them: the first one's input needs no gradient on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Variant(nn.Module):
    """Three linears; the middle one, ``b``, is used in the way that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b, self.c = (
            nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, True, False)
        )
        if kind == "tied":
            self.c.weight = self.b.weight
        if kind == "frozen":
            self.b.weight.requires_grad_(False)
            self.c.requires_grad_(False)
        if kind == "batch norm":
            self.bn = nn.BatchNorm1d(WIDTH)
        if kind == "adapter":
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            self.a.requires_grad_(False)
        if kind == "compiled inside":
            self.b.compile(backend="aot_eager")
        if kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 2)
        if kind == "weight norm":
            self.b = nn.utils.parametrizations.weight_norm(self.b)

    def forward(self, x: Tensor) -> Tensor:
        kind, x = self.kind, self.norm(x)
        h = torch.tanh(self.a(x))
        if kind == "adapter":
            h = h + self.up(self.down(x))
        if kind == "read elsewhere":
            h = h + F.linear(x, self.b.weight)
        if kind == "read in a reentrant checkpoint":
            h = h + checkpoint(
                lambda x: torch.tanh(F.linear(x, self.b.weight)), h, use_reentrant=True
            )
        if kind == "called twice":
            h = h + self.b(torch.relu(self.b(h)))
        h = self._middle(h)
        if kind == "batch norm":
            h = self.bn(h.flatten(0, 1)).view_as(h)
        if kind == "attention":
            h = self.attention(h, h, h)[0]
        result: Tensor = x + self.c(h)
        return result

    def _middle(self, h: Tensor) -> Tensor:
        kind = self.kind
        if kind == "transposed":
            h = self.c(self.b(h.transpose(0, 1)).transpose(0, 1))
        elif kind == "four dimensions":
            h = self.b(h.view(h.shape[0], 1, h.shape[1], -1)).view_as(h)
        else:
            h = self.b(h)
        if kind == "in place":
            h = h.relu_()
        if kind == "expanded gradient":
            h = h.sum(0, keepdim=True).expand_as(h) * 0.1 + h
        if kind == "output hook" and h.requires_grad:
            h.register_hook(lambda grad: grad * 1.5)
        return h


VARIANTS = (
    "tied",
    "frozen",
    "batch norm",
    "adapter",
    "read elsewhere",
    "called twice",
    "transposed",
    "four dimensions",
    "in place",
    "expanded gradient",
    "output hook",
    "attention",
    "weight norm",
)


def make_blocks(_index: int) -> nn.Module:
    """Return two plain blocks."""
    return Part(Block(), Block())

"""A decoder whose blocks have all that a recomputation must repeat, and records of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, LENGTH = 16, 2, 6


class Block(nn.Module):
    """A block of attention and two linears; ``kind`` names its additional behavior.

    Attributes:
        runs: Forwards so far. A compiler breaks its graph at the counter, unless the kind is "uncounted".
    """

    def __init__(self, kind: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout, self.runs = kind, dropout, 0
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        if kind == "batch norm":
            self.bn = nn.BatchNorm1d(WIDTH, momentum=0.3)
        if kind == "counted":
            self.register_buffer("calls", torch.zeros(()))
        if kind == "replaced":
            self.register_buffer("calls", torch.zeros(()))
        if kind == "spectral":
            self.up = nn.utils.parametrizations.spectral_norm(self.up)
        if kind == "frozen":
            self.qkv.requires_grad_(False)
            self.norm.requires_grad_(False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], *, mask: Tensor | None = None
    ) -> Any:
        if self.kind != "uncounted":
            self.runs += 1
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, -1)
        q, k = ((part * rotary[0] + part.flip(-1) * rotary[1]).to(v.dtype) for part in (q, k))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        h = x + F.dropout(h.transpose(1, 2).reshape(x.shape), self.dropout, self.training)
        if self.kind == "batch norm":
            h = self.bn(h.flatten(0, 1)).view_as(h)
        if self.kind in ("counted", "replaced"):
            h = h * (1 + 0.1 * self.calls)
            if self.kind == "counted":
                self.calls += 1
            else:
                self.calls = self.calls + 1
        if self.kind == "checkpoint inside":
            return h + checkpoint(self._feed, h, use_reentrant=False)
        if self.kind == "several outputs":
            return h + self._feed(h), [h.mean()]
        return h + self._feed(h)

    def _feed(self, h: Tensor) -> Tensor:
        result: Tensor = self.down(F.dropout(F.gelu(self.up(h)), self.dropout, self.training))
        return result


class Derived(Block):
    """A block whose forward scales the forward of its base."""

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], *, mask: Tensor | None = None
    ) -> Any:
        return 0.5 * super().forward(x, rotary, mask=mask)


Call = Callable[..., Any]


def plain_call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)


class Decoder(nn.Module):
    """Blocks between two linears.

    Args:
        make: Makes a block.
        layers: Their number.
        call: Calls a block, for example in a checkpoint, as scripts do.
    """

    def __init__(
        self, make: Callable[[], nn.Module] = Block, layers: int = 3, call: Call = plain_call
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.linspace(0, 1, LENGTH).view(LENGTH, 1)
        rotary = angles.cos(), angles.sin()
        h, more = self.enter(x), []
        for index, layer in enumerate(self.layers):
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if index == 1 else None
            h = self.call(layer, h, rotary, mask=mask)
            if isinstance(h, tuple):
                h, terms = h
                more += terms
        result: Tensor = self.head(h) + sum(more)
        return result


def data(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def record(model: nn.Module, *more: Tensor) -> list[Tensor | None]:
    """Return copies of all tensors that a step leaves, and the next random number."""
    found = [
        *more,
        torch.rand(2),
        *model.buffers(),
        *(param.grad for param in model.parameters()),
        *model.parameters(),
    ]
    return [None if tensor is None else tensor.detach().clone() for tensor in found]


def count_differences(a: list[Any], b: list[Any]) -> int:
    """Return the number of tensors in which two runs differ by a bit."""
    assert len(a) == len(b)
    pairs = zip(a, b, strict=True)
    return sum(
        (x is None) != (y is None) or (x is not None and not torch.equal(x, y)) for x, y in pairs
    )

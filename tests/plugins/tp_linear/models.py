"""Small models, and the plans by which scripts cut them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH = 24


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 48, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=bias)
        self.w3 = nn.Linear(width, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, width, bias=bias)
        self.v = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (
            linear(x).view(batch, length, -1, self.size).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        h = torch.nn.functional.scaled_dot_product_attention(q * scale, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias)
        self.mlp = Gated(width, 2 * width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), 1.0)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A model of embedding, blocks, norm and head, as plans for sequence parallelism cut it."""

    def __init__(
        self,
        *,
        layers: int = 2,
        width: int = WIDTH,
        heads: int = 12,
        words: int = 48,
        bias: bool = True,
    ):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallel_llama(
    model: Llama, mesh: Any, *, loss_parallel: bool = False, local: bool = False
) -> Llama:
    """Cut a model as torchtitan's plan does: the sequence between linears, and heads and features inside of them."""
    cut, replicated = Shard(1), Replicate()
    outer = {
        "words": RowwiseParallel(input_layouts=replicated, output_layouts=cut),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=cut,
            output_layouts=Shard(-1) if loss_parallel else replicated,
            use_local_output=not loss_parallel,
        ),
    }
    inner = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(cut, None),
            desired_input_layouts=(replicated, None),
            use_local_output=local,
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=cut),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(cut,), desired_input_layouts=(replicated,), use_local_output=local
        ),
        "mlp.w1": ColwiseParallel(),
        "mlp.w3": ColwiseParallel(),
        "mlp.w2": RowwiseParallel(output_layouts=cut),
    }
    parallelize_module(model, mesh, outer)
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)
    return model

"""Decoder-only transformers for tensor parallelism: Llama's and GPT's, on random data.

Attention and feed-forward are separate modules, so that a plan can all-gather once for the linears in them; the
``GPT`` of :mod:`benchmarks.models` has its projections in the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Shape:
    """A model, and the sequences that it is trained on.

    Attributes:
        width: Features of the residual stream.
        layers: Blocks.
        heads: Of queries.
        groups: Heads of keys and values, each for as many heads of queries.
        hidden: Features inside the feed-forward.
        vocabulary: Words.
        context: Tokens of a sequence.
        batch: Sequences in a step and replica.
        llama: RMSNorm, rotary positions and a gated feed-forward; otherwise LayerNorm, learned positions and GELU.
    """

    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    context: int
    batch: int
    llama: bool = True


SIZES = {
    "8b": Shape(4096, 32, 32, 8, 14336, 128256, 8192, 1),
    "3.8b": Shape(3072, 32, 32, 32, 12288, 50264, 1024, 4, llama=False),
    "tiny": Shape(64, 2, 8, 4, 192, 512, 64, 2),
    "tiny-gpt": Shape(64, 2, 8, 8, 256, 512, 64, 2, llama=False),
}


class Attention(nn.Module):
    """Causal self-attention; how many heads a rank has follows from its features."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, shape.groups * self.head_width, bias=False)
        self.wv = nn.Linear(shape.width, shape.groups * self.head_width, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linears around a GELU, or three with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False) if shape.llama else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        return self.w2(F.gelu(self.w1(x)) if self.w3 is None else F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.llama else nn.LayerNorm
        self.attention_norm, self.attention = norm(shape.width), Attention(shape)
        self.ffn_norm, self.feed_forward = norm(shape.width), FeedForward(shape)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Tokens to logits.

    Args:
        shape: Its sizes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.llama else nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, length, vocabulary]`` of ``tokens``, ``[batch, length]`` of int64."""
        x, rotation, places = (
            self.tokens(tokens),
            None,
            torch.arange(tokens.shape[1], device=tokens.device),
        )
        if self.positions is None:
            rotation = angles(places, self.shape.width // self.shape.heads)
        else:
            x = x + self.positions(places)
        for block in self.blocks:
            x = block(x, rotation)
        return self.output(self.norm(x))


def angles(places: Tensor, head_width: int) -> Tensor:
    """Return cosines and sines of rotary positions, ``[2, length, head_width / 2]``."""
    frequencies = 500000.0 ** -(torch.arange(0, head_width, 2, device=places.device) / head_width)
    turned = torch.outer(places, frequencies)
    return torch.stack([turned.cos(), turned.sin()])


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn queries or keys, ``[batch, heads, length, head_width]``, by their positions."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def flops_per_step(shape: Shape, tokens: int) -> float:
    """Return model FLOPs of one forward and backward over ``tokens`` tokens: 6 per weight and token, plus attention.

    Weights of linears count; attention counts the causal half.
    """
    with torch.device("meta"):
        linears = [module for module in Decoder(shape).modules() if isinstance(module, nn.Linear)]
    weights = sum(linear.weight.numel() for linear in linears)
    return tokens * (6.0 * weights + 6 * shape.layers * shape.context * shape.width)


def parameters(shape: Shape) -> int:
    """Return how many parameters a model has."""
    with torch.device("meta"):
        return sum(param.numel() for param in Decoder(shape).parameters())


# ---------------------------------------------------------------- over ranks


def cut(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut heads, features and words over the ranks of a mesh, and between them the sequence; logits stay cut."""
    sequence, replicated = Shard(1), Replicate()
    model_plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=replicated, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if model.positions is not None:
        model_plan["positions"] = RowwiseParallel(input_layouts=replicated, output_layouts=Shard(0))
    block_plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(sequence, None), desired_input_layouts=(replicated, None)
        ),
        **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(sequence,), desired_input_layouts=(replicated,)
        ),
        **{
            f"feed_forward.{name}": ColwiseParallel()
            for name in (("w1", "w3") if model.shape.llama else ("w1",))
        },
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
    }
    parallelize_module(model, mesh, model_plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)


def alone(model: Decoder, ranks: int) -> None:
    """Leave of a model what one of ``ranks`` computes, with copies on the device where :func:`cut` has collectives.

    Instead of gathering, a rank repeats its own part; instead of reducing and scattering, it takes its own part.
    Targets must be below the number of remaining words, ``model.output.out_features``.
    """

    def gathers(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0].repeat(1, ranks, 1), *args[1:]

    def scatters(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.narrow(-2, 0, output.shape[-2] // ranks)

    def looks_up(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] % module.num_embeddings,)

    for name, module in model.named_modules():
        leaf, rows = name.rpartition(".")[2], isinstance(module, nn.Embedding)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            dim = 1 if leaf in ("wo", "w2") else 0
            module.weight = nn.Parameter(module.weight.detach().chunk(ranks, dim)[0].clone())
        if rows:
            module.num_embeddings //= ranks
            module.register_forward_pre_hook(looks_up)
        elif leaf == "output":
            module.out_features //= ranks
        if rows or leaf in ("wo", "w2"):
            module.register_forward_hook(scatters)
        if isinstance(module, (Attention, FeedForward)) or leaf == "output":
            module.register_forward_pre_hook(gathers)

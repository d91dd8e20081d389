"""The GPT that benchmarks train: plain torch modules, no dropout, random data."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {
    "3.8b": {"width": 3072, "layers": 32, "heads": 32, "vocabulary": 50264, "context": 1024},
    "2b": {"width": 3072, "layers": 16, "heads": 32, "vocabulary": 50264, "context": 1024},
    "1b": {"width": 2048, "layers": 16, "heads": 16, "vocabulary": 50264, "context": 1024},
    "0.4b": {"width": 1024, "layers": 24, "heads": 16, "vocabulary": 50264, "context": 1024},
    "tiny": {"width": 128, "layers": 2, "heads": 4, "vocabulary": 512, "context": 64},
}


class Block(nn.Module):
    """Pre-norm transformer block with separate projections, as user code has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        h = self.norm1(x)
        projections = (layer(h) for layer in (self.query, self.key, self.value))
        q, k, v = (h.unflatten(-1, (self.heads, -1)).transpose(1, 2) for h in projections)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer; forward returns the mean cross entropy."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of ``tokens`` against ``targets``, both ``[batch, length]`` of int64."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def flops_per_step(model: GPT, tokens: int, context: int) -> float:
    """Return model FLOPs of one forward and backward over ``tokens`` tokens: 6 per weight and token, plus attention.

    Embedding tables look up and do not multiply; attention counts the causal half.
    """
    weights = (
        sum(p.numel() for p in model.parameters())
        - model.token.weight.numel()
        - model.position.weight.numel()
    )
    attention = 6 * len(model.blocks) * context * model.token.embedding_dim
    return tokens * (6.0 * weights + attention)

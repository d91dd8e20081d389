"""Plain models that are cut into stages: of transformers, in tiny configurations, and a script's own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, CONTEXT = 32, 8


class Decoder(nn.Module):
    """A decoder as scripts write it: learned positions read directly, dropout before the blocks, a tied head.

    Args:
        tied: Whether the head is the embedding.
        dropout: Behind the embedding and in the blocks.
        residuals: ``inside`` the blocks or ``outside``, in the loop.
    """

    def __init__(self, tied: bool = False, dropout: float = 0.0, residuals: str = "inside", layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.positions = nn.Parameter(torch.randn(CONTEXT, 16))
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(DecoderBlock(dropout, residuals == "inside") for _ in range(layers))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.residuals = residuals
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x, mask) if self.residuals == "inside" else x + layer(x, mask)
        result: Tensor = self.head(self.norm(x))
        return result


class DecoderBlock(nn.Module):
    """A feed-forward block whose state is masked."""

    def __init__(self, dropout: float, residual: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.drop, self.residual = nn.Dropout(dropout), residual

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        h = h if mask is None else h * mask.unsqueeze(-1)
        return x + h if self.residual else h


class Skipping(Decoder):
    """Its last block also reads what the first one returned."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = [self.embed(ids)]
        for index, layer in enumerate(self.layers):
            seen.append(layer(seen[-1], mask if index < 4 else seen[1].mean(-1)))
        x = seen[-1]
        result: Tensor = self.head(self.norm(x))
        return result


class Reused(Decoder):
    """Its embedding is added again behind the blocks, and a trainable table is given to all of them."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, scale = self.embed(ids), torch.sigmoid(self.positions[: ids.shape[1], 0])
        for layer in self.layers:
            x = layer(x, scale.expand(ids.shape))
        result: Tensor = self.head(self.norm(x) + self.embed(ids))
        return result


def make_hf(kind: str, dropout: float = 0.0, tied: bool = False, layers: int = 4) -> nn.Module:
    """Return a tiny model of transformers."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "attention_dropout": dropout,
        "tie_word_embeddings": tied,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    if kind == "GPTNeoX":
        sizes |= {"hidden_dropout": dropout, "num_key_value_heads": 2}
    if kind == "GPT2":
        sizes = {
            "vocab_size": WORDS,
            "n_embd": 16,
            "n_layer": layers,
            "n_head": 2,
            "n_positions": 32,
            "use_cache": False,
        }
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        sizes |= {"tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": None}
        config, cls = transformers.GPT2Config(**sizes), transformers.GPT2LMHeadModel
    else:
        config = getattr(transformers, f"{kind}Config")(**sizes)
        cls = getattr(transformers, f"{kind}ForCausalLM")
    made: nn.Module = cls(config)
    with contextlib.suppress(AttributeError):
        del nn.Module.smart_apply  # type: ignore[attr-defined]  # transformers leaves it there
    return made


def language_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next words."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def differ(where: str, one: Tensor | None, other: Tensor | None, tolerance: float) -> list[str]:
    """Return how a tensor differs from another one by more than a part of the largest value; 0: by any bit."""
    if one is None or other is None:
        return [] if one is other else [f"{where}: {one} and {other}"]
    difference = (one - other).abs().max().item()
    limit = tolerance * max(1.0, other.abs().max().item()) if tolerance else 0.0
    return [] if one.shape == other.shape and difference <= limit else [f"{where}: {difference}"]

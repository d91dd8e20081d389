"""Plain models that are cut into stages: tiny models of transformers, and models as scripts write them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, CONTEXT = 32, 8


class Decoder(nn.Module):
    """A decoder as scripts write it, with learned positions, dropout before the blocks, and perhaps a tied head.

    Args:
        tied: Whether the head is the embedding.
        dropout: The probability after the embedding and in the blocks.
        residuals: ``inside`` the blocks or ``outside``, in the loop.
    """

    def __init__(
        self, tied: bool = False, dropout: float = 0.0, residuals: str = "inside", layers: int = 5
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.positions = nn.Parameter(torch.randn(CONTEXT, 16))
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            DecoderBlock(dropout, residuals == "inside") for _ in range(layers)
        )
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
    """A decoder whose last block also reads the output of the first one."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = [self.embed(ids)]
        for index, layer in enumerate(self.layers):
            seen.append(layer(seen[-1], mask if index < 4 else seen[1].mean(-1)))
        x = seen[-1]
        result: Tensor = self.head(self.norm(x))
        return result


class Reused(Decoder):
    """A decoder that adds its embedding again after the blocks and gives a trainable table to all blocks."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, scale = self.embed(ids), torch.sigmoid(self.positions[: ids.shape[1], 0])
        for layer in self.layers:
            x = layer(x, scale.expand(ids.shape))
        result: Tensor = self.head(self.norm(x) + self.embed(ids))
        return result


class Skewed(Decoder):
    """A decoder whose blocks pass on transposed tensors; all stages read a weight of its embedding."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = (
            self.drop(self.embed(ids) + self.positions[: ids.shape[1]])
            .to(self.embed.weight.dtype)
            .transpose(0, 1)
        )
        for layer in self.layers:
            x = layer(x, mask)
        result: Tensor = self.head(self.norm(x.transpose(0, 1)))
        return result


class Indexed(Decoder):
    """A decoder whose blocks also pass on indices, such as the positions that a sparse attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(IndexedBlock(0.0, True) for _ in range(5))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, indices = self.embed(ids), ids.argsort(1)
        for layer in self.layers:
            x, indices = layer(x, indices)
        result: Tensor = self.head(self.norm(x))
        return result


class IndexedBlock(DecoderBlock):
    """A block that reads its input at indices."""

    def forward(self, x: Tensor, indices: Tensor) -> Any:
        read = x.gather(1, indices.unsqueeze(-1).expand_as(x))
        return super().forward(x + read, None), indices.flip(1)


class Stateful(Decoder):
    """A decoder whose blocks have counters, caches, running statistics, generators and hooks.

    Args:
        shared: The object that all blocks share: ``counter``, ``generator`` or none.
    """

    def __init__(self, shared: str = "") -> None:
        super().__init__()
        counter, generator = [0], torch.Generator().manual_seed(7)
        self.layers = nn.ModuleList(
            StatefulBlock(
                counter if shared == "counter" else [0],
                generator if shared == "generator" else torch.Generator().manual_seed(index),
            )
            for index in range(5)
        )
        for layer in self.layers:
            layer.register_forward_hook(lambda module, _, output: output * module.scale)


class StatefulBlock(DecoderBlock):
    """A block whose output depends on the number of its calls."""

    def __init__(self, counter: list[int], generator: torch.Generator) -> None:
        super().__init__(0.0, True)
        self.counter, self.generator, self.calls, self.scale = counter, generator, 0, 1.1
        self.register_buffer("mean", torch.zeros(()))
        self.batch_norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.calls += 1
        self.counter.append(self.counter[-1] + 1)
        self.mean.mul_(0.9).add_(0.1 * x.detach()[0, 0, 0])
        noise = torch.randn(x.shape[-1:], generator=self.generator)
        change = self.mean + self.calls % 3 + self.counter[-1] % 5
        result = super().forward(x, mask) + 0.1 * (change * torch.linspace(0, 1, 16) + noise)
        return self.batch_norm(result.flatten(0, -2)).view_as(result)


class Habitual(Decoder):
    """A decoder whose blocks have habits of scripts.

    Args:
        habits: Of each block, some of :data:`HABITS`.
        dropout: The probability after the embedding and in the blocks.
    """

    def __init__(self, habits: Sequence[str], dropout: float = 0.0, layers: int = 5) -> None:
        super().__init__(dropout=dropout, layers=0)
        self.layers = nn.ModuleList(HabitualBlock(habits, dropout, seed) for seed in range(layers))


class HabitualBlock(DecoderBlock):
    """A block that draws numbers, counts, keeps values, or skips itself in training."""

    def __init__(self, habits: Sequence[str], dropout: float, seed: int) -> None:
        super().__init__(dropout, True)
        self.habits, self.calls, self.seen = tuple(habits), 0, list[Tensor]()
        self.generator = torch.Generator().manual_seed(seed)
        self.register_buffer("mean", torch.zeros(()))
        if "forward hook" in habits:
            self.register_forward_hook(lambda module, _, output: output * (1 + 0.1 * module.calls))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.calls += 1
        change: Any = 0.0
        for habit in self.habits:
            if habit in _DRAWS:
                change = change + _DRAWS[habit](self, x)
        if "layer drop" in self.habits and self.training and torch.rand([]) < 0.4:
            return x + 0.1 * change
        return super().forward(x * (1 + 0.1 * change), mask)


def _cache(block: HabitualBlock, x: Tensor) -> Tensor:
    block.seen.append(x.detach().mean())
    return torch.stack(block.seen[-3:]).mean()


def _average(block: HabitualBlock, x: Tensor) -> Tensor:
    block.mean.mul_(0.9).add_(0.1 * x.detach().mean())
    return block.mean.clone()


# Functions of a block and its input.
_DRAWS: dict[str, Any] = {
    "generator": lambda block, x: torch.randn(x.shape[-1:], generator=block.generator),
    "Python": lambda block, x: random.random() * block.training,
    "numpy": lambda block, x: float(numpy.random.randn()) * block.training,
    "counter": lambda block, x: block.calls % 5,
    "cache": _cache,
    "average": _average,
}

HABITS = (*_DRAWS, "forward hook", "layer drop")


class Training(Decoder):
    """A decoder that computes in training other values than in evaluation.

    Args:
        way: ``noise``: all blocks get noise of the model. ``gated noise``: they get it through a gate that starts at
            zero. ``reads``: the later blocks read the output of the first one. ``writes``: the forward writes a
            parameter, in evaluation too. ``drops below`` and ``drops above``: it calls all blocks, and drops results
            of some at small or at large random numbers.
        layerdrop: The probability with which the forward skips a block.
    """

    def __init__(self, way: str = "", layerdrop: float = 0.0) -> None:
        super().__init__()
        self.way, self.layerdrop = way, layerdrop
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if self.way == "writes":
            self.positions.data.mul_(1.0), self.positions.detach().mul_(0.5)
        if self.training and self.way == "noise":
            mask = torch.rand(ids.shape)
        if self.training and self.way == "gated noise":
            mask = 1 + self.gate * torch.rand(ids.shape)
        for index, layer in enumerate(self.layers):
            number = torch.rand([]) if self.training else torch.tensor(0.5)
            is_dropped = (
                number > 1 - self.layerdrop
                if self.way == "drops above"
                else number < self.layerdrop
            )
            if is_dropped and not self.way.startswith("drops"):
                continue
            result = layer(x, mask)
            x = x + 0 * result if is_dropped else result
            if self.training and self.way == "reads" and not index:
                mask = x.detach().mean(-1)
        output: Tensor = self.head(self.norm(x + self.positions[: ids.shape[1]]))
        return output


class Changing(Decoder):
    """A decoder whose forward may start to change hidden states between its blocks, after it was cut.

    Attributes:
        way: What the forward does before block ``at``, or with the block before it; a key of :data:`CHANGES`, or none.
        at: The block.
        mode: Whether it does so in training, in evaluation, or in both if None.
    """

    def __init__(self, layers: int = 6) -> None:
        super().__init__(layers=layers)
        self.way, self.at = "", 0
        self.mode: bool | None = None

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        way = self.way if self.mode in (None, self.training) else ""
        order = list(range(len(self.layers)))
        if way == "swap":
            order[self.at - 1 : self.at + 1] = self.at, self.at - 1
        elif way == "twice before":
            order.insert(self.at, self.at - 1)
        elif way == "twice after":
            order.insert(self.at, self.at)
        elif way == "skip":
            order.remove(self.at - 1)
        seen = x
        for index in order:
            if index == self.at and way in CHANGES:
                x = CHANGES[way](x, seen)
            seen = x
            if index == self.at and way == "keyword":
                x = self.layers[index](x=x, mask=mask)
            else:
                x = self.layers[index](x, mask)
        result: Tensor = self.head(self.norm(x))
        return result


def _change_in_place(x: Tensor, _seen: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


# Functions of the output and the input of the last block, which return the next block's input.
CHANGES: dict[str, Any] = {
    "scale": lambda x, _seen: 2 * x,
    "add noise": lambda x, _seen: x + torch.rand_like(x),
    "replace": lambda x, _seen: torch.ones_like(x),
    "drop": lambda _x, seen: seen,
    "cancel": lambda x, seen: seen + 0 * x,
    "clamp large values": lambda x, _seen: x.clamp(-0.01, 0.01) if x.abs().max() > 0.01 else x,
    "write": _change_in_place,
    "detach": lambda x, _seen: x.detach(),
}


class Seeing(nn.Module):
    """A model that reads pictures and text, as models of transformers do.

    The forward calls a part of a module without the module, before it and after it, and reads the dtype of a tower from
    its parameters. The tower's forward depends on values, and its first call registers hooks. The forward also reads
    the parameters of a tower that it does not call, such as a tower for sounds, which this batch does not have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tower, self.ears = (
            Embedded(),
            Tower(),
            nn.Sequential(nn.Linear(3, 16), nn.Tanh()),
        )
        self.project = nn.Linear(16, 16)

    def forward(self, ids: Tensor, pictures: Tensor, sizes: Tensor) -> Tensor:
        x = self.text.embed(ids).to(next(self.ears.parameters()).dtype)
        states = self.tower(pictures.to(next(self.tower.parameters()).dtype), sizes)
        seen = self.project(self.tower.norm(states[-2]))
        result: Tensor = self.text(x + seen.mean(1, keepdim=True))
        return result


class Embedded(Decoder):
    """A decoder that reads embedded words."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        result: Tensor = self.head(self.norm(x))
        return result


class Tower(nn.Module):
    """A tower that returns the hidden states of pictures, which its hooks collect."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 16)
        self.layers = nn.ModuleList(DecoderBlock(0.0, True) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.has_hooks = False

    def forward(self, pictures: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        if not self.has_hooks:
            self.has_hooks = True
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, output: STATES.append(output))
        STATES.clear()
        x = self.project(pictures)
        for layer in self.layers:
            x = layer(x, None)
        return (
            *STATES,
            torch.stack([row[:size].mean(0) for row, size in zip(x, sizes.tolist(), strict=True)]),
        )


STATES: list[Tensor] = []


class Named(nn.Module):
    """A model in an attribute named ``module``, like the model of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Decoder()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.module(ids)
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
    return made


def language_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next words."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def differ(where: str, found: Tensor | None, wanted: Tensor | None, tolerance: float) -> list[str]:
    """Describe how a tensor differs from another one by more than a part of the largest value; 0: by any bit."""
    if found is None or wanted is None:
        return [] if found is wanted else [f"{where}: {found} and {wanted}"]
    difference = (found - wanted).abs().max().item()
    limit = tolerance * max(1.0, wanted.abs().max().item()) if tolerance else 0.0
    is_equal = found.shape == wanted.shape and difference <= limit
    return [] if is_equal else [f"{where}: {difference}"]

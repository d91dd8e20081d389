"""Habits of models: layers, each of which maps (batch, 6) to (batch, 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.habits.loop import Choice, Loop, habit


class Then(nn.Module):
    """A module that is called by a function."""

    def __init__(
        self, inner: nn.Module, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner, x)


class Param(nn.Module):
    """A parameter that is used by a function."""

    def __init__(
        self, value: torch.Tensor, function: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.value, self.function = nn.Parameter(value), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.value, x)


def embed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Look inputs up in an embedding of nine rows."""
    return module((x[:, 0].detach().abs() * 3).long() % 9)


def mlp() -> nn.Module:
    """Return two linear layers and what is between them."""
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))


def _layer(name: str, doc: str, *makers: Callable[[], nn.Module], **settings: Any) -> None:
    """Add a habit whose model has the layer that one of the makers returns."""

    def layers(self):
        return [*super(cls, self).layers(), getattr(self, f"_{name}__maker")()]

    choice = Choice(*makers)
    cls = type(
        name,
        (Loop,),
        {"__doc__": doc, "layers": layers, f"_{name}__maker": choice, "__module__": __name__},
    )
    habit(**settings)(cls)


_layer("linear", "A linear layer.", lambda: nn.Linear(6, 6))
_layer("linear_without_bias", "A linear layer without a bias.", lambda: nn.Linear(6, 6, bias=False))
_layer(
    "wide",
    "Two linear layers of some width.",
    lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)),
    lambda: nn.Sequential(nn.Linear(6, 30), nn.GELU(), nn.Linear(30, 6)),
    lambda: nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 6)),
)
_layer("layer_norm", "A layer norm.", lambda: nn.LayerNorm(6))
# The gradient of a bias before the norm is rounding errors.
_layer(
    "batch_norm",
    "A batch norm.",
    lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)),
)
_layer(
    "conv",
    "A convolution.",
    lambda: Then(nn.Conv1d(1, 1, 3, padding=1), lambda m, x: m(x[:, None])[:, 0]),
)
_layer(
    "channels_last",
    "A convolution whose weight is stored channels last.",
    lambda: Then(
        nn.Conv2d(2, 2, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last),
        lambda m, x: m(x.view(-1, 2, 1, 3)).reshape(-1, 6),
    ),
)
_layer(
    "embedding",
    "An embedding with dense gradients.",
    lambda: Then(nn.Embedding(9, 6), embed),
    lambda: Then(nn.Embedding(9, 6, padding_idx=0), embed),
)
_layer(
    "sparse_embedding",
    "An embedding with sparse gradients.",
    lambda: Then(nn.Embedding(9, 6, sparse=True), embed),
)
_layer(
    "attention",
    "Multi-head attention.",
    lambda: Then(
        nn.MultiheadAttention(6, 2, batch_first=True, bias=False),
        lambda m, x: m(x[None], x[None], x[None])[0][0],
    ),
)
_layer(
    "recurrent",
    "A recurrent layer, whose weights are views of one tensor on some devices.",
    lambda: Then(nn.GRU(6, 6), lambda m, x: m(x)[0]),
    lambda: Then(nn.LSTM(6, 6), lambda m, x: m(x)[0]),
)
_layer("dropout", "A dropout.", lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)))
_layer(
    "scalar_parameter",
    "A parameter without dimensions.",
    lambda: Param(torch.tensor(0.7), lambda p, x: p * x),
)
_layer(
    "empty_parameter",
    "A parameter without elements.",
    lambda: Param(torch.zeros(0, 6), lambda p, x: x + p.sum()),
)
_layer(
    "transposed_parameter",
    "A parameter with the strides of a transposed matrix.",
    lambda: Param(torch.randn(6, 6).t(), lambda p, x: x @ p),
)
_layer(
    "strided_parameter",
    "A parameter with gaps between its elements.",
    lambda: Param(torch.randn(6, 12)[:, ::2], lambda p, x: x @ p),
)
_layer(
    "part_of_a_tensor",
    "A parameter that begins inside of its storage.",
    lambda: Param(torch.randn(60)[6:42].view(6, 6), lambda p, x: x @ p),
)
_layer(
    "complex_parameter",
    "A complex parameter.",
    lambda: Param(torch.randn(6, 6, dtype=torch.complex64), lambda p, x: (x.to(p.dtype) @ p).real),
)
_layer(
    "double_layer",
    "A layer in double precision.",
    lambda: Then(nn.Linear(6, 6).double(), lambda m, x: m(x.double()).float()),
)
_layer(
    "bfloat16_layer",
    "A layer in bfloat16.",
    lambda: Then(nn.Linear(6, 6).bfloat16(), lambda m, x: m(x.bfloat16()).float()),
)
_layer(
    "weight_norm", "A weight norm.", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
)
_layer(
    "spectral_norm",
    "A spectral norm.",
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
)
_layer(
    "orthogonal",
    "An orthogonal weight.",
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
)
_layer(
    "old_weight_norm",
    "The deprecated weight norm by hooks.",
    lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
)
_layer(
    "checkpointed",
    "A block whose activations are recomputed.",
    lambda: Then(mlp(), lambda m, x: checkpoint(m, x, use_reentrant=False)),
)
# The stock reducer cannot search inside of it for unused parameters.
_layer(
    "reentrant_checkpoint",
    "A block that is recomputed in a backward inside of the backward.",
    # Its inputs must have gradients.
    lambda: nn.Sequential(
        nn.Linear(6, 6), Then(mlp(), lambda m, x: checkpoint(m, x, use_reentrant=True))
    ),
    without=("find_unused",),
)
_layer(
    "frozen",
    "A frozen layer before a trained layer.",
    lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)),
)
_layer(
    "frozen_bias",
    "A layer of which only the weight is trained.",
    lambda: (lambda m: (m.bias.requires_grad_(False), m)[1])(nn.Linear(6, 6)),
)
_layer(
    "twice_in_a_forward",
    "A layer that each forward calls twice.",
    lambda: Then(nn.Linear(6, 6), lambda m, x: m(m(x))),
)
_layer(
    "list_of_parameters",
    "Parameters in a ``ParameterList``.",
    lambda: Then(nn.ParameterList([torch.ones(6), torch.zeros(6)]), lambda m, x: x * m[0] + m[1]),
)
_layer(
    "large",
    "Parameters of some thousand elements.",
    lambda: nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 6)),
)

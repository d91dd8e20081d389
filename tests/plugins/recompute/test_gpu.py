"""On a GPU, blocks in low precision with dropout are recomputed with the bits of stock PyTorch; others are errors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ovpatch
from ovpatch_plugins.recompute import RecomputeError
from tests.plugins.recompute.models import count_differences

WIDTH, LENGTH, STEPS = 256, 64, 9


class Layer(nn.Module):
    """A layer of attention and a feed-forward with dropout, and an embedding whose backward adds by atomics."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.norm = nn.Embedding(LENGTH, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place(torch.arange(x.shape[1], device=x.device) // 2)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 4, -1).transpose(1, 2).chunk(3, -1)
        h = (
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + F.dropout(self.down(F.gelu(self.up(h))), 0.1, self.training)


class Noisy(nn.Module):
    """A layer that is scaled by a number that the recomputation cannot repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        NOISE.append(1.0 + len(NOISE) % 5)
        return x + (self.linear(x) * NOISE[-1]).sigmoid()


NOISE: list[float] = []


def train(make: Any, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.ModuleDict({"layers": nn.ModuleList(make() for _ in range(4))}).cuda()
    opt = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    found: list[Tensor] = []
    for step in range(STEPS):
        x = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        with torch.autocast("cuda", dtype) if dtype is not torch.float32 else nullcontext():
            for layer in model["layers"]:
                x = layer(x)
            loss = x.float().square().mean()
        loss.backward()
        found += [
            loss.detach().clone(),
            *(param.grad.clone() for param in model.parameters() if param.dim() == 2),
        ]
        opt.step()
        opt.zero_grad()
    return found


def both(make: Any, dtype: torch.dtype, check: str) -> tuple[list[Tensor], list[Tensor], int]:
    stock = train(make, dtype)
    with ovpatch.applied(
        "recompute", options={"recompute": {"blocks": "layers.*", "check": check}}
    ):
        before = ovpatch.report()["recompute"].counters["recomputations"]
        patched = train(make, dtype)
        return stock, patched, ovpatch.report()["recompute"].counters["recomputations"] - before


@pytest.mark.gpu(1)
@pytest.mark.parametrize("check", ["auto", "always"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_are_recomputed_without_a_false_error(check, dtype):
    stock, patched, recomputations = both(Layer, dtype, check)
    assert recomputations == 4 * STEPS
    # The first loss precedes all gradients, which atomics may round differently.
    assert count_differences(stock[:1], patched[:1]) == 0
    for a, b in zip(stock, patched, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=1e-3)


@pytest.mark.gpu(1)
def test_a_block_that_computes_other_values_is_an_error():
    with pytest.raises(RecomputeError, match=r"block layers\.\d does not compute the same again"):
        both(Noisy, torch.bfloat16, "auto")

"""A training in bfloat16, small enough to be repeated often, whose sums can be added in other orders.

[Note: other orders] Order 0 is that of ``torch.mm``. In another order, each sum is cut in two at a place that is
drawn once for each number of features. Both halves are rounded before they are added, as in kernels that cut the
sum elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ovpatch.insight.verify.recording import BACKWARD, STEP, keep_value

Event = tuple[str, dict[str, Any]]
Matmul = Callable[[Tensor, Tensor], Tensor]
LAYERS, WIDTH, TOKENS, RANKS = 3, 48, 64, 2


def make_matmul(order: int) -> Matmul:
    """Return the multiplication of matrices with that order of sums (see [Note: other orders]); 0 is torch's order."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        features = a.shape[1]
        cut = random.Random(f"{order} {features}").randrange(features // 4, 3 * features // 4)
        return a[:, :cut] @ b[:cut] + a[:, cut:] @ b[cut:]

    return multiply if order else torch.mm


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiply: Matmul) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.multiply = multiply
        return multiply(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return ctx.multiply(grad, weight), ctx.multiply(grad.t(), x), None


class Layer(nn.Module):
    """A norm and two GEMMs around an activation, added to the layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) * WIDTH**-0.5)

    def forward(self, x: Tensor, multiply: Matmul) -> Tensor:
        hidden = nn.functional.silu(_Linear.apply(self.norm(x), self.up, multiply))
        return x + _Linear.apply(hidden, self.down, multiply)


def trained(
    seed: int,
    order: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 4,
    fault: Callable[..., None] | None = None,
) -> list[Event]:
    """Train, and return the events that :mod:`ovpatch.insight.verify` would record.

    Args:
        seed: The seed of the weights and the data.
        order: The order of sums.
        dtype: The dtype of the model.
        steps: The number of steps.
        fault: Called with ``when``, the step, the model and the ranks' gradients by name, or the losses.
    """
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(LAYERS))}).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, foreach=False)
    named, multiply, events = dict(model.named_parameters()), make_matmul(order), []
    notice = fault or (lambda *args: None)
    for step in range(1, steps + 1):
        losses, gradients = [], []
        for _ in range(RANKS):
            x, wanted = torch.randn(2, TOKENS, WIDTH).to(dtype)
            for layer in model["layers"]:
                x = layer(x, multiply)
            losses.append((x.float() - wanted.float()).square().mean())
            found = torch.autograd.grad(losses[-1], list(named.values()))
            gradients.append(dict(zip(named, found, strict=True)))
        notice("reduce", step, named, gradients)
        notice("loss", step, named, losses)
        for name, param in named.items():
            param.grad = sum(grads[name] for grads in gradients) / RANKS
        before = {name: param.detach().clone() for name, param in named.items()}
        optimizer.step()
        notice("step", step, named, before)
        events += [(BACKWARD, {"loss": keep_value(loss.detach())}) for loss in losses]
        events.append((STEP, _values(named, optimizer)))
    return events


def _values(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values = {f"gradient {name}": param.grad for name, param in named.items()}
    values |= {f"parameter {name}": param for name, param in named.items()}
    for name, param in named.items():
        values |= {f"state {name}.{key}": value for key, value in optimizer.state[param].items()}
    return {name: keep_value(value) for name, value in values.items()}

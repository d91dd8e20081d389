"""A place in a graph where a backward can be made to end."""

from __future__ import annotations

from typing import Any

import torch


class Refusal(torch.autograd.Function):
    """Hands on what it gets; raises in backward while it ``refuses``."""

    refuses = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Refusal.refuses:
            raise ValueError("refused")  # none of ovpatch's errors in a backward are of this class
        return grad

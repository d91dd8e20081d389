"""Functions for a graph that make a backward fail."""

from __future__ import annotations

from typing import Any

import torch


class Mine(torch.autograd.Function):
    """An identity that raises in the backward while it is ``armed``."""

    armed = False


def raising(error: type[Exception], text: str) -> type[Mine]:
    """Return a function whose backward raises this error while it is armed."""

    class Raising(Mine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if Raising.armed:
                raise error(text)
            return grad

    return Raising


# No error of ovpatch in a backward is a ValueError.
Refusal = raising(ValueError, "refused")

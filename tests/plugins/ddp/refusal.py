"""Places in a graph where a backward can be made to end."""

from __future__ import annotations

from typing import Any

import torch


class Mine(torch.autograd.Function):
    """Hands on what it gets; raises in backward while it is ``armed``."""

    armed = False


def raising(error: type[Exception], text: str) -> type[Mine]:
    """Return a function that raises this error."""

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


Refusal = raising(ValueError, "refused")  # none of ovpatch's errors in a backward are of this class

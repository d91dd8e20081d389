"""Gradients of half precision that are added up in fp32, over the microbatches of a step.

[Note: main gradients] bfloat16 has 8 bits, so a sum of 64 microbatches loses a part of most of them. While a
parameter's gradient is accumulated, an fp32 sum is kept beside ``p.grad``, which is its rounding after each backward.
Whoever reduces gradients in fp32 takes the sum (:func:`take`). A sum holds as long as ``p.grad`` is what we have left
there: if the script changes it, clips it say, or drops it, the next sum begins at what is there then.

[Note: before and after] A hook before the AccumulateGrad node begins the sum with what ``p.grad`` is until then, which
is exact, as one microbatch's gradient is; a hook after it adds what the node was given. Hooks of the script's on the
parameter run between the two and see what stock shows them. A gradient that comes first costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.weakly import forget

#: Dtypes whose gradients are worth a sum in fp32.
LOW_PRECISION: Final = (torch.bfloat16, torch.float16)


@dataclass
class _Sum:
    """An fp32 sum, the gradient whose sum it is, and the version of it that is the sum's rounding."""

    total: Tensor
    grad: weakref.ref[Tensor]
    version: int


_sums: dict[int, _Sum] = {}  # by id() of the gradient


def take(grad: Tensor) -> Tensor:
    """Return the fp32 sum of which a gradient is the rounding, which is forgotten here; else the gradient itself.

    Whoever reduces a gradient calls it, even to reduce the rounding: a collective changes it without a trace.
    """
    found = _sums.pop(id(grad), None)
    return found.total if found is not None and _holds(found, grad) else grad


def hooks_of(param: torch.nn.Parameter) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what has to run before and after the AccumulateGrad node of a parameter."""
    reference = weakref.ref(param)  # the node, which holds them, is held by C++

    def before(_given: Any) -> None:
        param = reference()
        grad = None if param is None else param.grad
        if grad is None or not _can_be_summed(grad):
            return
        found = _sums.get(id(grad))
        if found is None or not _holds(found, grad):
            with torch.inference_mode(False), torch.no_grad():
                total = grad.to(torch.float32)
            _sums[id(grad)] = _Sum(total, weakref.ref(grad, partial(forget, _sums, id(grad))), grad._version)

    def after(_nothing: Any, given: tuple[Tensor | None]) -> None:
        param = reference()
        grad = None if param is None else param.grad
        found = None if grad is None else _sums.get(id(grad))
        if grad is None or found is None:
            return
        added = given[0]
        # The node has added, and nobody else has written.
        if added is not None and _can_be_summed(added) and _holds(found, grad, later=1):
            with torch.inference_mode(False), torch.no_grad():
                grad.copy_(found.total.add_(added))
            found.version = grad._version
        else:
            del _sums[id(grad)]

    return before, after


def _can_be_summed(grad: Tensor) -> bool:
    """Tell whether it is a plain gradient: dense, with no graph of its own, and all there."""
    return type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad


def _holds(found: _Sum, grad: Tensor, *, later: int = 0) -> bool:
    return found.grad() is grad and grad._version == found.version + later

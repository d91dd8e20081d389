"""Gradients of half precision that are added up in fp32, over the microbatches of a step.

bfloat16 has 8 bits, so a sum of 64 microbatches loses a part of most of them. While a parameter's gradient is
accumulated, an fp32 sum is kept beside ``p.grad``, which is its rounding after each backward. A reduction in fp32 takes
the sum (:func:`take_sum`). A gradient that comes first costs nothing.

Scripts write to gradients: they clip them, zero them through ``.data``, reduce them. Not all of that shows when it
happens; neither ``.data`` nor collectives change a tensor's version. So an fp32 number counts as long as its rounding
is the gradient's; otherwise the gradient's number does (:func:`refresh_fp32`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import drop_entry, outside_modes

#: Dtypes of half precision.
LOW_PRECISION_DTYPES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Sum:
    """An fp32 sum, and the gradient that is its rounding."""

    total: Tensor
    grad: weakref.ref[Tensor]


#: The sums, by id() of the gradient; empty unless the option is on.
sums: Final[dict[int, _Sum]] = {}


def take_sum(grad: Tensor) -> Tensor:
    """Return the fp32 sum that a gradient was rounded from, and drop it here; else the gradient itself.

    Every reduction calls it, also one of the rounding, because the sum takes memory.
    """
    found = sums.pop(id(grad), None)
    if found is None or not _is_current(found, grad):
        return grad
    with torch.no_grad():
        return refresh_fp32(found.total, grad)


def has_sum(grad: Tensor | None) -> bool:
    """Return whether there is an fp32 sum beside a gradient."""
    return grad is not None and id(grad) in sums


def drop_sums(grads: Iterable[Tensor | None]) -> None:
    """Drop the fp32 sums of gradients that are reduced as they are, to free their memory."""
    for grad in grads:
        sums.pop(id(grad), None)


def make_sum_hooks(param: torch.nn.Parameter) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a prehook and a hook of a parameter's AccumulateGrad node, which keep its sum.

    The prehook begins the sum with the gradient so far, which is exact if it is one microbatch's; the hook adds what
    the node was given. Hooks of the script on the parameter run between the two, and see what stock shows them.
    """
    reference = weakref.ref(param)  # the node, which holds the hooks, is held by C++

    def before(_given: Any) -> None:
        param = reference()
        grad = None if param is None else param.grad
        if grad is None or not _can_be_summed(grad):
            return
        found = sums.get(id(grad))
        with outside_modes():
            if found is not None and _is_current(found, grad):
                refresh_fp32(found.total, grad)
            else:
                total = grad.to(torch.float32)
                sums[id(grad)] = _Sum(total, weakref.ref(grad, partial(drop_entry, sums, id(grad))))

    def after(_nothing: Any, node_grads: tuple[Tensor | None]) -> None:
        param = reference()
        grad = None if param is None else param.grad
        found = None if grad is None else sums.get(id(grad))
        if grad is None or found is None:
            return
        added = node_grads[0]
        if added is None or not _can_be_summed(added) or not _is_current(found, grad):
            del sums[id(grad)]
            return
        with outside_modes():
            expected = found.total.to(grad.dtype).add_(added)  # as the node does
            found.total.add_(added)
            torch.where(expected == grad, found.total, grad.to(torch.float32), out=found.total)
            grad.copy_(found.total)

    return before, after


def _can_be_summed(grad: Tensor) -> bool:
    """Return whether it is a plain gradient: dense, with no graph of its own, and all there."""
    plain = type(grad) is Tensor and grad.layout is torch.strided
    return plain and not (grad.requires_grad or grad.is_inference())


def _is_current(found: _Sum, grad: Tensor) -> bool:
    return found.grad() is grad and found.total.shape == grad.shape and _can_be_summed(grad)


def refresh_fp32(wide: Tensor, rounded: Tensor) -> Tensor:
    """Replace, in place, the fp32 numbers whose rounding has been written to since.

    Args:
        wide: The fp32 numbers.
        rounded: Their roundings, of the same shape, where nothing was written.
    """
    return torch.where(wide.to(rounded.dtype) == rounded, wide, rounded.to(torch.float32), out=wide)

"""Sums in fp32 of bf16 and fp16 gradients over the microbatches of a step.

A bfloat16 number has 8 significant bits, so a sum of 64 microbatches loses a part of most of them.
While a parameter accumulates its gradient, an fp32 sum accompanies ``p.grad``, and after each
backward ``p.grad`` is the rounding of the sum. A reduction in fp32 reads the sum
(:func:`take_sum`). The first gradient of a step costs nothing.

Scripts write to gradients: they clip them, zero them through ``.data``, or reduce them. Not every
write can be detected, because neither ``.data`` nor collectives change a tensor's version. So an
fp32 number counts only while its rounding equals the number in the gradient. Otherwise the number
in the gradient counts (:func:`refresh_fp32`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import outside_modes, remove_dead_key

#: The dtypes whose gradients an fp32 sum may accompany.
LOW_PRECISION_DTYPES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Sum:
    """An fp32 sum.

    Attributes:
        total: The sum.
        grad: The gradient, which is the rounding of the sum.
    """

    total: Tensor
    grad: weakref.ref[Tensor]


#: The sums by ``id()`` of the gradient. It is empty unless the option is on.
sums: Final[dict[int, _Sum]] = {}


def take_sum(grad: Tensor) -> Tensor:
    """Drop the fp32 sum of a gradient and return it, or return the gradient if it has none.

    Every reduction calls this, also a reduction of the rounding, because the sum takes memory.
    """
    found = sums.pop(id(grad), None)
    # A sum of another shape, or of another gradient with a reused id, does not count.
    if found is None or not _is_current(found, grad):
        return grad
    with torch.no_grad():
        return refresh_fp32(found.total, grad)


def has_sum(grad: Tensor | None) -> bool:
    """Return whether a gradient has an fp32 sum."""
    return grad is not None and id(grad) in sums


def drop_sums(grads: Iterable[Tensor | None]) -> None:
    """Free the fp32 sums of gradients that are reduced in their own dtype."""
    for grad in grads:
        sums.pop(id(grad), None)


def make_sum_hooks(param: torch.nn.Parameter) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a prehook and a hook for a parameter's AccumulateGrad node that maintain its sum.

    The prehook starts the sum with the present gradient, which is exact if it comes from one
    microbatch. The hook adds the gradient that the node received. The script's hooks on the
    parameter run between the two, and see the same gradient as in stock PyTorch.
    """
    # C++ holds the node, and the node holds the hooks. A strong reference would be a cycle that
    # Python's garbage collector cannot see.
    reference = weakref.ref(param)

    def before(_given: Any) -> None:
        param = reference()
        grad = None if param is None else param.grad
        if grad is None or not _can_be_summed(grad):
            return
        found = sums.get(id(grad))
        with outside_modes():
            if found is not None and _is_current(found, grad):
                # The script may have written to the gradient since the last microbatch.
                refresh_fp32(found.total, grad)
            else:
                total = grad.to(torch.float32)
                # The id may be reused as soon as the gradient is freed.
                forget = partial(remove_dead_key, sums, id(grad))
                sums[id(grad)] = _Sum(total, weakref.ref(grad, forget))

    def after(_nothing: Any, node_grads: tuple[Tensor | None]) -> None:
        param = reference()
        grad = None if param is None else param.grad
        found = None if grad is None else sums.get(id(grad))
        if grad is None or found is None:
            return
        added = node_grads[0]
        # If the engine replaced the gradient or added a sparse one, the sum is no longer its.
        if added is None or not _can_be_summed(added) or not _is_current(found, grad):
            del sums[id(grad)]
            return
        with outside_modes():
            # The node adds in low precision. A number of the gradient that differs from this result
            # was written by a hook of the script, and counts instead of the sum.
            expected = found.total.to(grad.dtype).add_(added)
            found.total.add_(added)
            torch.where(expected == grad, found.total, grad.to(torch.float32), out=found.total)
            grad.copy_(found.total)

    return before, after


def _can_be_summed(grad: Tensor) -> bool:
    """Return whether this is a plain dense gradient, without a graph and with its content."""
    is_plain = type(grad) is Tensor and grad.layout is torch.strided
    return is_plain and not (grad.requires_grad or grad.is_inference())


def _is_current(found: _Sum, grad: Tensor) -> bool:
    return found.grad() is grad and found.total.shape == grad.shape and _can_be_summed(grad)


def refresh_fp32(wide: Tensor, rounded: Tensor) -> Tensor:
    """Replace, in place, the fp32 numbers whose rounding has changed since.

    Args:
        wide: The fp32 numbers, which the result overwrites.
        rounded: Their roundings, of the same shape, except for numbers that the script has written.
    """
    is_unchanged = wide.to(rounded.dtype) == rounded
    return torch.where(is_unchanged, wide, rounded.to(torch.float32), out=wide)

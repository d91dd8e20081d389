"""Gradients of half precision that are added up in fp32, over the microbatches of a step.

[Note: main gradients] bfloat16 has 8 bits, so a sum of 64 microbatches loses a part of most of them. While a
parameter's gradient is accumulated, an fp32 sum is kept beside ``p.grad``, which is its rounding after each backward.
Whoever reduces dense gradients in fp32 takes the sum (:func:`take`). What a script writes to ``p.grad`` counts; see
[Note: by value] in ``halves.py``.

[Note: before and after] A hook before the AccumulateGrad node begins the sum with what ``p.grad`` is until then, which
is exact, as one microbatch's gradient is; a hook after it adds what the node was given. Hooks of the script's on the
parameter run between the two and see what stock shows them. A gradient that comes first costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.tensors.param_state import drop_entry


@dataclass(frozen=True)
class _Sum:
    """An fp32 sum, and the gradient that is its rounding."""

    total: Tensor
    grad: weakref.ref[Tensor]


_sums: dict[int, _Sum] = {}  # by id() of the gradient


def take(grad: Tensor) -> Tensor:
    """Return the fp32 sum of which a gradient is the rounding, which is forgotten here; else the gradient itself.

    Whoever reduces a gradient calls it, even to reduce the rounding: the sum takes memory.
    """
    if not _sums:
        return grad
    found = _sums.pop(id(grad), None)
    if found is None or not _is_of(found, grad):
        return grad
    with torch.no_grad():
        return followed(found.total, grad)


def drop_sums(grads: Iterable[Tensor]) -> None:
    """Forget the fp32 sums of gradients that are reduced as they are, as :func:`take` does, to free their memory."""
    if _sums:
        for grad in grads:
            take(grad)


def has(grad: Tensor | None) -> bool:
    """Tell whether there is an fp32 sum beside a gradient."""
    return grad is not None and id(grad) in _sums


def hooks_of(param: torch.nn.Parameter) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what has to run before and after the AccumulateGrad node of a parameter."""
    reference = weakref.ref(param)  # the node, which holds them, is held by C++

    def before(_given: Any) -> None:
        param = reference()
        grad = None if param is None else param.grad
        if grad is None or not _can_be_summed(grad):
            return
        found = _sums.get(id(grad))
        with torch.inference_mode(False), torch.no_grad():
            if found is not None and _is_of(found, grad):
                followed(found.total, grad)
            else:
                total = grad.to(torch.float32)
                _sums[id(grad)] = _Sum(total, weakref.ref(grad, partial(drop_entry, _sums, id(grad))))

    def after(_nothing: Any, given: tuple[Tensor | None]) -> None:
        param = reference()
        grad = None if param is None else param.grad
        found = None if grad is None else _sums.get(id(grad))
        if grad is None or found is None:
            return
        added = given[0]
        if added is None or not _can_be_summed(added) or not _is_of(found, grad):
            del _sums[id(grad)]
            return
        with torch.inference_mode(False), torch.no_grad():
            expected = found.total.to(grad.dtype).add_(added)  # as the node does
            found.total.add_(added)
            torch.where(expected == grad, found.total, grad.to(torch.float32), out=found.total)
            grad.copy_(found.total)

    return before, after


def drop(params: Iterable[torch.nn.Parameter]) -> None:
    """Forget the sums of parameters' gradients."""
    for param in params:
        if param.grad is not None:
            _sums.pop(id(param.grad), None)


def _can_be_summed(grad: Tensor) -> bool:
    """Tell whether it is a plain gradient: dense, with no graph of its own, and all there."""
    plain = type(grad) is Tensor and grad.layout is torch.strided
    return plain and not (grad.requires_grad or grad.is_inference())


def _is_of(found: _Sum, grad: Tensor) -> bool:
    return found.grad() is grad and found.total.shape == grad.shape and _can_be_summed(grad)


# Numbers of half precision that are roundings of fp32 ones, kept beside them.
#
# [Note: by value] Scripts write to parameters and gradients: they clip them, zero them through ``.data``, reduce them.
# Not all of that can be noticed when it happens; versions of tensors do not change with ``.data`` nor with collectives.
# So an fp32 number counts as long as its rounding is what stands there; otherwise what stands there does.

#: Dtypes of half precision.
HALVES: Final = (torch.bfloat16, torch.float16)


def followed(wide: Tensor, rounded: Tensor) -> Tensor:
    """Make fp32 numbers, in place, what stands where they are not what is rounded any more; see [Note: by value].

    Args:
        wide: The fp32 numbers.
        rounded: What should be their rounding, of the same shape.
    """
    return torch.where(wide.to(rounded.dtype) == rounded, wide, rounded.to(torch.float32), out=wide)


class Following:
    """:func:`followed` of many tensors, on GPUs by one kernel, which reads each number once.

    The addresses are kept on the device from one call to the next, as long as they are the same.
    """

    def __init__(self) -> None:
        self._tables: dict[torch.dtype, tuple[list[tuple[int, int, int]], Tensor]] = {}

    def __call__(self, wides: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
        """Make fp32 numbers, in place, what stands where they are not what is rounded any more.

        Args:
            wides: The fp32 numbers, contiguous.
            rounded: What should be their roundings, contiguous, of the same shapes and on the same device.
        """
        from ovpatch.overlap.symm_mem.memory import triton_unavailable_reason

        if not wides or not wides[0].is_cuda or triton_unavailable_reason():
            for wide, half in zip(wides, rounded, strict=True):
                followed(wide, half)
            return
        for dtype in dict.fromkeys(half.dtype for half in rounded):
            self._follow([(wide, half) for wide, half in zip(wides, rounded, strict=True) if half.dtype is dtype])

    def _follow(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        from ovpatch.overlap.data_parallel.fp32_kernels import follow

        dtype = pairs[0][1].dtype
        places = [(wide.data_ptr(), half.data_ptr(), wide.numel()) for wide, half in pairs]
        known, table = self._tables.get(dtype, ([], None))
        if table is None or known != places:
            table = torch.tensor(places, dtype=torch.int64, device=pairs[0][0].device)
            self._tables[dtype] = places, table
        follow(table, dtype, max(numel for *_, numel in places))

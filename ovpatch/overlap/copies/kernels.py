"""Triton kernel that adds up what several ranks gave; imported only where Triton is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 8192
_GRID: Final = (64, 1, 1)  # no more: they share the GPU with products, and memory is what they wait for


@triton.jit
def add_up_kernel(
    a, b, c, d, e, f, g, h, out, n, scale, COUNT: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program p of P: blocks p, p + P, ...: the sum of the first COUNT tensors, in that order."""
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        total = _loaded(a, at, inside, EXACT)
        if COUNT > 1:
            total += _loaded(b, at, inside, EXACT)
        if COUNT > 2:
            total += _loaded(c, at, inside, EXACT)
        if COUNT > 3:
            total += _loaded(d, at, inside, EXACT)
        if COUNT > 4:
            total += _loaded(e, at, inside, EXACT)
        if COUNT > 5:
            total += _loaded(f, at, inside, EXACT)
        if COUNT > 6:
            total += _loaded(g, at, inside, EXACT)
        if COUNT > 7:
            total += _loaded(h, at, inside, EXACT)
        tl.store(out + at, total * scale, mask=inside)


@triton.jit
def _loaded(given, at, inside, EXACT: tl.constexpr):
    value = tl.load(given + at, mask=inside, other=0.0)
    return value.to(tl.float64) if EXACT else value.to(tl.float32)


MOST: Final = 8  # tensors

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def add_up(out: Tensor, given: Sequence[Tensor], scale: float) -> None:
    """See :func:`ovpatch.overlap.copies.sums.add_up`; at most :data:`MOST` tensors."""
    size = out.numel()
    if not size:
        return
    tensors, exact = [*given, *[None] * (MOST - len(given)), out], out.dtype == torch.float64
    rest = (size, 1.0 if exact else scale, len(given), exact, _BLOCK)
    with torch.cuda.device_of(out):  # Triton launches on the current one
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        # All that Triton would ask of the arguments; asking each of them anew is most of what a launch costs the host.
        key = (out.device, out.dtype, len(given), size % 16 == 0, size == 1, *[(at or 0) % 16 == 0 for at in addresses])
        known = _compiled.get(key)
        if known is not None:
            known(*addresses, *rest)
        else:
            found = add_up_kernel[_GRID](*tensors, *rest, num_warps=8)
            if found is not None:  # else it is interpreted
                _compiled[key] = found[_GRID]
    if exact and scale != 1:  # Triton takes numbers as float32
        out.mul_(scale)

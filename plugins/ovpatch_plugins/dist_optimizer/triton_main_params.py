"""The kernel that refreshes main parameters; imported only if Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The number of elements that a program compares.
_BLOCK = 4096
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def refresh_kernel(table, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Refresh block b of tensor t in program (b, t)."""
    tensor = tl.program_id(1)
    # Offsets of large tensors exceed int32.
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    numel = tl.load(table + 3 * tensor + 2)
    # The grid has as many blocks as the largest tensor needs.
    if begin < numel:
        wides = tl.load(table + 3 * tensor).to(tl.pointer_type(tl.float32))
        roundings = tl.load(table + 3 * tensor + 1).to(tl.pointer_type(HALF))
        at = begin + tl.arange(0, BLOCK)
        wide = tl.load(wides + at, mask=at < numel, other=0.0)
        rounding = tl.load(roundings + at, mask=at < numel, other=0.0)
        # Most elements are unchanged, so their main parameters need no write.
        is_changed = (at < numel) & (wide.to(HALF) != rounding)
        tl.store(wides + at, rounding.to(tl.float32), mask=is_changed)


def launch_refresh(table: Tensor, dtype: torch.dtype, largest: int) -> None:
    """Replace the fp32 elements whose roundings the script has written to.

    Args:
        table: For each tensor, the address of the fp32 elements, the address of the roundings and
            the number of elements: ``[tensors, 3]``, int64.
        dtype: The dtype of the roundings.
        largest: The number of elements of the largest tensor.
    """
    with torch.cuda.device_of(table):
        grid = (triton.cdiv(largest, _BLOCK), len(table))
        refresh_kernel[grid](table, _TYPES[dtype], _BLOCK)

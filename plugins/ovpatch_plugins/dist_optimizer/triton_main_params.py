"""The kernel that refreshes main parameters; imported only where Triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # numbers that a program compares
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def refresh_kernel(table, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Program (b, t): block b of tensor t. Only what has changed is written."""
    which = tl.program_id(1)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    numel = tl.load(table + 3 * which + 2)
    if begin < numel:
        wides = tl.load(table + 3 * which).to(tl.pointer_type(tl.float32))
        halves = tl.load(table + 3 * which + 1).to(tl.pointer_type(HALF))
        at = begin + tl.arange(0, BLOCK)
        wide = tl.load(wides + at, mask=at < numel, other=0.0)
        half = tl.load(halves + at, mask=at < numel, other=0.0)
        tl.store(wides + at, half.to(tl.float32), mask=(at < numel) & (wide.to(HALF) != half))


def launch_refresh(table: Tensor, dtype: torch.dtype, largest: int) -> None:
    """Replace the fp32 numbers whose roundings have been written to since.

    Args:
        table: Address of the fp32 numbers, that of the others, and how many, of each tensor: ``[tensors, 3]``, int64.
        dtype: Of the roundings.
        largest: Most numbers of a tensor.
    """
    with torch.cuda.device_of(table):
        refresh_kernel[(triton.cdiv(largest, _BLOCK), len(table))](table, _TYPES[dtype], _BLOCK)

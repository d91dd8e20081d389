"""Triton kernels that sum a token's rows; imported only where Triton is installed.

Each kernel reads a row once and writes its result once. torch's own operations scatter the rows by token, weight them
in a second pass, and sum them in a third.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # features per program and pass


@triton.jit
def weighted_sum_kernel(rows, weights, row_of_slot, out, features, K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, b): block b of the features of token t; without ``weights`` each row counts once."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_of_slot + token * K + slot)
        held = columns < tl.where(row >= 0, features, 0)
        value = tl.load(rows + row * features + columns, mask=held, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + token * K + slot).to(tl.float32)
        total += value
    tl.store(out + token.to(tl.int64) * features + columns, total, mask=inside)


@triton.jit
def weighted_sum_backward_kernel(
    rows, weights, order, grad, drows, dweights, FEATURES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program r: the gradients of row r and of its weight; ``drows`` or ``dweights`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row)
    weight = tl.load(weights + slot).to(tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, FEATURES, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < FEATURES
        given = tl.load(grad + slot // K * FEATURES + columns, mask=inside, other=0.0).to(tl.float32)
        if drows is not None:
            tl.store(drows + row * FEATURES + columns, given * weight, mask=inside)
        if dweights is not None:
            dot += given * tl.load(rows + row * FEATURES + columns, mask=inside, other=0.0).to(tl.float32)
    if dweights is not None:
        tl.store(dweights + slot, tl.sum(dot, 0))


def weighted_sum(rows: Tensor, weights: Tensor | None, row_of_slot: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Return each token's sum of its contiguous rows: ``[rows, h]``, ``[tokens, k]`` -> ``[tokens, h]``.

    Weights are 1 by default. ``row_of_slot`` has the row of each slot, ``[tokens * k]`` of int64, -1 for none. Sums are
    in float32, and rounded to ``dtype``.
    """
    features = rows.shape[1]
    out = rows.new_empty((len(row_of_slot) // top_k, features), dtype=dtype)
    if out.numel():
        grid = len(out), triton.cdiv(features, _BLOCK)
        with torch.cuda.device_of(rows):  # Triton launches on the current one
            weighted_sum_kernel[grid](rows, weights, row_of_slot, out, features, top_k, _BLOCK)
    return out


def weighted_sum_backward(
    rows: Tensor, weights: Tensor, order: Tensor, grad: Tensor, *, rows_grad: bool, weights_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of rows ``[rows, h]`` and of weights ``[tokens, k]`` that are needed; all are contiguous.

    ``order`` has the slot of each row, ``[rows]`` of int64; ``grad`` is that of the sums, ``[tokens, h]``.
    """
    drows = torch.empty_like(rows) if rows_grad else None
    dweights = torch.zeros_like(weights) if weights_grad else None
    if rows.numel() and (rows_grad or weights_grad):
        args = rows, weights, order, grad, drows, dweights, rows.shape[1], weights.shape[1], _BLOCK
        with torch.cuda.device_of(rows):
            weighted_sum_backward_kernel[(len(rows),)](*args)
    return drows, dweights

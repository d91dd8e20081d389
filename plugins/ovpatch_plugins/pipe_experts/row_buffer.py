"""Rows of several parts in one memory, so that cutting and joining them copies nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.data_parallel.grad_hooks import apply_function


class RowBuffer:
    """Memory for the rows of several parts, one behind the other; made when the first is asked for.

    Args:
        sizes: Rows of each part.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._begins = [0, *itertools.accumulate(sizes)]
        self._whole: Tensor | None = None

    def part(self, index: int, like: Tensor) -> Tensor:
        """Return a part's memory, ``[sizes[index], h]``, of the features, dtype and device of a tensor."""
        if self._whole is None:
            self._whole = like.new_empty((self._begins[-1], *like.shape[1:]))
        # Not a view to autograd, which minds that its neighbours are written into.
        return self._whole[self._begins[index] : self._begins[index + 1]].data

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts one behind the other, ``[sum(sizes), h]``: in this memory, if they are, else copied.

        The memory is let go of; who asks for a part again gets another.
        """
        whole, self._whole = self._whole, None
        if whole is not None and all(self._holds(whole, i, part) for i, part in enumerate(parts)):
            return whole
        return torch.cat(list(parts))

    def _holds(self, whole: Tensor, index: int, part: Tensor) -> bool:
        row = whole.stride(0) * whole.element_size()
        there = part.data_ptr() == whole.data_ptr() + self._begins[index] * row or not part.numel()
        return there and part.dtype == whole.dtype and part.is_contiguous()


def cut(rows: Tensor, gradient: RowBuffer) -> tuple[Tensor, ...]:
    """Return rows in parts of the memory's sizes; their gradients are joined in the memory.

    To autograd they are no views of each other's memory: one may be written into without another's being noticed.
    """
    found: tuple[Tensor, ...] = apply_function(_Cut, gradient, rows)
    return found


def join(parts: Sequence[Tensor], memory: RowBuffer) -> Tensor:
    """Return what :meth:`RowBuffer.joined` returns, differentiably."""
    found: Tensor = apply_function(_Join, memory, *parts)
    return found


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: RowBuffer, rows: Tensor) -> tuple[Tensor, ...]:
        ctx.memory = memory
        return tuple(part.data for part in rows.split(memory.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, ctx.memory.joined(grads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: RowBuffer, *parts: Tensor) -> Tensor:
        ctx.sizes = memory.sizes
        return memory.joined(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *grad.contiguous().split(ctx.sizes)

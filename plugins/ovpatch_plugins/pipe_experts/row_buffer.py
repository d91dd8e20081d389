"""Rows of several chunks in one buffer, so that splitting and joining them copies nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.data_parallel.grad_hooks import apply_function


class RowBuffer:
    """Contiguous memory for the rows of several chunks; allocated at the first use."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._memory: Tensor | None = None

    def get_chunk(self, index: int, like: Tensor) -> Tensor:
        """Return a chunk's memory, ``[sizes[index], h]``, with the features, dtype and device of ``like``."""
        if self._memory is None:
            self._memory = like.new_empty((self._offsets[-1], *like.shape[1:]))
        # ``.data``: for autograd a view's version would change with every write to its neighbours.
        return self._memory[self._offsets[index] : self._offsets[index + 1]].data

    def join_chunks(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the chunks as one tensor, ``[sum(sizes), h]``: this buffer if they lie in it, else a copy.

        The buffer releases its memory; a later :meth:`get_chunk` allocates anew.
        """
        memory, self._memory = self._memory, None
        if memory is not None and all(self._holds(memory, i, chunk) for i, chunk in enumerate(chunks)):
            return memory
        return torch.cat(list(chunks))

    def _holds(self, memory: Tensor, index: int, chunk: Tensor) -> bool:
        row_bytes = memory.stride(0) * memory.element_size()
        in_place = chunk.data_ptr() == memory.data_ptr() + self._offsets[index] * row_bytes or not chunk.numel()
        return in_place and chunk.dtype == memory.dtype and chunk.is_contiguous()


def split_rows(rows: Tensor, grad_buffer: RowBuffer) -> tuple[Tensor, ...]:
    """Return rows in chunks of the buffer's sizes; their gradients are joined in the buffer.

    The chunks are no views of each other to autograd: an in-place write to one leaves the others' versions alone.
    """
    chunks: tuple[Tensor, ...] = apply_function(_Split, grad_buffer, rows)
    return chunks


def join_rows(chunks: Sequence[Tensor], buffer: RowBuffer) -> Tensor:
    """Return what :meth:`RowBuffer.join_chunks` returns, differentiably."""
    rows: Tensor = apply_function(_Join, buffer, *chunks)
    return rows


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: RowBuffer, rows: Tensor) -> tuple[Tensor, ...]:
        ctx.buffer = buffer
        return tuple(chunk.data for chunk in rows.split(buffer.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, ctx.buffer.join_chunks(grads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: RowBuffer, *chunks: Tensor) -> Tensor:
        ctx.sizes = buffer.sizes
        return buffer.join_chunks(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *grad.contiguous().split(ctx.sizes)

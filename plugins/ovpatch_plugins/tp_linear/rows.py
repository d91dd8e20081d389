"""Activations as rows of a matrix, the dimension that is cut over the ranks first.

[Note: rows by rank] A collective on plain memory puts what the ranks send one behind the other. So an activation that
is cut along dimension d becomes rows in which d comes first: then what is gathered is a matrix whose rows are in
order, and products take it as it is. Mostly that is a view. With a batch in front of the sequence, the small tensors
are laid out anew: the shard before it is gathered, and the product's output, which is a rank's part of the features.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ovpatch_plugins.tp_linear.products import linear


def to_rows(x: Tensor, dim: int) -> Tensor:
    """Return ``[.., s, .., k]`` as contiguous ``[s * .., k]``, dimension ``dim`` first."""
    if x.dim() != 2:
        if not _in_front(x.shape, dim):
            x = x.movedim(dim, 0)
        x = x.reshape(-1, x.shape[-1])
    return x.contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return rows as a contiguous activation.

    Args:
        rows: ``[s * .., n]``, dimension ``dim`` first.
        shape: Of an activation of which only dimension ``dim`` and the last may have other sizes.
        dim: The dimension that comes first in the rows.
    """
    if len(shape) == 2:
        return rows
    if len(shape) == 1:
        return rows.view(rows.shape[-1])
    before, behind = shape[:dim], shape[dim + 1 : -1]
    first = rows.shape[0] // max(prod(before) * prod(behind), 1)
    if _in_front(shape, dim):
        return rows.view(*before, first, *behind, rows.shape[-1])
    return rows.view(first, *before, *behind, rows.shape[-1]).movedim(0, dim).contiguous()


def place(rows: Tensor, features: int, shape: torch.Size, dim: int) -> Tensor:
    """Return memory for what a linear makes of rows: an activation, contiguous; arguments as of :func:`from_rows`."""
    others = prod(shape[:dim]) * prod(shape[dim + 1 : -1])
    return rows.new_empty((*shape[:dim], len(rows) // max(others, 1), *shape[dim + 1 : -1], features))


def fill(activation: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> None:
    """Compute a linear of rows into an activation."""
    if _in_front(activation.shape, dim):
        linear(rows, weight, bias, out=activation.view(-1, activation.shape[-1]))
    else:
        activation.copy_(from_rows(linear(rows, weight, bias), activation.shape, dim))


def _in_front(shape: torch.Size, dim: int) -> bool:
    return not dim or all(size == 1 for size in shape[:dim])

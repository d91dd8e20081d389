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
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def to_rows(x: Tensor, dim: int) -> Tensor:
    """Return ``[.., s, .., k]`` as contiguous ``[s * .., k]``, dimension ``dim`` first."""
    x = arrived(x)
    if not _in_front(x.shape, dim):
        x = x.movedim(dim, 0)
    return x.reshape(-1, x.shape[-1]).contiguous()


def arrived(x: Tensor) -> Tensor:
    """Return a tensor that one of torch's functional collectives writes, when it is there."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return rows as a contiguous activation.

    Args:
        rows: ``[s * .., n]``, dimension ``dim`` first.
        shape: Of an activation of which only dimension ``dim`` and the last may have other sizes.
        dim: The dimension that comes first in the rows.
    """
    if len(shape) == 1:
        return rows.view(rows.shape[-1])
    others = [size for i, size in enumerate(shape[:-1]) if i != dim]
    first = rows.shape[0] // max(prod(others), 1)
    if _in_front(shape, dim):
        return rows.view(*shape[:dim], first, *shape[dim + 1 : -1], rows.shape[-1])
    return rows.view(first, *others, rows.shape[-1]).movedim(0, dim).contiguous()


def _in_front(shape: torch.Size, dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])

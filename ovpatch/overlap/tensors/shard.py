"""A rank's shard of a flattened tensor.

A parameter's elements are sharded in memory order into equal parts, one for each rank. A shard depends only on the size
of the tensor and the number of ranks. It does not depend on buckets, which are assigned again after the first backward,
nor on other parameters. So a large gradient is reduced, and a parameter gathered, without a flat buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ovpatch.overlap.tensors.tensor_memory import is_dense


def compute_contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def has_same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether the tensor has these strides; those of dimensions of size 1 do not matter."""
    return tensor.stride() == strides or all(
        size == 1 or mine == theirs for size, mine, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


# --- shards ---


@dataclass(frozen=True)
class Shard:
    """The elements ``[begin, end)`` of a tensor, in memory order."""

    begin: int  # first element
    end: int  # one past the last element
    size: int  # elements that the shard of any rank takes in a collective; the last ones may be padded

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements owned."""
        return self.end - self.begin


@functools.lru_cache(maxsize=4096)  # every step asks for every parameter several times
def shard_range(numel: int, world: int, rank: int) -> Shard:
    """Return the shard of ``numel`` elements that a rank of ``world`` ranks owns."""
    size = -(-numel // world)
    return Shard(min(rank * size, numel), min((rank + 1) * size, numel), size)


def can_be_sharded(param: Tensor, world: int, minimum: int) -> bool:
    """Return whether a parameter is sharded: dense, of floating point, and large enough for a shard on every rank.

    Args:
        param: The parameter.
        world: Number of ranks.
        minimum: Smallest number of elements that is worth it. Small parameters stay whole on all ranks: together they
            are a per mille of a model, and a launch for each would cost more than it saves.
    """
    return (
        param.numel() >= max(minimum, world * world)
        and param.layout is torch.strided
        and param.is_floating_point()
        and is_dense(param)
    )


def shard_view(tensor: Tensor, own: Shard) -> Tensor:
    """Return a rank's shard of a dense tensor as a one-dimensional view, ``[own.numel]``."""
    return tensor.as_strided((own.numel,), (1,), tensor.storage_offset() + own.begin)


def view_flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, as a one-dimensional view.

    Shape ``[*]`` -> ``[numel]``.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def unshard(param: Tensor, shards: Mapping[int, Tensor], ranges: Sequence[Shard]) -> Tensor:
    """Return a tensor like ``param`` made of the ranks' shards.

    Args:
        param: What the result is like.
        shards: The shards, by rank, ``[size]`` or ``[numel]`` each.
        ranges: Which elements each rank owns.
    """
    whole = torch.empty_like(param, requires_grad=False)
    for rank, shard in shards.items():
        own = ranges[rank]
        shard_view(whole, own).copy_(shard[: own.numel])
    return whole

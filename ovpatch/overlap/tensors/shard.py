"""The geometry of shards: equal contiguous ranges of a flattened tensor, one per rank.

A shard depends only on the size of the tensor and the number of ranks. It depends neither on other
parameters nor on buckets, which are assigned again after the first backward. So a large gradient is
reduced, and a large parameter gathered, in its own memory, without a flat buffer.
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
    strides = [0] * len(shape)
    step = 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        # torch counts an empty dimension as one.
        step *= max(shape[i], 1)
    return tuple(strides)


def has_same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether the tensor has these strides, except for dimensions of size 1."""
    return tensor.stride() == strides or all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


# --- shards ---


@dataclass(frozen=True)
class Shard:
    """The elements ``[begin, end)`` of a tensor, in memory order.

    Attributes:
        begin: The first element.
        end: The element after the last one.
        size: The number of elements that any rank's shard takes in a collective. It is larger than
            :attr:`numel` if the shard is padded.
    """

    begin: int
    end: int
    size: int

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements that the rank owns."""
        return self.end - self.begin


# Every step computes the shard of each parameter several times.
@functools.lru_cache(maxsize=4096)
def shard_range(numel: int, world: int, rank: int) -> Shard:
    """Return the shard of a tensor of ``numel`` elements that a rank of ``world`` ranks owns."""
    size = -(-numel // world)
    # The shards of the last ranks are shorter, or empty, if the elements do not divide evenly.
    return Shard(min(rank * size, numel), min((rank + 1) * size, numel), size)


def can_be_sharded(param: Tensor, world: int, minimum: int) -> bool:
    """Return whether a parameter is dense, of floating point, and has enough elements to shard.

    Args:
        param: The parameter.
        world: Number of ranks.
        minimum: The smallest number of elements to shard. Smaller parameters stay unsharded: all of
            them are a per mille of a model, and a launch for each costs more than it saves.
    """
    return (
        # With `world * world` elements or more, no rank's shard is empty.
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
    """Return a full tensor like ``param`` from the shards of all ranks.

    Args:
        param: The tensor that defines shape, strides, dtype and device.
        shards: The shards by rank, ``[size]`` or ``[numel]`` each.
        ranges: The range of each rank.
    """
    full = torch.empty_like(param, requires_grad=False)
    for rank, shard in shards.items():
        own = ranges[rank]
        # A padded shard has further elements, which belong to no tensor.
        shard_view(full, own).copy_(shard[: own.numel])
    return full

"""Which elements of a parameter a rank owns.

[Note: every parameter is cut] A parameter's elements are dealt out in the order in which they lie in memory, in equal
parts, one per rank. So what a rank owns depends on the parameter's size and the number of ranks alone: not on buckets,
which are cut anew after the first backward, nor on other parameters; and a large gradient can be reduced, and a
parameter gathered, where it lies, without a copy into a flat buffer. Small parameters are not cut: together they are a
per mille of a model, and a launch for each would cost more than it saves (unless parts are what the user asks for).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ovpatch.overlap.tensors.ownership import is_dense


@dataclass(frozen=True)
class Shard:
    """The part ``[begin, end)`` of a tensor's elements, in memory order.

    Attributes:
        begin: First element.
        end: One past the last element.
        size: Elements that every rank's part takes in a collective; the last part may be padded.
    """

    begin: int
    end: int
    size: int

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements owned."""
        return self.end - self.begin


@functools.lru_cache(maxsize=4096)  # every step asks for every parameter several times
def shard_range(numel: int, world: int, rank: int) -> Shard:
    """Return the part of ``numel`` elements that a rank of ``world`` ranks owns."""
    size = -(-numel // world)
    return Shard(min(rank * size, numel), min((rank + 1) * size, numel), size)


def can_be_sharded(param: Tensor, world: int, minimum: int) -> bool:
    """Tell whether a parameter is dealt out: dense, of floating point, and large enough for every rank to get a part.

    Args:
        param: The parameter.
        world: Number of ranks.
        minimum: Smallest number of elements that is worth it.
    """
    return (
        param.numel() >= max(minimum, world * world)
        and param.layout is torch.strided
        and param.is_floating_point()
        and is_dense(param)
    )


def shard_view(tensor: Tensor, own: Shard) -> Tensor:
    """Return a rank's part of a dense tensor as a one-dimensional view, ``[own.numel]``."""
    return tensor.as_strided((own.numel,), (1,), tensor.storage_offset() + own.begin)


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, as a one-dimensional view.

    Shape ``[*]`` -> ``[numel]``.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def unshard(param: Tensor, parts: Mapping[int, Tensor], slices: Sequence[Shard]) -> Tensor:
    """Return a tensor like ``param`` whose elements are the ranks' parts, in memory order."""
    whole = torch.empty_like(param, requires_grad=False)
    for rank, part in parts.items():
        own = slices[rank]
        shard_view(whole, own).copy_(part[: own.numel])
    return whole

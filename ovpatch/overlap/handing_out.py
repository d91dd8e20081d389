"""Copies of whole parameters from the rank that has updated them to all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.collectives import Broadcast
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.pending import plainly
from ovpatch.overlap.slices import flat
from ovpatch.overlap.works import Work


class ParamHandout:
    """Hands out one owner's parameters, together: a parameter alone in its own memory, several through a flat copy.

    Use it over and over: :meth:`start` after each step, then :meth:`finish`, both on the same stream.

    Args:
        params: Dense parameters of one dtype and device.
        group: The process group.
        owner: The rank in it that has updated them.
        feature: For labels in profiles.
        name: Of the bucket, for labels in profiles.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        owner: int,
        *,
        feature: str = "dist_optimizer",
        name: str = "",
    ) -> None:
        self._params = tuple(params)
        self._is_owner = group.rank() == owner
        self._broadcast = Broadcast(group, owner)
        self._labels = label(feature, "broadcast", name), label(feature, "wait", name)
        self._under_way: tuple[Work, Tensor] | None = None

    def start(self) -> None:
        """Start: a collective, which all ranks of the group must call in the same order."""
        with plainly(), span(self._labels[0]):
            elements = self._elements()
            if len(elements) == 1:
                sent = elements[0]
            elif self._is_owner:
                sent = torch.cat(elements)
            else:
                sent = elements[0].new_empty(sum(map(len, elements)))
            self._under_way = self._broadcast(sent), sent

    def finish(self) -> None:
        """Make the current stream wait for the values."""
        assert self._under_way is not None
        with plainly(), span(self._labels[1]):
            work, received = self._under_way
            self._under_way = None
            work.wait()
            elements = self._elements()
            if len(elements) > 1 and not self._is_owner:
                torch._foreach_copy_(elements, received.split([len(one) for one in elements]))

    def _elements(self) -> list[Tensor]:
        return [flat(param.data) for param in self._params]

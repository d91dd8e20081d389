"""Where the gradients of a model are cut into buckets, and the order in which they come, by which that is decided."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ovpatch.overlap.layout import Layout
from ovpatch.overlap.reduction import Bucket


class Cutting:
    """Cuts by registration at first, and anew along the order of a backward's gradients.

    Args:
        layout: How to cut.
        group: The process group.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup) -> None:
        self._layout, self._group = layout, group
        self._came: list[int] = []
        self._order: list[int] = []

    def backward_begins(self) -> None:
        """Forget the order of the last backward."""
        self._came.clear()

    def came(self, index: int) -> None:
        """Note that the gradient of a parameter is complete."""
        self._came.append(index)

    def last(self) -> list[int]:
        """Return the parameters in the order in which their gradients came, as far as that was noted."""
        return list(self._came)

    def agree(self) -> None:
        """Cut along the last backward's order on the group's first rank from now on; every rank calls this."""
        params = self._layout.params
        missing = set(range(len(params))).difference(self._came)
        order = torch.tensor([*self._came, *sorted(missing)], dtype=torch.int64, device=params[0].device)
        dist.broadcast(order, src=dist.get_global_rank(self._group, 0), group=self._group)
        self._order = order.tolist()

    def buckets(self, *, bucketed: bool) -> list[Bucket]:
        """Return the buckets; ``bucketed`` as for :meth:`Layout.initial`, until there is an order."""
        return self._layout.along(self._order) if self._order else self._layout.initial(bucketed=bucketed)

"""By what rows travel between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.labels import label, span
from ovpatch.overlap.works import Pending


class Lane(Protocol):
    """Carries rows; one all-to-all behind the other, on all ranks in the same order."""

    def start(self, found: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """Start to send rows.

        Args:
            found: Where received rows are put, by rank, ``[sum(received), h]``, contiguous.
            rows: ``[sum(sent), h]``, by the rank that is to get them, contiguous.
            received: How many each rank sends.
            sent: How many each rank is to get.

        Returns:
            What to wait for.
        """


@dataclass(frozen=True)
class Collective:
    """torch.distributed's own all-to-all.

    Attributes:
        group: The ranks.
    """

    group: dist.ProcessGroup

    def start(self, found: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """See :meth:`Lane.start`."""
        with span(label("pipe_experts", "all_to_all")):
            work = dist.all_to_all_single(found, rows, list(received), list(sent), group=self.group, async_op=True)
        return Pending((work,), (rows,))

"""Flags that ranks raise on their own, and that take effect on all of them before the same step.

[Note: when a vote counts] A rank cannot change what it communicates because of something that it alone has seen. Flags
are summed over the ranks after the collectives of a step and read before a later one, which one being fixed: the next
while training begins, half a period later afterwards, when waiting for the sum would stall the host. A step that is
captured into a CUDA graph casts and reads none: its host can neither wait for a sum nor look at one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ovpatch.overlap.collectives import AllReduce
from ovpatch.overlap.cuda_graphs import capturing
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.works import Work

PERIOD = 16


class Votes:
    """Sums of flags over the ranks of a group.

    Args:
        group: The process group.
        device: Where its collectives run.
        feature: Name for labels.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, feature: str) -> None:
        self._device = device
        self._label = label(feature, "votes")
        self._all_reduce = AllReduce(group, device)
        self._cast: tuple[int, torch.Tensor, Work] | None = None

    def cast(self, step: int, flags: Sequence[int]) -> None:
        """Start the sum, if one is due after this step. Every rank calls this after the same steps."""
        if (step < PERIOD or (step + 1) % PERIOD == 0) and not capturing(self._device):
            self._wait()
            # From pinned memory, or the host would wait for all that the device has to do.
            cast = torch.tensor(flags, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
            votes = cast.to(self._device, non_blocking=True)
            with span(self._label):
                (work,) = self._all_reduce([votes])
            self._cast = (step, votes, work)

    def result(self, step: int) -> list[int] | None:
        """Return the sums that take effect before this step, if any do."""
        if self._cast is None or step < self._cast[0] + (1 if self._cast[0] < PERIOD else PERIOD // 2):
            return None
        if capturing(self._device):
            return None
        votes = self._wait()
        assert votes is not None
        self._cast = None
        return [int(vote) for vote in votes.tolist()]

    def _wait(self) -> torch.Tensor | None:
        if self._cast is None:
            return None
        _, votes, work = self._cast
        work.wait()
        return votes

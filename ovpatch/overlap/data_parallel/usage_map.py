"""The parameters that any rank used in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import AllReduce, Work
from ovpatch.overlap.comm.streams import profiler_label, profiler_span

_USAGE_LABEL = profiler_label("ddp", "usage")


class UsageMap:
    """Which parameters took part in a step: a flag for each, summed over ranks on request.

    A parameter that only other ranks used gets their average; one that no rank used keeps the gradient it had, so that
    optimizers skip it (no weight decay), as under stock DDP.

    Args:
        count: Number of parameters.
        group: The process group.
        device: Where its collectives run.

    Attributes:
        is_uniform: Whether in the last map with counts each parameter was used once by all ranks, or by none.
        is_reducing: Whether a sum is under way.
        last: By how many ranks each parameter was used in the last step, int32, ``[count]``.
    """

    def __init__(self, count: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._used, self._world = [0] * count, group.size()
        self._has_counts = self.is_uniform = self.is_reducing = False
        self._device = device
        self.last = self._map = torch.zeros(count, dtype=torch.int32, device=device)
        self._all_reduce = AllReduce(group, device)
        self._works: Sequence[Work] = ()

    def record(self, index: int) -> None:
        """Record that this rank gave the parameter a gradient."""
        self._used[index] = 1

    def start_all_reduce(self, counts: Sequence[int] = ()) -> None:
        """Start the sum over ranks.

        Args:
            counts: How often this rank used each parameter, by which :attr:`is_uniform` is set.
        """
        self._has_counts, self.is_reducing = bool(counts), True
        several = self._world + 1  # which makes a sum that no ranks have that used it once
        by_count = [one * (several if n > 1 else 1) for one, n in zip(self._used, counts, strict=False)]
        self._map = torch.tensor(by_count or self._used, dtype=torch.int32, device=self._device)
        with profiler_span(_USAGE_LABEL):
            self._works = self._all_reduce([self._map])

    def finish_all_reduce(self) -> frozenset[int]:
        """Return the parameters that no rank used, and start afresh.

        Reading the sum makes the host wait for the device, so it is read only if this rank left a parameter out, or
        has counted.
        """
        for work in self._works:
            work.wait()
        totals = self._map.tolist() if self._has_counts or not all(self._used) else ()
        if self._has_counts:
            self.is_uniform = all(total in (0, self._world) for total in totals)
        self._used = [0] * len(self._used)
        self.last, self._works, self.is_reducing = self._map, (), False
        return frozenset(i for i, total in enumerate(totals) if total == 0)

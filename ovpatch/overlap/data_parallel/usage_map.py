"""Usage map: the parameters that any rank used in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import AllReduce, Work
from ovpatch.overlap.comm.streams import profiler_label, profiler_span

_USAGE_LABEL = profiler_label("ddp", "usage")


class UsageMap:
    """A flag for each parameter that took part in a step, summed over ranks on request.

    A parameter that only peers used gets their average. A parameter that no rank used keeps the
    gradient that it had, so that optimizers skip it (no weight decay), as in stock PyTorch.

    Args:
        count: Number of parameters.
        group: The process group.
        device: The device on which its collectives run.

    Attributes:
        is_uniform: Whether in the last map with counts all ranks or no rank used a parameter, and
            none used it more than once.
        is_reducing: Whether an all-reduce of the map is in flight.
        has_changed: Whether two backwards of this rank left different parameters out.
        last: The number of ranks that used each parameter in the last step, int32, ``[count]``.
    """

    def __init__(self, count: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.is_uniform = False
        self.is_reducing = False
        self.has_changed = False
        self._world = group.size()
        self._device = device
        self._all_reduce = AllReduce(group, device)
        self._used = [0] * count
        # Whether the map in flight has counts.
        self._has_counts = False
        self._map = torch.zeros(count, dtype=torch.int32, device=device)
        self.last = self._map
        self._works: Sequence[Work] = ()
        # The parameters that this rank's last backward left out; None before the first one.
        self._unused: list[int] | None = None

    def record(self, index: int) -> None:
        """Record that this rank gave the parameter a gradient."""
        self._used[index] = 1

    def note_unused(self, unused: list[int]) -> None:
        """Note the parameters that this rank's backward leaves out."""
        if self._unused is not None and unused != self._unused:
            self.has_changed = True
        self._unused = unused

    def start_all_reduce(self, counts: Sequence[int] = ()) -> None:
        """Start the sum over ranks.

        Args:
            counts: How often this rank used each parameter; sets :attr:`is_uniform`.
        """
        self._has_counts = bool(counts)
        self.is_reducing = True
        # No sum of ranks that used a parameter once reaches this number.
        several = self._world + 1
        flags = [
            used * (several if count > 1 else 1)
            for used, count in zip(self._used, counts, strict=False)
        ]
        self._map = torch.tensor(flags or self._used, dtype=torch.int32, device=self._device)
        with profiler_span(_USAGE_LABEL):
            self._works = self._all_reduce([self._map])

    def finish_all_reduce(self) -> frozenset[int]:
        """Return the parameters that no rank used, and clear the map.

        The host must wait for the device to read the sum. So it reads the sum only if this rank
        left a parameter out, or has counted.
        """
        for work in self._works:
            work.wait()
        totals = self._map.tolist() if self._has_counts or not all(self._used) else ()
        if self._has_counts:
            self.is_uniform = all(total in (0, self._world) for total in totals)
        self._used = [0] * len(self._used)
        self.last = self._map
        self._works = ()
        self.is_reducing = False
        return frozenset(index for index, total in enumerate(totals) if total == 0)

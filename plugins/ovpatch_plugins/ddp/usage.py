"""Which parameters took part in a step, on this rank and on any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from ovpatch.overlap.collectives import AllReduce
from ovpatch.overlap.engine import executed
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.works import Work

_LABEL = label("ddp", "usage")


class UsageMap:
    """A flag per parameter, summed over ranks on request.

    A parameter that only other ranks used gets their average; one that nobody used keeps the gradient it had, so that
    optimizers skip it (no weight decay), as under stock DDP.

    Args:
        count: Number of parameters.
        group: The process group.
        device: Where its collectives run.

    Attributes:
        alike: Whether in the last map with counts each parameter was used once by all ranks, or by none.
    """

    def __init__(self, count: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._used, self._world = [0] * count, group.size()
        self._counted = self.alike = False
        self._device = device
        self._last = torch.zeros(count, dtype=torch.int32, device=device)
        self._all_reduce = AllReduce(group, device)
        self._map: torch.Tensor | None = None
        self._work: Work | None = None

    def note(self, index: int) -> None:
        """Remember that this rank gave the parameter a gradient."""
        self._used[index] = 1

    def all_used(self) -> bool:
        """Tell whether this rank used every parameter."""
        return all(self._used)

    def launch(self, counts: Sequence[int] = ()) -> None:
        """Start the sum over ranks; with counts, how often this rank used each parameter, :attr:`alike` is told."""
        self._counted = bool(counts)
        several = self._world + 1  # which makes a sum that no ranks have that used it once
        by_count = [one * (several if n > 1 else 1) for one, n in zip(self._used, counts, strict=False)]
        self._map = torch.tensor(by_count or self._used, dtype=torch.int32, device=self._device)
        with span(_LABEL):
            (self._work,) = self._all_reduce([self._map])

    def launched(self) -> bool:
        """Tell whether a sum is under way."""
        return self._work is not None

    def nowhere_used(self) -> frozenset[int]:
        """Return the parameters that no rank used, and start afresh.

        Reading the sum makes the host wait for the device, so it is read only if this rank left a parameter out, or
        has counted.
        """
        assert self._map is not None
        assert self._work is not None
        self._work.wait()
        totals = self._map.tolist() if self._counted or not self.all_used() else ()
        if self._counted:
            self.alike = all(total in (0, self._world) for total in totals)
        nowhere = frozenset(i for i, total in enumerate(totals) if total == 0)
        self._used = [0] * len(self._used)
        self._last, self._map, self._work = self._map, None, None
        return nowhere

    def last(self) -> torch.Tensor:
        """Return by how many ranks each parameter was used in the last step, int32, ``[count]``."""
        return self._last


class Search:
    """Which parameters a backward leaves out, as far as autograd knows when it begins.

    A parameter that came although it was not to be reached (its gradient is made by a backward inside the backward) is
    waited for from then on.
    """

    def __init__(self) -> None:
        self._nested: set[int] = set()

    def came(self, index: int) -> None:
        """Remember a parameter that :meth:`left_out` has not foreseen."""
        self._nested.add(index)

    def left_out(self, nodes: Sequence[Node]) -> list[int]:
        """Return the parameters not to wait for. Only valid inside a backward; nothing was launched in the first."""
        return [i for i, comes in enumerate(executed(nodes)) if not comes and i not in self._nested]

"""Whether gradients of half precision travel as they are, where they are averaged in fp32.

[Note: cast where they are added] Backends add in the dtype that they are given, so a gradient that is to be averaged in
fp32 has to be cast first: a pass over memory, and twice the bytes to send. Copies between ranks leave adding to a
kernel of ours, which casts what it reads. The bits are the same, since a gradient of half precision is exact in fp32.

[Note: all alike] One rank's fp32 sum of several microbatches cannot be sent in half precision, and then no rank may:
slots hold one dtype. Whether there will be such a sum can be told when a backward begins, by whether any gradient is
there already, and ranks tell each other where their hosts meet. A sum that begins later, since a backward reaches one
parameter twice, is sent as its rounding, as stock sends it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ovpatch.overlap.copies.registry import scattering
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.halves import HALVES


class HalfWire:
    """How the cut gradients of one model travel.

    Args:
        params: The parameters.
        shards: Where their parts go.
        in_fp32: Whether gradients of half precision are averaged in fp32.
        sums: Whether they are added up in fp32 over several microbatches.

    Attributes:
        group: The process group that reduces; None until there is one.
        now: Whether this backward sends gradients of half precision as they are; not known before ranks have met.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        shards: GradShards,
        *,
        in_fp32: bool,
        sums: bool,
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self.now = False
        self._shards, self._sums = shards, sums
        self._halves = [param for param in params if in_fp32 and param.dtype in HALVES]
        self._wide = False

    def begin(self, *, copied: bool) -> None:
        """Note that a backward begins, to which nothing has been added yet.

        Args:
            copied: Whether each gradient is copied when it is complete.
        """
        self.now = False
        self._wide = copied or (self._sums and any(param.grad is not None for param in self._halves))

    def meet(self) -> None:
        """Have the host wait for the others, and agree with them. Called before a backward's first collective."""
        able = bool(self._halves and self._shards.chosen) and self._copies()
        self.now = not self._shards.meet(self._wide if able else None) and able

    def _copies(self) -> bool:
        return self.group is not None and scattering(self.group, self._halves[0].device) is not None

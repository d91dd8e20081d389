"""Gathering the parameters of one optimizer after its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ovpatch.overlap.slices import flat
from ovpatch_plugins.dist_optimizer.counters import COUNTERS

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.step import Part


class Gathers:
    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap

    def launch(self, parts: Sequence[Part]) -> None:
        for part in parts:
            own = part.shards.slice(part.index)
            world = part.shards.group.size()
            data = flat(part.param.data)
            mine = torch.zeros(own.size, dtype=data.dtype, device=data.device)
            mine[: own.numel] = data[own.begin : own.end]
            out = torch.empty(own.size * world, dtype=data.dtype, device=data.device)
            part.shards.group._allgather_base(out, mine).wait()
            data.copy_(out[: len(data)])
            COUNTERS.bytes_gathered += data.nbytes

    def settle(self) -> None:
        pass

"""How a layer is computed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist

from ovpatch_plugins.pipe_experts import parts as parts_of
from ovpatch_plugins.pipe_experts.options import DEFAULT_EXCHANGE
from ovpatch_plugins.pipe_experts.parts import Plan

# Second communicators, by the one they stand beside: layers share them, each takes memory on the device.
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class How:
    """How a layer is computed; the same on all ranks.

    Attributes:
        cut: Into which parts rows are cut; see :func:`ovpatch_plugins.pipe_experts.parts.plan`.
        parts: Into how many; 0 for as many as ``cut`` thinks best.
        delay_wgrad: Compute weight gradients while a part's rows are on their way back.
        multi_stream: Send rows back on a communicator of their own, so that they do not queue behind rows to come.
        exchange: By what rows travel; see :data:`ovpatch_plugins.pipe_experts.options.EXCHANGES`.
    """

    cut: str = "auto"
    parts: int = 0
    delay_wgrad: bool = True
    multi_stream: bool = False
    exchange: str = DEFAULT_EXCHANGE

    def plan(self, world: int, local: int) -> Plan:
        """Return the parts of a layer with ``local`` experts on each of ``world`` ranks."""
        return parts_of.plan(world, local, self.cut, self.parts, self.exchange)

    def way_back(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the communicator on which rows are sent back; made when first needed, by all ranks of the group."""
        if not self.multi_stream:
            return group
        if group not in _lanes:
            ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
            _lanes[group] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        return _lanes[group]

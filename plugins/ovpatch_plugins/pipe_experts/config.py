"""How a layer is computed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ovpatch.overlap.comm.group_state import group_state
from ovpatch_plugins.pipe_experts.options import DEFAULT_EXCHANGE

if TYPE_CHECKING:
    from ovpatch_plugins.pipe_experts.chunks import ChunkPlan


@dataclass(frozen=True)
class MoEConfig:
    """How a layer is computed; the same on all ranks.

    Attributes:
        cut: Into which parts rows are cut; see :func:`ovpatch_plugins.pipe_experts.chunks.plan`.
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

    def plan(self, world: int, local: int) -> ChunkPlan:
        """Return the parts of a layer with ``local`` experts on each of ``world`` ranks."""
        from ovpatch_plugins.pipe_experts import chunks  # not before a layer needs it

        return chunks.plan(world, local, self.cut, self.parts, self.exchange)

    def way_back(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the communicator on which rows are sent back; made when first needed, by all ranks of the group."""
        if not self.multi_stream:
            return group
        # Layers share it: each communicator takes memory on the device.
        return group_state(group).get_or_create(("way back",), lambda: _new_group(group))


def _new_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return made


# Whether the feature is on in this process, and how it computes.


class State:
    """What taken-over layers look up at every call.

    Attributes:
        on: Off, they do what stock does.
    """

    def __init__(self) -> None:
        self.on = False
        self._options: Mapping[str, Any] = {}

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Compute as the feature's options say."""
        self._options = dict(options)
        vars(self).pop("how", None)
        self.on = True

    @functools.cached_property
    def how(self) -> MoEConfig:
        """How layers are computed; imported with the first layer, which a script may not have."""
        return MoEConfig(**self._options)


STATE = State()

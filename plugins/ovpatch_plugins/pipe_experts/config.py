"""How a layer is computed, and whether the feature is on in this process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ovpatch_plugins.pipe_experts.options import DEFAULT_EXCHANGE


@dataclass(frozen=True)
class MoEConfig:
    """How a layer is computed; the same on all ranks."""

    cut: str = "auto"  # how rows are cut into chunks; see :func:`ovpatch_plugins.pipe_experts.chunks.make_plan`
    parts: int = 0  # number of chunks; 0 for the default of ``cut``
    delay_wgrad: bool = True  # compute weight gradients while a chunk's rows are on their way back
    multi_stream: bool = False  # combine on a second communicator
    exchange: str = DEFAULT_EXCHANGE  # how rows travel; see ovpatch_plugins.pipe_experts.options.EXCHANGES

    def get_combine_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the communicator of the combine; all ranks of the group make it at its first use."""
        if not self.multi_stream:
            return group
        from ovpatch.overlap.comm.group_state import group_state  # loaded with the first layer

        # Layers share it: each communicator takes memory on the device.
        return group_state(group).get_or_create(("way back",), lambda: _new_group(group))


def _new_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return made


class FeatureState:
    """The state that taken-over layers read at every call."""

    def __init__(self) -> None:
        self.on = False  # whether the feature is on; if not, layers compute as stock does
        self._options: Mapping[str, Any] = {}

    def enable_feature(self, options: Mapping[str, Any]) -> None:
        """Switch on with the feature's options."""
        self._options = dict(options)
        vars(self).pop("config", None)
        self.on = True

    @functools.cached_property
    def config(self) -> MoEConfig:
        """How layers are computed."""
        return MoEConfig(**self._options)


STATE = FeatureState()

"""Options of the feature, the settings of a layer, and whether the feature is on in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovpatch.hookspecs import Option, make_count_parser

if TYPE_CHECKING:
    import torch.distributed as dist

CUTS: Final = ("auto", "none", "experts", "tokens")
"""Ways to cut rows into chunks: as measured, not at all, by groups of experts, by slices of the tokens."""

EXCHANGES: Final = ("c10d", "symmetric", "auto")
"""Ways to send rows: by torch.distributed's all-to-alls, over symmetric memory, as measured."""

DEFAULT_EXCHANGE: Final = "c10d"


OPTIONS: Final = (
    Option(
        "cut",
        "auto",
        "How a layer's rows are cut into chunks. experts: by groups of a rank's experts, so that "
        "each weight is used once. tokens: by slices of the batch. none: not at all. auto: the "
        "fastest of these for the layer and its number of tokens; all ranks measure it once and "
        "keep it in OVPATCH_CACHE_DIR.",
        choices=CUTS,
    ),
    Option(
        "parts",
        0,
        "Number of chunks. 0: up to 4 groups of experts, or 2 slices of tokens; auto measures 2, 4 "
        "and 8.",
        parse=make_count_parser("a number of parts, or 0 for as many as the cut thinks best"),
        aliases=("multi_data", "pipeline_degree"),
        values="a number of chunks",
    ),
    Option(
        "delay_wgrad",
        True,
        "Compute weight gradients after the launch of a chunk's all-to-all, if the feature "
        "computes the experts.",
        aliases=("delay_wgrad_compute",),
    ),
    Option(
        "multi_stream",
        False,
        "Send results back on a second communicator, so that they do not wait for later "
        "dispatches.",
        experimental=(True,),
    ),
    Option(
        "exchange",
        DEFAULT_EXCHANGE,
        "How rows are sent. c10d: by torch.distributed's all-to-alls. symmetric: by a kernel that "
        "stores them into the memory of the host's other GPUs; elsewhere it is an error. auto: the "
        "faster of the two, if cut=auto measures.",
        choices=EXCHANGES,
        experimental=("symmetric", "auto"),
    ),
)


@dataclass(frozen=True)
class MoEConfig:
    """The settings of a layer, the same on all ranks.

    Attributes:
        cut: How rows are cut into chunks; see :func:`ovpatch_plugins.pipe_experts.routing.make_plan`.
        parts: Number of chunks; 0 for the default of ``cut``.
        delay_wgrad: Whether weight gradients are computed while a chunk's rows are sent back.
        multi_stream: Whether the combine has a second communicator.
        exchange: How rows are sent; an element of ``EXCHANGES``.
    """

    cut: str = "auto"
    parts: int = 0
    delay_wgrad: bool = True
    multi_stream: bool = False
    exchange: str = DEFAULT_EXCHANGE

    def get_combine_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the communicator of the combine; its first use is a collective of the group."""
        if not self.multi_stream:
            return group
        # Options are read without torch; this module is loaded with the first layer.
        from ovpatch.overlap.comm.lifetimes import group_state

        # Layers share the communicator, because each takes memory on the device.
        return group_state(group).get_or_create(
            ("way back",), lambda: make_communicator(group, "ovpatch way back")
        )


def make_communicator(group: dist.ProcessGroup, description: str) -> dist.ProcessGroup:
    """Return a new communicator over the ranks of a group, which all call this."""
    # Options are read without torch.
    import torch.distributed as dist

    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    made: dist.ProcessGroup = dist.new_group(
        ranks, backend=backend, use_local_synchronization=True, group_desc=description
    )
    return made


class FeatureState:
    """The state that patched layers read at every call.

    Attributes:
        is_on: Whether the feature is on. If not, layers compute as in stock PyTorch.
        config: The settings of layers.
    """

    is_on: bool = False
    config: MoEConfig = MoEConfig()


STATE = FeatureState()

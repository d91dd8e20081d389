"""The order of gradients under ``DistributedDataParallel(device_mesh=)``.

torch makes a DTensor of each local parameter once, in the first forward, and its node stays for all
steps. The engine runs ready nodes by age, the oldest last. So all gradients would reach their
parameters at the end of the backward, where no computation hides their reductions.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch.overlap.autograd import find_local_param

GRADS_ARE_SHARDS: Final = "_ovpatch_grads_are_shards"
"""The attribute of a module from whose sharded parameters the engine gets shards of gradients.

Nodes of other parameters may add up gradients over the ranks of tensor parallelism, as those of norms do. Ranks pair
these sums by position. So they stay at the end of the backward, where their order does not depend on the graph of a
rank.
"""

# AccumulateGrad nodes have the largest number, so that each gradient is accumulated at once.
_NEARLY_LAST: Final = 2**64 - 2


class MeshGrads:
    """The nodes between local parameters of a model and their DTensors, which the engine runs as soon as it can."""

    def __init__(self) -> None:
        # Each node with its number in stock PyTorch; None before the search. torch makes the DTensors once, so one
        # search finds them.
        self._numbers: list[tuple[Any, int]] | None = None

    @torch._disable_dynamo
    def hasten(self, model: nn.Module) -> None:
        """Let the engine run each node as soon as it has a gradient.

        Args:
            model: The model, after its first forward.
        """
        if self._numbers is not None:
            return
        self._numbers = []
        # The class of a parameter whose gather is in flight would wait for it.
        with torch._C.DisableTorchFunctionSubclass():
            for module in model.modules():
                if getattr(module, GRADS_ARE_SHARDS, False):
                    self._numbers += filter(None, map(_find_number, vars(module).values()))
        for node, _ in self._numbers:
            node._set_sequence_nr(_NEARLY_LAST)

    def restore(self) -> None:
        """Let the engine run the nodes at the end again."""
        for node, number in self._numbers or ():
            node._set_sequence_nr(number)
        self._numbers = []

    # The module may outlive its wrapper.
    def __del__(self) -> None:
        self.restore()


def _find_number(value: Any) -> tuple[Any, int] | None:
    """Return the node of a sharded parameter's DTensor with its number; None for anything else."""
    # torch marks the parameters that it has made of DTensors.
    is_param = isinstance(value, Tensor) and hasattr(find_local_param(value), "_st_info")
    if not is_param or not value._spec.placements[0].is_shard():
        return None
    number = value.grad_fn._sequence_nr()
    # Another wrapper of the module may have raised the number, and restores it.
    return None if number == _NEARLY_LAST else (value.grad_fn, number)

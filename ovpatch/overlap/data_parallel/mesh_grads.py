"""The order of gradients under ``DistributedDataParallel(device_mesh=)``.

torch makes a DTensor of each local parameter once, in the first forward, and its node stays for all
steps. The engine runs ready nodes by age, the oldest last. So all gradients would reach their
parameters at the end of the backward, where no computation hides their reductions. What is worse,
the gradients of norms are added up over the ranks of tensor parallelism there, sequentially, while
the GPU waits for the host.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

# AccumulateGrad nodes have the largest number, so that each gradient is accumulated at once.
_NEARLY_LAST: Final = 2**64 - 2


class MeshGrads:
    """The nodes between the local parameters of a model and their DTensors."""

    def __init__(self) -> None:
        # Each node with its number in stock PyTorch.
        self._numbers: list[tuple[Any, int]] = []

    @torch._disable_dynamo
    def hasten(self, model: nn.Module) -> None:
        """Let the engine run each node as soon as it has a gradient.

        Args:
            model: The model, after its first forward.
        """
        if self._numbers:
            return
        # The class of a parameter whose gather is in flight would wait for it.
        with torch._C.DisableTorchFunctionSubclass():
            for module in model.modules():
                for value in vars(module).values():
                    node: Any = value.grad_fn if isinstance(value, Tensor) else None
                    if type(node).__name__ == "_FromTorchTensorBackward":
                        self._numbers.append((node, node._sequence_nr()))
        for node, _ in self._numbers:
            node._set_sequence_nr(_NEARLY_LAST)

    def restore(self) -> None:
        """Let the engine run the nodes at the end again."""
        for node, number in self._numbers:
            node._set_sequence_nr(number)
        self._numbers = []

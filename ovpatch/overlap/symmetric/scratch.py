"""Memory for the descriptors that kernels make."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Memory of one device for kernels of which none runs while another one does; ``triton.set_allocator`` takes it.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[Tensor] = []
        self._size = 0

    def __call__(self, size: int, alignment: int, stream: int | None) -> Tensor:
        """Return memory that a kernel may use while it runs.

        Args:
            size: Bytes.
            alignment: Of its address; what torch allocates is aligned well enough.
            stream: Where the kernel will run.
        """
        if size <= self._size:
            return self._made[-1]
        made = torch.empty(size, dtype=torch.int8, device=self._device)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made  # the graph's
        self._made.append(made)  # smaller ones may still be in use, by any stream or graph
        self._size = size
        return made

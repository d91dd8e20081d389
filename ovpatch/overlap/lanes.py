"""Streams on which work was produced, so that a collective starts after all of it.

The autograd engine runs a gradient's hook on the stream of the forward operation. A collective launched from one hook
is ordered behind that hook's stream only; gradients of the same bucket that came from other streams need a wait.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Producers:
    """The streams of one device that produced gradients since the last :meth:`clear`.

    Args:
        device: The device; on other devices than CUDA there are no streams and every method does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.type == "cuda" else None
        self._streams: dict[int, torch.cuda.Stream] = {}

    def note(self) -> None:
        """Remember the current stream. Cheap when it is known already: called for every gradient."""
        if self._index is not None and torch._C._cuda_getCurrentRawStream(self._index) not in self._streams:
            stream = torch.cuda.current_stream(self._index)
            self._streams[stream.cuda_stream] = stream

    def join(self, tensors: Iterable[Tensor]) -> None:
        """Make the current stream wait for all remembered ones.

        Args:
            tensors: What the current stream is going to read; their memory is kept until it has.
        """
        if self._index is None or len(self._streams) < 2:
            return
        current = torch.cuda.current_stream(self._index)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(current)

    def clear(self) -> None:
        """Forget all streams."""
        self._streams.clear()

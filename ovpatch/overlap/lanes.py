"""Streams on which work was produced, so that a collective starts after all of it.

The autograd engine runs a gradient's hook on the stream of the forward operation. A collective launched from one hook
is ordered behind that hook's stream only; gradients of the same bucket that came from other streams need a wait.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Producers:
    """The CUDA streams that produced gradients since the last :meth:`clear`, per device."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[int, torch.cuda.Stream]] = {}

    def note(self, device: int) -> None:
        """Remember the current stream of a CUDA device. Cheap when it is known already: called for every gradient."""
        raw = torch._C._cuda_getCurrentRawStream(device)
        if raw not in self._streams.get(device, ()):
            self._streams.setdefault(device, {})[raw] = torch.cuda.current_stream(device)

    def join(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        """Make the device's current stream wait for all remembered ones.

        Args:
            device: The device; others than CUDA devices have no streams, so nothing is to be done.
            tensors: What the current stream is going to read; their memory is kept until it has.
        """
        streams = self._streams.get(device.index) if device.type == "cuda" else None
        if not streams or (len(streams) == 1 and torch._C._cuda_getCurrentRawStream(device.index) in streams):
            return  # the usual case, told without making a Stream object
        current = torch.cuda.current_stream(device)
        others = [stream for stream in streams.values() if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for tensor in tensors:
                tensor.record_stream(current)

    def clear(self) -> None:
        """Forget all streams."""
        self._streams.clear()

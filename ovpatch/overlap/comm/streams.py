"""Streams on which work was produced, so that a collective starts after all of it.

The autograd engine runs a gradient's hook on the stream of the forward operation. A collective launched from one hook
is ordered behind that hook's stream only; gradients of the same bucket that came from other streams need a wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

# --- labels ---


def profiler_label(feature: str, phase: str, name: str = "") -> str:
    """Return ``ovpatch::<feature>::<phase> (<name>)``; the phase is a verb or a collective, the name an object's."""
    return f"ovpatch::{feature}::{phase} ({name})" if name else f"ovpatch::{feature}::{phase}"


_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def profiler_span(text: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows ``text``, made by :func:`profiler_label`, as a range in torch's profiler.

    Without a profiler it does nothing: an idle ``record_function`` costs more than the launch of a collective.
    """
    return torch.autograd.profiler.record_function(text) if torch.autograd._profiler_enabled() else _NOTHING


# --- streams ---


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class ProducerStreams:
    """The CUDA streams that produced gradients since the last :meth:`clear`, per device."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[int, torch.cuda.Stream]] = {}

    def record_current(self, device: int) -> None:
        """Record the current stream of a CUDA device. Cheap if it is recorded already: called for every gradient."""
        raw = torch._C._cuda_getCurrentRawStream(device)
        if raw not in self._streams.get(device, ()):
            self._streams.setdefault(device, {})[raw] = torch.cuda.current_stream(device)

    def wait_for_producers(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        """Make the device's current stream wait for all recorded ones; nothing is done without streams.

        The current stream is going to read the tensors; their memory is kept until it has.
        """
        streams = self._streams.get(device.index) if device.type == "cuda" else None
        if not streams or (len(streams) == 1 and torch._C._cuda_getCurrentRawStream(device.index) in streams):
            return  # the usual case, without making a Stream object
        current = torch.cuda.current_stream(device)
        others = [stream for stream in streams.values() if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for tensor in tensors:
                tensor.record_stream(current)

    def clear(self) -> None:
        """Drop all recorded streams."""
        self._streams.clear()

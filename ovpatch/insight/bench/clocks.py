"""The time between borders, and the most memory in use meanwhile.

[Note: nothing waits while it measures] On CUDA a border records an event on the stream that the optimizer has just
used, and reads the host's clock; what is between two events is told only when the last border has been reached. The
events are made before the first. So a step that the host merely enqueues is timed where it runs, and one that the host
delays is timed with that delay.
"""

from __future__ import annotations

import resource
import sys
import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Marks the borders of the steps that count.

    Args:
        device: Where the parameters are.
        steps: How many steps there will be at most.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._host: list[int] = []
        self._device = device
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]

    def mark(self) -> None:
        """Note a border; see [Note: nothing waits while it measures]."""
        if self._events:
            self._events[len(self._host)].record(torch.cuda.current_stream(self._device))
        self._host.append(time.perf_counter_ns())

    def host_times(self) -> list[float]:
        """Return the steps' times by the host's clock, in ms."""
        return [(after - before) / 1e6 for before, after in pairwise(self._host)]

    def times(self) -> list[float]:
        """Return the steps' times in ms: those on the device if there is one, else the host's.

        Waits until the device has come to the last border.
        """
        used = self._events[: len(self._host)]
        if not used:
            return self.host_times()
        for event in used:  # all of them: the script may have changed streams in between
            event.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(used)]

    @property
    def kind(self) -> str:
        """What the times were taken with."""
        return "device events" if self._events else "host clock"


class Memory:
    """Peak memory of this process since the object was made; on CPU, of its whole life.

    Args:
        device: Where the parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> dict[str, Any]:
        """Return bytes: ``allocated`` and ``reserved`` on the device, or ``resident`` on the host."""
        if self._device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
            }
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def working_device(device: torch.device) -> torch.device:
    """Return the device whose time counts: that of the parameters, or the GPU of a script that keeps them on the host.

    Args:
        device: Where the optimizer's parameters are.
    """
    if device.type == "cpu" and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def name_of(device: torch.device) -> str:
    """Return what the device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def clock_rate(device: torch.device) -> int | None:
    """Return the device's present clock in MHz, None where that cannot be asked."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # noqa: BLE001  # it takes NVML, whose errors are of its own kind: parts of a device have no clock
        return None

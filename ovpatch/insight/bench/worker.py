"""What ``ovpatch bench`` does in each process: warm up, time the steps, leave a file, and leave.

[Note: what happens at which border] With W steps of warm-up and N steps to measure:

    1 .. W-1      looks at what the model is fed (:mod:`.throughput`)
    W-3 .. W-1    counts operations of each of the two steps, if ordered (:mod:`.flops`): the cheaper one is told, since
                  the other may hold an evaluation; nothing but the clock is there from W-1 on
    W .. W+N      marks the clock; the last of these writes the file and ends the process

A script that ends by itself before W+N leaves the file with what there is.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from ovpatch.insight import steps
from ovpatch.insight.bench import throughput
from ovpatch.insight.bench.throughput import Batches, FlopCount
from ovpatch.insight.steps import at_end
from ovpatch.session import worker_reports
from ovpatch.session.orders import Orders

# The time between borders, and the most memory in use meanwhile.
#
# [Note: nothing waits while it measures] On CUDA a border records an event on the stream that the optimizer has just
# used, and reads the host's clock; what is between two events is told only when the last border has been reached. The
# events are made before the first. So a step that the host merely enqueues is timed where it runs, and one that the
# host delays is timed with that delay.


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


FILE: Final = "bench"  # -<pid>.json


def begin(orders: Orders) -> None:
    """Begin to watch this process.

    Args:
        orders: ``details`` are ``warmup`` (at least 3), ``steps`` and ``count_flops``.
    """
    worker = _Worker(orders.directory, **orders.details)
    worker.watch()
    at_end(worker.conclude)


class _Worker:
    """See [Note: what happens at which border]."""

    def __init__(self, directory: Path, warmup: int, steps: int, count_flops: bool) -> None:
        self._directory, self._warmup, self._last = directory, warmup, warmup + steps
        self._batches = Batches()
        self._flops = [FlopCount(), FlopCount()] if count_flops else []
        self._clock: Clock | None = None
        self._memory: Memory | None = None
        self._pid: int | None = None  # of the process that steps; a data loader's child inherits all this

    def watch(self) -> None:
        self._steps = steps.Steps(self._directory, self._at_border)
        self._steps.watch()

    def _at_border(self, number: int) -> None:
        if self._clock is None:
            self._warm(number)
            return
        self._clock.mark()
        if number == self._last:
            self.conclude()
            steps.leave(self._directory)

    def _warm(self, number: int) -> None:
        if self._pid != os.getpid():
            self._begin()
        left = self._warmup - number
        if self._flops and left in (1, 2):
            self._flops[2 - left].stop()
        if number == 1:
            self._batches.begin()
        elif left >= 1:
            self._batches.step()
        if left == 1:
            self._batches.end()
        if self._flops and left in (2, 3):
            self._flops[3 - left].start()
        if left == 0:
            self._start()

    def _begin(self) -> None:
        """Note who we are: at the end the script may have destroyed its process group and its optimizer."""
        self._pid = os.getpid()
        self._rank, self._world = steps.rank(), steps.world()
        self._device = working_device(self._steps.device())

    def _start(self) -> None:
        self._memory = Memory(self._device)
        self._clock = Clock(self._device, self._last - self._warmup)
        self._clock.mark()

    def conclude(self) -> None:
        """Write the file, once, if this process has taken steps."""
        if self._pid == os.getpid():
            self._pid = None
            worker_reports.write_json(self._directory / f"{FILE}-{os.getpid()}.json", self._found())

    def _found(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world": self._world,
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
            "torch": torch.__version__,
            "device": name_of(self._device),
            "clock_mhz": clock_rate(self._device),
            "steps": self._steps.count,
            "clock": self._clock.kind if self._clock is not None else None,
            "ms": self._clock.times() if self._clock is not None else [],
            "host_ms": self._clock.host_times() if self._clock is not None else [],
            "memory": self._memory.peak() if self._memory is not None else {},
            "batch": self._batches.to_json(),
            "flops": throughput.cheaper(self._flops) if self._flops else None,
        }

"""The worker of ``ovpatch bench`` in each process: warm up, time the steps, write a file, and end the process."""

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
from ovpatch.insight.bench.throughput import BatchCounter, FlopCount
from ovpatch.insight.steps import run_at_exit
from ovpatch.session import worker_reports
from ovpatch.session.orders import Orders


class BorderClock:
    """Times at most ``steps`` measured steps without waiting for the device of the parameters.

    On CUDA a border records an event, made beforehand, on the optimizer's stream and reads the host's clock; times are
    read after the last border. A step that the host only enqueues is timed on the device, and one that the host delays
    includes that delay.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._host: list[int] = []
        self._device = device
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]

    def mark_border(self) -> None:
        """Mark a border."""
        if self._events:
            self._events[len(self._host)].record(torch.cuda.current_stream(self._device))
        self._host.append(time.perf_counter_ns())

    def read_host_times(self) -> list[float]:
        """Return the steps' times by the host's clock, in ms."""
        return [(after - before) / 1e6 for before, after in pairwise(self._host)]

    def read_times(self) -> list[float]:
        """Return the steps' times in ms: those on the device if there is one, else the host's.

        Waits until the device has reached the last border.
        """
        used = self._events[: len(self._host)]
        if not used:
            return self.read_host_times()
        for event in used:  # all of them: the script may have changed streams
            event.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(used)]

    @property
    def kind(self) -> str:
        """Kind of clock."""
        return "device events" if self._events else "host clock"


class PeakMemory:
    """Peak memory of this process since construction; on CPU, since the process started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read_peak(self) -> dict[str, Any]:
        """Return bytes: ``allocated`` and ``reserved`` on the device, or ``resident`` on the host."""
        if self._device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
            }
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def choose_device(device: torch.device) -> torch.device:
    """Return the device to time: that of the parameters, or the GPU of a script that keeps them on the host."""
    if device.type == "cpu" and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def get_device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def read_clock_mhz(device: torch.device) -> int | None:
    """Return the device's present clock in MHz, None if unknown."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # noqa: BLE001  # NVML's own errors: MIG instances have no clock
        return None


FILE: Final = "bench"  # -<pid>.json


def start_worker(orders: Orders) -> None:
    """Start the measurements in this process.

    The orders' details are ``warmup`` (at least 3), ``steps`` and ``count_flops``.
    """
    worker = _Worker(orders.directory, **orders.details)
    worker.start()
    run_at_exit(worker.write_results)


class _Worker:
    """Acts at the borders of W warm-up steps and N measured steps.

    - 1 to W-1: counts batches.
    - W-3 to W-1: counts operations of two steps, if ordered; the cheaper counts, since the other may hold an
      evaluation.
    - W to W+N: marks the clock; the last border writes the file and ends the process.

    A script that ends before W+N leaves the file with the measurements so far.
    """

    def __init__(self, directory: Path, warmup: int, steps: int, count_flops: bool) -> None:
        self._directory, self._warmup, self._last = directory, warmup, warmup + steps
        self._batches = BatchCounter()
        self._flops = [FlopCount(), FlopCount()] if count_flops else []
        self._clock: BorderClock | None = None
        self._memory: PeakMemory | None = None
        self._pid: int | None = None  # of the stepping process; a data loader's child inherits this object

    def start(self) -> None:
        self._steps = steps.StepCounter(self._directory, self._at_border)
        self._steps.start_counting()

    def _at_border(self, number: int) -> None:
        if self._clock is None:
            self._warm(number)
            return
        self._clock.mark_border()
        if number == self._last:
            self.write_results()
            steps.exit_with_peers(self._directory)

    def _warm(self, number: int) -> None:
        if self._pid != os.getpid():
            self._read_identity()
        left = self._warmup - number
        if self._flops and left in (1, 2):
            self._flops[2 - left].stop_counting()
        if number == 1:
            self._batches.start_counting()
        elif left >= 1:
            self._batches.close_step()
        if left == 1:
            self._batches.stop_counting()
        if self._flops and left in (2, 3):
            self._flops[3 - left].start_counting()
        if left == 0:
            self._start()

    def _read_identity(self) -> None:
        """Read rank and device now: at the end the script may have destroyed its process group and optimizer."""
        self._pid = os.getpid()
        self._rank, self._world = steps.get_rank(), steps.get_world_size()
        self._device = choose_device(self._steps.find_device())

    def _start(self) -> None:
        self._memory = PeakMemory(self._device)
        self._clock = BorderClock(self._device, self._last - self._warmup)
        self._clock.mark_border()

    def write_results(self) -> None:
        """Write the file once, if this process has taken steps."""
        if self._pid == os.getpid():
            self._pid = None
            worker_reports.write_json(self._directory / f"{FILE}-{os.getpid()}.json", self._collect_results())

    def _collect_results(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world": self._world,
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
            "torch": torch.__version__,
            "device": get_device_name(self._device),
            "clock_mhz": read_clock_mhz(self._device),
            "steps": self._steps.count,
            "clock": self._clock.kind if self._clock is not None else None,
            "ms": self._clock.read_times() if self._clock is not None else [],
            "host_ms": self._clock.read_host_times() if self._clock is not None else [],
            "memory": self._memory.read_peak() if self._memory is not None else {},
            "batch": self._batches.to_json(),
            "flops": throughput.choose_cheaper(self._flops) if self._flops else None,
        }

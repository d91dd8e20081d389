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
from pathlib import Path
from typing import Any, Final

import torch

from ovpatch.insight import steps
from ovpatch.insight.bench import flops
from ovpatch.insight.bench.clocks import Clock, Memory, clock_rate, name_of, working_device
from ovpatch.insight.bench.flops import FlopCount
from ovpatch.insight.bench.throughput import Batches
from ovpatch.insight.ending import at_end
from ovpatch.jobs.orders import Orders
from ovpatch.reports import workers

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
            workers.write_json(self._directory / f"{FILE}-{os.getpid()}.json", self._found())

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
            "flops": flops.cheaper(self._flops) if self._flops else None,
        }

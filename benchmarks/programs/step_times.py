"""Prints the step times and the peak of memory of a training script, in rounds.

A script declares the options with :func:`add_options`, makes a :class:`StepTimes` before it uses the device, and calls
``end_step()`` after each optimizer step. Each rank prints lines of JSON that begin with :data:`PREFIX`.

Alone, the script trains through its warm-up and its rounds and ends. With ``--turns FOLDER`` it waits for the file
``start`` in that folder before it uses the device, and for ``round-N`` before each round. So several scripts can keep
their models on the device while only one of them trains, and their rounds alternate without new processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PREFIX = "step_times: "
# The file in the folder of turns that has the id of the process that gives turns.
CONTROLLER = "controller"

_POLL_S = 0.01
# After a turn the allocator fetches its memory again, and caches are cold.
_UNTIMED_STEPS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all programs have."""
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=Path, help="wait for turns in this folder")
    parser.add_argument(
        "--best", action="store_true", help="with the settings of stock PyTorch that are fastest"
    )


class StepTimes:
    """The times of a script's steps, the CPU time of the process and the peak of its memory.

    Args:
        options: The options of :func:`add_options`.

    Attributes:
        total_steps: The number of optimizer steps that the script must take.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._rank = int(os.environ.get("RANK", 0))
        self._turns: Path | None = options.turns
        self._timed_steps: int = options.steps
        untimed = 0 if self._turns is None else min(_UNTIMED_STEPS, options.warmup)
        # Each block of steps ends with a report. The first one is the warm-up.
        self._blocks = iter([options.warmup] + [untimed + options.steps] * options.rounds)
        self.total_steps: int = options.warmup + options.rounds * (untimed + options.steps)
        self._steps_left = next(self._blocks)
        self._round = -1
        self._marks: list[Any] = []
        self._cpu_start_s = 0.0
        cuda = torch.cuda.is_available()
        self._print(
            "started", pid=os.getpid(), torch=torch.__version__, device="cuda" if cuda else "cpu"
        )
        self._wait_for_turn("start")

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that the script must take, and time it."""
        for step in range(self.total_steps):
            yield step
            self.end_step()

    def end_step(self) -> None:
        """Note the end of an optimizer step; at the end of a round, print its times and wait for the next turn."""
        self._steps_left -= 1
        if self._round >= 0 and self._steps_left <= self._timed_steps:
            self._mark()
        if self._steps_left == 0:
            self._end_block()

    def _end_block(self) -> None:
        _synchronize()
        if self._round < 0:
            self._print(
                "ready", device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            )
        else:
            cpu_ms = (_cpu_seconds() - self._cpu_start_s) / self._timed_steps * 1e3
            times = [
                round(ms, 3)
                for ms in itertools.starmap(_elapsed_ms, itertools.pairwise(self._marks))
            ]
            self._print(
                "round",
                round=self._round,
                ms=times,
                cpu_ms=round(cpu_ms, 3),
                peak_gib=round(_peak_gib(), 3),
            )
        self._round += 1
        self._marks = []
        self._steps_left = next(self._blocks, 0)
        if self._turns is not None and torch.cuda.is_available():
            # The peers need the memory of the activations, which are freed between steps. After the
            # last round this process may take longer to exit than the next one to start its turn.
            torch.cuda.empty_cache()
        if self._steps_left == 0:
            return
        self._wait_for_turn(f"round-{self._round}")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if self._steps_left == self._timed_steps:
            self._mark()

    def _mark(self) -> None:
        if not self._marks:
            self._cpu_start_s = _cpu_seconds()
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _wait_for_turn(self, name: str) -> None:
        """Wait for a file, and exit if the process that writes it has ended."""
        if self._turns is None:
            return
        while not (self._turns / name).exists():
            try:
                os.kill(int((self._turns / CONTROLLER).read_text()), 0)
            except OSError:
                sys.exit("the process that gives turns has ended")
            time.sleep(_POLL_S)

    def _print(self, event: str, **values: Any) -> None:
        # One write per line, because ranks share the output.
        line = PREFIX + json.dumps({"event": event, "rank": self._rank, **values})
        print(line + "\n", end="", flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _elapsed_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def _cpu_seconds() -> float:
    """Return the user and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_gib() -> float:
    """Return the peak of the device's memory in the round, on a CPU that of the process since its start."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

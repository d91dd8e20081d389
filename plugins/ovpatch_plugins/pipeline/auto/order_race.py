"""A race of orders in a job's own steps: in turns, until noise cannot have decided it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

SETTLING: Final = 2
"""Steps of each order before the first turn, in which kernels are loaded and memory is allocated for it."""

ROUNDS: Final = 4
"""How often each order has its turn in a lap of the race."""

TIMED: Final = 2
"""Steps of a turn that count, behind one in which ranks get as far apart as the order has them."""

LAPS: Final = 3
"""After as many laps the race ends, decided or not."""

TOLERATED: Final = 1.02
"""What an order may take in units of another one's time and still pass for as fast."""

CLEAR: Final = 0.99
"""What another order may take at most, in units of the time of the order as given, to be run instead of it."""

Seconds = Sequence[Sequence[float | None]]
"""Seconds of a step by candidate and round; None where none of a turn's steps ended well."""


class Verdict(NamedTuple):
    """What a race has shown.

    Attributes:
        best: The candidate that runs from now on: one that is clearly faster than the order as given, or else that.
        steps: Median seconds of a step of each candidate; infinite where none ended well.
        is_sure: Whether the best is, beyond noise, at most 2% slower than each other one.
    """

    best: int
    steps: list[float]
    is_sure: bool


class Turn(NamedTuple):
    """One step of a race."""

    candidate: int
    round: int
    is_timed: bool


class Race:
    """The turns of a race and their times on this rank.

    Args:
        count: Number of candidates.
        device: Where stages compute.
        rounds: Rounds in a lap.
        laps: Most laps.

    Attributes:
        turns: One for each step, of the laps so far.
    """

    def __init__(
        self, count: int, device: torch.device, *, rounds: int = ROUNDS, laps: int = LAPS
    ) -> None:
        self.turns: list[Turn] = []
        self._count, self._device, self._rounds, self._laps = count, device, rounds, laps
        self._timers: dict[tuple[int, int], list[StepTimer]] = {}
        self._laps_so_far = 0
        for candidate in range(count):
            self.turns += [Turn(candidate, 0, False)] * SETTLING
        self.add_lap()

    @property
    def may_go_on(self) -> bool:
        """Whether another lap is allowed."""
        return self._laps_so_far < self._laps

    def add_lap(self) -> None:
        """Line up another lap: every second round goes the other way, since a machine may get slower or faster."""
        first = self._laps_so_far * self._rounds
        self._laps_so_far += 1
        for number in range(first, first + self._rounds):
            turn = range(self._count) if number % 2 == 0 else reversed(range(self._count))
            for candidate in turn:
                self.turns += [
                    Turn(candidate, number, False),
                    *[Turn(candidate, number, True)] * TIMED,
                ]

    def add_time(self, turn: Turn, timer: StepTimer) -> None:
        """Count a step that has ended well."""
        self._timers.setdefault(turn[:2], []).append(timer)

    def read(self) -> Seconds:
        """Return this rank's times; on a device, all its work has ended before."""
        rounds = range(self.turns[-1].round + 1)
        return [
            [self._read_turn(candidate, number) for number in rounds]
            for candidate in range(self._count)
        ]

    def _read_turn(self, candidate: int, number: int) -> float | None:
        timers = self._timers.get((candidate, number))
        return statistics.median(timer.read_seconds() for timer in timers) if timers else None


def merge_ranks(by_rank: Sequence[Seconds]) -> Seconds:
    """Return the times of the slowest rank, turn by turn; a turn that failed on one rank has none."""
    merged = []
    for rows in zip(*by_rank, strict=True):
        columns = zip(*rows, strict=True)
        merged.append(
            [
                None if None in column else max(filter(None, column), default=None)
                for column in columns
            ]
        )
    return merged


def judge(seconds: Seconds) -> Verdict:
    """Tell which order runs on, and whether that is sure; the first candidate is the order as given.

    Orders are compared round by round, as neighbours in time share what slows the machine down. Another order runs on
    if the mean of the logarithms' differences, plus its two-sided 95% error, is below that of :data:`CLEAR`. It is sure
    that one is not slower than another if that sum is below the logarithm of :data:`TOLERATED`.
    """
    steps = find_medians(seconds)
    fastest = min(range(len(steps)), key=steps.__getitem__)
    others = range(1, len(steps))
    best = 0
    if math.isfinite(steps[0]):
        clear = [other for other in others if _is_below(seconds[other], seconds[0], CLEAR)]
        best = min(clear, key=steps.__getitem__, default=0)
    elif math.isfinite(steps[fastest]):
        best = fastest
    is_sure = math.isfinite(steps[best]) and all(
        other == best
        or not math.isfinite(steps[other])
        or _is_below(seconds[best], seconds[other], TOLERATED)
        for other in range(len(steps))
    )
    return Verdict(best, steps, is_sure)


def find_medians(seconds: Seconds) -> list[float]:
    """Return the median seconds of a step of each candidate; infinite if no step ended well."""
    known = ([turn for turn in row if turn is not None] for row in seconds)
    return [statistics.median(row) if row else math.inf for row in known]


def _is_below(own: Sequence[float | None], other: Sequence[float | None], ratio: float) -> bool:
    """Tell whether one order takes less than ``ratio`` of another one's time, beyond noise."""
    ratios = [math.log(a / b) for a, b in zip(own, other, strict=True) if a and b]
    count = len(ratios)
    if count < 3:
        return False
    freedom = count - 1
    quantile = (
        1.96 + 2.4 / freedom + 4.6 / freedom**2
    )  # of Student's distribution: 4.3 for 3 rounds, 2.2 for 12
    error = quantile * statistics.stdev(ratios) / math.sqrt(count)
    return statistics.fmean(ratios) + error <= math.log(ratio)


class StepTimer:
    """The time of a step, from its call to its end on the device. It starts when it is made.

    Args:
        device: Where stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._end = self._mark(), None

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        """End the step."""
        self._end = self._mark()

    def read_seconds(self) -> float:
        """Return the duration."""
        if self._device.type != "cuda":
            return float(self._end - self._begin)
        return float(self._begin.elapsed_time(self._end)) / 1000

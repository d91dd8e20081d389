"""A race of orders in a job's own steps: orders take turns until noise cannot have decided the race."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

SETTLING: Final = 2
"""The steps of each order before the first turn. In them CUDA loads kernels and allocates memory for the order."""

ROUNDS: Final = 4
"""The number of turns of each order in a lap of the race."""

TIMED: Final = 2
"""The steps of a turn that count. They follow a step in which ranks get as far apart as the order has them."""

LAPS: Final = 3
"""The number of laps after which the race ends, decided or not."""

TOLERATED: Final = 1.02
"""The largest ratio of an order's time to another's at which it still counts as equally fast."""

CLEAR: Final = 0.99
"""The largest ratio of an order's time to that of the order as given at which it replaces the latter."""

Seconds = Sequence[Sequence[float | None]]
"""Seconds of a step by candidate and round; None if none of a turn's steps succeeded."""


class Verdict(NamedTuple):
    """The result of a race.

    Attributes:
        best: The candidate that runs in all further steps: one that is clearly faster than the order as given,
            otherwise the order as given.
        steps: Median seconds of a step of each candidate; infinite if none succeeded.
        is_sure: Whether the best is, beyond noise, at most 2% slower than each other candidate.
    """

    best: int
    steps: list[float]
    is_sure: bool


class Turn(NamedTuple):
    """One step of a race.

    Attributes:
        candidate: The candidate that runs the step.
        round: The round.
        is_timed: Whether the step's time counts.
    """

    candidate: int
    round: int
    is_timed: bool


class Race:
    """The turns of a race and their times on this rank.

    Args:
        count: Number of candidates.
        device: The device on which stages compute.
        rounds: Rounds in a lap.
        laps: The largest number of laps.

    Attributes:
        turns: A turn for each step of the laps so far.
    """

    def __init__(
        self, count: int, device: torch.device, *, rounds: int = ROUNDS, laps: int = LAPS
    ) -> None:
        self.turns: list[Turn] = []
        self._count = count
        self._device = device
        self._rounds = rounds
        self._laps = laps
        # The timers of the steps that count, by candidate and round.
        self._timers: dict[tuple[int, int], list[StepTimer]] = {}
        self._laps_so_far = 0
        for candidate in range(count):
            self.turns += [Turn(candidate, 0, False)] * SETTLING
        self.add_lap()

    @property
    def can_continue(self) -> bool:
        """True if another lap is allowed."""
        return self._laps_so_far < self._laps

    def add_lap(self) -> None:
        """Add the turns of a lap; every second round is reversed, since a machine may get slower or faster."""
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
        """Add the time of a step that has succeeded."""
        self._timers.setdefault(turn[:2], []).append(timer)

    def read(self) -> Seconds:
        """Return this rank's times; on a device, the caller has waited for all work."""
        rounds = range(self.turns[-1].round + 1)
        return [
            [self._read_turn(candidate, number) for number in rounds]
            for candidate in range(self._count)
        ]

    def _read_turn(self, candidate: int, number: int) -> float | None:
        timers = self._timers.get((candidate, number))
        return statistics.median(timer.read_seconds() for timer in timers) if timers else None


def merge_ranks(by_rank: Sequence[Seconds]) -> Seconds:
    """Return the times of the slowest rank, turn by turn; None for a turn that failed on a rank."""
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
    """Find the order that runs in all further steps, and whether that is sure; candidate 0 is the order as given.

    Orders are compared round by round, because turns close in time share what slows the machine down. Another order
    replaces the order as given if the mean difference of the logarithms, plus its two-sided 95% error, is below the
    logarithm of :data:`CLEAR`. The best order is surely not slower than another if that sum is below the logarithm of
    :data:`TOLERATED`.
    """
    # Medians choose the best order; the paired differences below decide whether it is clearly better.
    steps = find_medians(seconds)
    fastest = min(range(len(steps)), key=steps.__getitem__)
    candidates = range(1, len(steps))
    best = 0
    if math.isfinite(steps[0]):
        clear = [rival for rival in candidates if _is_below(seconds[rival], seconds[0], CLEAR)]
        best = min(clear, key=steps.__getitem__, default=0)
    # The order as given has never succeeded, so any order that has replaces it without a comparison.
    elif math.isfinite(steps[fastest]):
        best = fastest
    is_sure = math.isfinite(steps[best]) and all(
        rival == best
        or not math.isfinite(steps[rival])
        or _is_below(seconds[best], seconds[rival], TOLERATED)
        for rival in range(len(steps))
    )
    return Verdict(best, steps, is_sure)


def find_medians(seconds: Seconds) -> list[float]:
    """Return the median seconds of a step of each candidate; infinite if no step succeeded."""
    known = ([turn for turn in row if turn is not None] for row in seconds)
    return [statistics.median(row) if row else math.inf for row in known]


def _is_below(own: Sequence[float | None], rival: Sequence[float | None], ratio: float) -> bool:
    """Return whether one order takes less than ``ratio`` of a rival's time, beyond noise."""
    # Logarithms make a ratio and its inverse equally large, so neither order has an advantage.
    ratios = [math.log(a / b) for a, b in zip(own, rival, strict=True) if a and b]
    count = len(ratios)
    # For two rounds the quantile below is too small, 9.0 instead of 12.7, and one round has no error.
    if count < 3:
        return False
    freedom = count - 1
    # The quantile of Student's distribution: 4.3 for 3 rounds, 2.2 for 12.
    quantile = 1.96 + 2.4 / freedom + 4.6 / freedom**2
    error = quantile * statistics.stdev(ratios) / math.sqrt(count)
    return statistics.fmean(ratios) + error <= math.log(ratio)


class StepTimer:
    """The time of a step, from its call to its end on the device; construction starts it.

    Args:
        device: The device on which stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end = None

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        # The host runs ahead of the device, so only events measure the step.
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

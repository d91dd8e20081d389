"""How long arms take: in turn, so that what drifts meets all of them, and on the slowest rank."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from ovpatch.overlap.choosing.numbers import Numbers
from ovpatch.overlap.choosing.race import Arms

_SAMPLE_MS: Final = 2.0  # calls are timed together until they take so long, since a launch alone takes microseconds
_MOST_CALLS: Final = 20
_LEAST_MS: Final = 1e-3  # what a clock may take for no time at all
_ALL_MS: Final = 800.0  # for all samples of all arms, if that leaves the fewest rounds
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 9


def measured(
    arms: Arms,
    numbers: Numbers,
    device: torch.device,
    left: Callable[[], float],
    works: Callable[[str, Callable[[], object]], bool],
) -> dict[str, float] | None:
    """Return the median time of each arm, in ms, the same on all ranks.

    Args:
        arms: What is measured; the same on all ranks.
        numbers: Of the ranks.
        device: Where the arms compute.
        left: Returns how many seconds may still be spent, by this rank's clock.
        works: Calls an arm for the first time, which compiles, connects, and takes memory; tells whether it can be
            measured, the same on all ranks.

    Returns:
        The times of those that can; None if that takes longer than a rank has left.
    """
    once = {}
    for name, arm in arms.items():
        if not works(name, arm):
            continue
        once[name], late = numbers.largest([max(_sample(arm, 1, device), _LEAST_MS), -left()])
        if late >= 0:
            return None
    calls = {name: min(math.ceil(_SAMPLE_MS / ms), _MOST_CALLS) for name, ms in once.items()}
    round_ms = sum(once[name] * calls[name] for name in once)
    rounds = min(max(int(_ALL_MS / round_ms), _FEWEST_ROUNDS), _MOST_ROUNDS)
    if _FEWEST_ROUNDS * round_ms / 1e3 > -numbers.largest([-left()])[0]:
        return None
    samples: dict[str, list[float]] = {name: [] for name in once}
    for index in range(rounds):
        for name in once if index % 2 == 0 else reversed(once):
            numbers.largest([0.0])  # all ranks begin together
            samples[name].append(max(_sample(arms[name], calls[name], device), _LEAST_MS))
    slowest = {name: numbers.largest(times) for name, times in samples.items()}
    return {name: statistics.median(times) for name, times in slowest.items()}


def _sample(arm: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return how long a call takes, in ms: on a GPU by its own clock, which also sees when the host is too slow."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            arm()
        return (time.perf_counter() - began) / calls * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        arm()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls

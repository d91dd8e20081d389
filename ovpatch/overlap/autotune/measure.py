"""Measures candidates on the slowest rank, and picks the fastest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

Candidates = dict[str, Callable[[], object]]
"""Functions that compute the same, by name; each call launches one computation."""

TIE: Final = 0.02
"""Relative margin by which a candidate must beat the baseline and the default: the precision of measurements."""

_SAMPLE_MS: Final = 2.0  # calls are timed together until they take so long, since a launch alone takes microseconds
_MAX_CALLS: Final = 20
_MIN_MS: Final = 1e-3  # a clock may show no time at all
_TOTAL_MS: Final = 800.0  # for all samples of all candidates, if that leaves the fewest rounds
_MIN_ROUNDS, _MAX_ROUNDS = 3, 9


@dataclass(frozen=True)
class Tuning:
    """A choice between candidates that compute the same."""

    key: str  # The computation in words: operator, shapes, dtype, direction. The same on all ranks.
    # Names of the candidates. The first is the baseline: the computation without the feature.
    candidates: tuple[str, ...]
    # The candidate that is taken where nothing is measured, and where it is hardly slower than the fastest.
    default: str
    make: Callable[[torch.Generator], Candidates]  # makes the candidates, on data drawn from a generator
    needs: int = 0  # bytes of memory that they take, at most
    # Returns whether a candidate can be used at all. It returns the same on all ranks, which all call it; it may be a
    # collective.
    usable: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True)
class Choice:
    """The candidate that is taken, and why."""

    candidate: str  # its name
    why: str  # the reason, in words
    # Milliseconds of each candidate: the median, of the slowest rank. Empty if nothing is known.
    times: Mapping[str, float] = field(default_factory=dict)
    final: bool = True  # whether it is kept for all later calls

    def report_line(self, key: str) -> str:
        """Return a line for the report."""
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.times.items())
        return f"{key}: {self.candidate} ({'; '.join(filter(None, (times, self.why)))})"


def pick_fastest(times: Mapping[str, float], default: str) -> str:
    """Return the fastest candidate; among those within :data:`TIE` of it, the default one, or the baseline.

    The first candidate is the baseline. Where nothing beats it, the default one, which need not have been measured, is
    taken only if it is measured no slower.
    """
    baseline = next(iter(times))
    best = min(times, key=times.__getitem__)
    enough = times[best] / (1 - TIE)
    if times.get(default, math.inf) <= min(enough, times[baseline]):
        return default
    return best if times[baseline] > enough else baseline


class RankNumbers:
    """Exchanges measured numbers between ranks, which all call the same methods in the same order.

    The host waits for each result, and so for the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the values of the group's first rank."""
        numbers = self._tensor(values)
        dist.broadcast(numbers, group=self._group, group_src=0)
        return _to_list(numbers)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return each number's maximum over the ranks. No rank returns before all have called."""
        numbers = self._tensor(values)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return _to_list(numbers)

    def all_gather(self, value: float) -> list[float]:
        """Return each rank's number."""
        numbers = self._tensor([0.0] * self._group.size())
        numbers[self._group.rank()] = value
        dist.all_reduce(numbers, group=self._group)
        return _to_list(numbers)

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def measure_candidates(
    candidates: Candidates,
    numbers: RankNumbers,
    device: torch.device,
    seconds_left: Callable[[], float],
    first_call: Callable[[str, Callable[[], object]], bool],
) -> dict[str, float] | None:
    """Return the median milliseconds of each candidate that can be measured, or None if a rank's time is up.

    The result is the same on all ranks. Candidates alternate, so that drift of the device's clock affects all of them.
    ``seconds_left`` tells how many seconds this rank may still spend. ``first_call`` calls a candidate for the first
    time, which compiles, connects and allocates, and returns whether it can be measured, the same on all ranks.
    """
    once = {}
    for name, candidate in candidates.items():
        if not first_call(name, candidate):
            continue
        once[name], overtime = numbers.maximum([max(_sample(candidate, 1, device), _MIN_MS), -seconds_left()])
        if overtime >= 0:
            return None
    calls = {name: min(math.ceil(_SAMPLE_MS / ms), _MAX_CALLS) for name, ms in once.items()}
    round_ms = sum(once[name] * calls[name] for name in once)
    rounds = min(max(int(_TOTAL_MS / round_ms), _MIN_ROUNDS), _MAX_ROUNDS)
    if _MIN_ROUNDS * round_ms / 1e3 > -numbers.maximum([-seconds_left()])[0]:
        return None
    samples: dict[str, list[float]] = {name: [] for name in once}
    for index in range(rounds):
        for name in once if index % 2 == 0 else reversed(once):
            numbers.maximum([0.0])  # all ranks begin together
            samples[name].append(max(_sample(candidates[name], calls[name], device), _MIN_MS))
    slowest = {name: numbers.maximum(times) for name, times in samples.items()}
    return {name: statistics.median(times) for name, times in slowest.items()}


def _sample(candidate: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return milliseconds per call; on a GPU between two events, so that a slow host counts, too."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            candidate()
        return (time.perf_counter() - began) / calls * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        candidate()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def _to_list(numbers: Tensor) -> list[float]:
    found: list[float] = numbers.tolist()
    return found

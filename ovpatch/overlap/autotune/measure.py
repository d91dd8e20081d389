"""Measures candidates on the slowest rank, picks the fastest, and keeps the times in a file.

A cache file is for one feature and environment. Only a group's first rank reads and writes it; a measurement that it
cannot read is made again. Of several writers the last one's entries stay, which include those that it found.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

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
    candidates: tuple[str, ...]  # their names; the first is the baseline, the computation without the feature
    default: str  # the candidate where nothing is measured, or where it is hardly slower than the fastest
    make: Callable[[torch.Generator], Candidates]  # makes the candidates, on data drawn from a generator
    needs: int = 0  # bytes of memory that they take, at most
    # Returns whether a candidate can be used at all. It returns the same on all ranks, which all call it; it may be a
    # collective.
    usable: Callable[[str], bool] = lambda name: True
    # By candidate, milliseconds of the host beyond the baseline's that a call takes. A sample does not show them, since
    # the host launches beside a busy device; a step whose host is the limit does.
    host_ms: Mapping[str, float] = field(default_factory=dict)

    def pick(self, times: Mapping[str, float]) -> str:
        """Return the candidate to take, by each one's milliseconds and its host time; see :func:`pick_fastest`."""
        return pick_fastest({name: ms + self.host_ms.get(name, 0.0) for name, ms in times.items()}, self.default)


@dataclass(frozen=True)
class Choice:
    """The candidate that is taken, and why."""

    candidate: str  # its name
    why: str  # the reason, in words
    times: Mapping[str, float] = field(default_factory=dict)  # each candidate's median ms on the slowest rank, if known
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


FORMAT: Final = 1
Times = dict[str, float]


class TuningCache:
    """The measurements of one feature in one environment, which is what the times depend on besides their keys.

    Without a directory nothing is kept.
    """

    def __init__(self, directory: Path | None, feature: str, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        digest = hashlib.sha256(json.dumps(self._environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if directory is None else directory / "choices" / f"{feature}-{digest}.json"  # the file
        self.problem = ""  # why the file's content was not used; empty if it was, or if there is no readable file

    def read(self) -> dict[str, Times]:
        """Return the times of each key's candidates, in ms; empty if there is no readable file."""
        if self.path is None:
            return {}
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.problem = "" if isinstance(error, OSError) else self._damaged("it is no text")
            return {}
        try:
            found = _checked(json.loads(text), self._environment)
        except (ValueError, RecursionError) as error:  # JSON's errors are ValueErrors
            self.problem = self._damaged(str(error))
            return {}
        self.problem = ""
        return found

    def write(self, key: str, times: Mapping[str, float]) -> None:
        """Add the times of a key's candidates if the file can be written. The write is atomic."""
        if self.path is None:
            return
        choices = self.read() | {key: dict(times)}
        data = {"format": FORMAT, "environment": self._environment, "choices": choices}
        write_if_possible(self.path, data)

    def _damaged(self, why: str) -> str:
        return f"{self.path} is damaged and was not used ({why}): the next measurement writes it again"


def write_if_possible(path: Path, data: Any) -> None:
    """Write a JSON file of the user's cache; nothing where that is read-only, full or no directory."""
    with suppress(OSError):  # what would have been read is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, which is there as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _checked(data: Any, environment: Mapping[str, str]) -> dict[str, Times]:
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("environment") != environment:
        raise ValueError("its head is of another format or environment")
    choices = data.get("choices")
    if not isinstance(choices, dict) or not all(_are_times(times) for times in choices.values()):
        raise ValueError("its choices are no times by candidate")
    return choices


def _are_times(times: Any) -> bool:
    return isinstance(times, dict) and all(
        isinstance(ms, float) and math.isfinite(ms) and ms > 0 for ms in times.values()
    )

"""The autotuner of a process group: measures candidates once per key; all ranks take the same one.

A feature describes its candidates as a :class:`Tuning`; :func:`get_autotuner` returns the group's :class:`Autotuner`.
The time of a candidate is that of the slowest rank. Times are kept in a file for one feature and environment. Only a
group's first rank reads and writes it; a measurement that it cannot read is made again. If several processes write the
file, the last one's entries stay, which include those that it found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import socket
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.consensus import RankMismatchError, check_consistent, gather_values, wait_limit_s
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch.overlap.comm.streams import is_capturing

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
        return list(numbers.tolist())

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return each number's maximum over the ranks. No rank returns before all have called."""
        numbers = self._tensor(values)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return list(numbers.tolist())

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
        self.problem = ""
        if self.path is None:
            return {}
        try:
            return _checked(json.loads(self.path.read_text(encoding="utf-8")), self._environment)
        except OSError:
            return {}
        except UnicodeDecodeError:
            why = "it is no text"
        except (ValueError, RecursionError) as error:  # JSON's errors are ValueErrors
            why = str(error)
        self.problem = f"{self.path} is damaged and was not used ({why}): the next measurement writes it again"
        return {}

    def write(self, key: str, times: Mapping[str, float]) -> None:
        """Add the times of a key's candidates if the file can be written. The write is atomic."""
        if self.path is None:
            return
        choices = self.read() | {key: dict(times)}
        data = {"format": FORMAT, "environment": self._environment, "choices": choices}
        write_if_possible(self.path, data)


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


T = TypeVar("T")

BUDGET_S: Final = 30.0
FIRST_CALL_TIMEOUT_S: Final = 300.0  # ranks may reach a first call at different times
FAILURE_TIMEOUT_S: Final = 20.0  # a candidate that fails on all ranks does so at about the same time
INTERRUPT_TIMEOUT_S: Final = 10.0  # after Ctrl-C, for a measurement whose collectives must not meet later ones
_SPARE: Final = 1.25  # factor for memory that the allocator cannot use

_REMEDY = (
    "Ranks that choose by measurement must make the same calls, with the same shapes and settings; or set the option "
    "to one of its other values, which are not measured."
)

_UNMADE = "not measured, since a rank could not make what is measured; its report says why"


class TuningBudget:
    """Seconds that a process may spend on measuring."""

    def __init__(self, seconds: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._spent, self._lock = 0.0, threading.Lock()
        self._running: list[float] = []  # start times; threads may measure for several groups at the same time

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        """Count the time of a block."""
        began = self._clock()
        with self._lock:
            self._running.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(began)
                self._spent += self._clock() - began

    def seconds_left(self) -> float:
        """Return how many seconds are left; negative when the budget is overdrawn."""
        with self._lock:
            return self.seconds - self._spent - sum(self._clock() - began for began in self._running)


BUDGET: Final = TuningBudget()
"""The process's budget, for all features and groups."""


_FITS, _NO_MEMORY, _ERROR = 0.0, 1.0, 2.0  # why a rank has no candidates; the largest of all ranks is reported


class Autotuner:
    """Chooses candidates for a feature on a process group. It does not keep the group alive.

    Ranks that compute in different ways issue different collectives and hang. So every number that decides is known to
    all ranks: the first rank's, from its cache file, or the slowest rank's, measured. Ranks compare keys through the
    store before they measure; an error names a rank that is about to compute something else. Without a directory for
    cache files no measurements are kept.

    [Note: when to measure] A measurement is a collective. It runs where an operator first meets a shape, since all
    ranks get there. It never runs in a backward, which one rank may run alone, under CUDA graph capture, or while a
    compiler traces: there the default is taken, and the next call asks again.
    """

    def __init__(self, device: torch.device, feature: str, directory: Path | None, budget: TuningBudget) -> None:
        self._device, self._feature, self._directory, self._budget = device, feature, directory, budget
        self._choices: dict[tuple[bool, str, tuple[str, ...]], Choice] = {}
        self._cache: TuningCache | None = None

    def tune(self, group: dist.ProcessGroup, tuning: Tuning, communicator: dist.ProcessGroup | None = None) -> Choice:
        """Return the candidate that all ranks take; the group is the same in every call.

        A collective if the key is new to the group; see [Note: when to measure]. Numbers are exchanged on the
        communicator, by default on the group itself. RankMismatchError if ranks ask for different keys, or one does not
        come.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        question = (deterministic, tuning.key, tuning.candidates)
        known = self._choices.get(question)
        if known is not None:
            return known
        if _cannot_measure(self._device):
            return Choice(tuning.default, "nothing can be measured here", final=False)
        choice = self._choices[question] = self._decide(group, communicator or group, tuning, deterministic)
        if choice.why:
            times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in choice.times.items())
            reasons = "; ".join(filter(None, (times, choice.why)))
            add_report_line(self._feature, f"{tuning.key}: {choice.candidate} ({reasons})")
        return choice

    def _decide(
        self, group: dist.ProcessGroup, communicator: dist.ProcessGroup, tuning: Tuning, deterministic: bool
    ) -> Choice:
        if group.size() == 1 or dist.get_backend(group) == "fake" or len(tuning.candidates) == 1:
            return Choice(tuning.candidates[0], "")
        terms = {
            "what is computed": tuning.key,
            "candidates": list(tuning.candidates),
            "deterministic algorithms": deterministic,
        }
        limit = wait_limit_s(group, FIRST_CALL_TIMEOUT_S)
        check_consistent(group, f"{self._feature}: choice", terms, timeout_s=limit, remedy=_REMEDY)
        if deterministic:
            return Choice(tuning.default, "not measured, since algorithms must be deterministic")
        return run_in_own_thread(functools.partial(self._look_up_or_measure, group, communicator, tuning), self._device)

    def _look_up_or_measure(self, group: dist.ProcessGroup, communicator: dist.ProcessGroup, tuning: Tuning) -> Choice:
        numbers = RankNumbers(communicator, self._device)
        cache = self._cache
        if cache is None:
            cache = self._cache = TuningCache(self._directory, self._feature, self._environment(group))
        tuning = dataclasses.replace(tuning, candidates=tuple(filter(tuning.usable, tuning.candidates)))
        if len(tuning.candidates) == 1:
            return Choice(tuning.candidates[0], "")
        earlier = cache.read().get(tuning.key, {}) if group.rank() == 0 else {}
        if cache.problem:
            add_report_line(self._feature, cache.problem)
        complete = set(earlier) == set(tuning.candidates)
        given = [earlier[name] for name in tuning.candidates] if complete else [0.0] * len(tuning.candidates)
        found = numbers.broadcast(given)
        if all(found):
            times = dict(zip(tuning.candidates, found, strict=True))
            return Choice(tuning.pick(times), "measured in an earlier run", times)
        if numbers.maximum([-self._budget.seconds_left()])[0] >= 0:
            return self._out_of_time(tuning)
        with self._budget.spend():
            return self._measure(group, tuning, numbers, cache)

    def _measure(self, group: dist.ProcessGroup, tuning: Tuning, numbers: RankNumbers, cache: TuningCache) -> Choice:
        candidates, own_problem = self._make(tuning)
        (problem,) = numbers.maximum([own_problem])
        if problem == _NO_MEMORY:
            return Choice(tuning.default, f"not measured, which takes {tuning.needs / 2**30:.2g} GiB of memory")
        if problem:
            return Choice(tuning.default, _UNMADE)
        first_call = functools.partial(self._first_call, group, tuning)
        times = measure_candidates(candidates, numbers, self._device, self._budget.seconds_left, first_call)
        if times is None:
            return self._out_of_time(tuning)
        if group.rank() == 0:
            cache.write(tuning.key, times)
        return Choice(tuning.pick(times), "measured", times)

    def _make(self, tuning: Tuning) -> tuple[Candidates, float]:
        """Return the candidates, the baseline first, and why there are none. It must not raise: peers would wait."""
        if tuning.needs * _SPARE > _free_bytes(self._device):
            return {}, _NO_MEMORY
        try:
            made = tuning.make(torch.Generator(self._device).manual_seed(0))
        except torch.OutOfMemoryError:
            return {}, _NO_MEMORY
        except RuntimeError as error:
            add_report_line(self._feature, f"nothing was measured for {tuning.key}: {_one_line(error)}")
            return {}, _ERROR
        return {name: made[name] for name in tuning.candidates}, _FITS

    def _first_call(self, group: dist.ProcessGroup, tuning: Tuning, name: str, candidate: Callable[[], object]) -> bool:
        """Call a candidate; return whether it can be measured.

        A kernel that does not compile must not end a training. So a candidate other than the baseline that fails on all
        ranks is left out. If it fails on some ranks only, the others are in its collectives, and the error is raised.
        """
        try:
            candidate()
        except Exception as error:  # compilers of kernels have error classes of their own
            baseline = name == tuning.candidates[0]
            if baseline or not _fails_on_all_ranks(group, f"{self._feature}: {name}", tuning.key):
                raise
            add_report_line(self._feature, f"{name} was left out for {tuning.key}: {_one_line(error)}")
            return False
        return True

    def _out_of_time(self, tuning: Tuning) -> Choice:
        return Choice(tuning.default, f"not measured, since measuring has taken its {self._budget.seconds:g} s")

    def _environment(self, group: dist.ProcessGroup) -> dict[str, str]:
        """Return the environment that times depend on."""
        hosts = gather_values(group, f"{self._feature}: hosts", socket.gethostname())
        on_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self._device) if on_gpu else platform.machine(),
            "ranks": str(group.size()),
            "hosts": str(len(set(hosts))),
            "backend": backend_name(group, self._device),
            "torch": str(torch.__version__),
            "ovpatch": importlib.metadata.version("ovpatch"),
        }


def get_autotuner(group: dist.ProcessGroup, device: torch.device, feature: str, directory: Path | None) -> Autotuner:
    """Return the autotuner of a feature on a group; made once."""
    key = (Autotuner, feature, device)
    return group_state(group).get_or_create(key, lambda: Autotuner(device, feature, directory, BUDGET))


# --- the report ---

_report_lines: dict[str, dict[str, None]] = {}  # by feature, each line once; they outlive the groups


def add_report_line(feature: str, text: str) -> None:
    """Keep a line for a feature's report."""
    _report_lines.setdefault(feature, {})[text] = None


def report_lines(feature: str) -> list[str]:
    """Return a feature's lines, in the order in which they were added."""
    return list(_report_lines.get(feature, ()))


# --- a thread without the caller's modes ---


def run_in_own_thread(work: Callable[[], T], device: torch.device) -> T:
    """Return what a function returns in a new thread, on the device's default stream, with gradients off.

    The caller may be under modes that change, count or keep results: a checkpoint, autocast, inference mode, a
    profiler, a default device. Modes belong to a thread, so a new one has none. The device is idle before and after,
    and no more of its memory is reserved than before. An interrupted caller waits some seconds for the function to end;
    a second Ctrl-C ends that wait.
    """
    reserved = _synchronize(device)
    future: futures.Future[T] = futures.Future()
    thread = threading.Thread(target=_run_into, args=(future, work, device), name="ovpatch-autotune", daemon=True)
    try:
        thread.start()
        futures.wait([future])  # not join(): after its interruption Python 3.11 takes the thread for ended
    except BaseException:  # Ctrl-C, or a signal handler: the task's collectives must not pair with later ones
        if thread.is_alive():
            futures.wait([future], INTERRUPT_TIMEOUT_S)
        raise
    thread.join()
    if _synchronize(device) > reserved:
        torch.cuda.empty_cache()
    try:
        return future.result()
    finally:
        del future  # it keeps its error, whose frames would keep it


def _run_into(future: futures.Future[T], work: Callable[[], T], device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.no_grad():
            future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised where the caller waits
        future.set_exception(error)
    finally:
        del future, work


def _synchronize(device: torch.device) -> int:
    """Wait for a GPU; return how many bytes of its memory this process has reserved."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_reserved(device)


def _fails_on_all_ranks(group: dist.ProcessGroup, topic: str, key: str) -> bool:
    try:
        check_consistent(group, topic, {"what fails": key}, timeout_s=FAILURE_TIMEOUT_S)
    except RankMismatchError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _cannot_measure(device: torch.device) -> bool:
    """Return whether measuring is impossible here; see [Note: when to measure]."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or is_capturing(device)


def _free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

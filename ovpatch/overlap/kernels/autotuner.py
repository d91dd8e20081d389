"""The autotuner of a process group, which measures candidates once per key.

All ranks choose the same candidate. A feature describes its candidates as a :class:`Tuning`, and
:func:`get_autotuner` returns the :class:`Autotuner` of the group. The time of a candidate is its
time on the slowest rank. Times are stored in a file for each feature and environment. Only the
first rank of a group reads and writes the file, and it repeats a measurement that it cannot read.
If several processes write the file, it holds the measurements of the last process, and those that
this process had read.
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
from ovpatch.overlap.comm.consensus import (
    RankMismatchError,
    check_consistent,
    gather_values,
    wait_limit_s,
)
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch.overlap.comm.streams import is_capturing

#: Functions that compute the same, by name. Each call launches one computation.
Candidates = dict[str, Callable[[], object]]

#: The relative margin by which a candidate must beat the baseline and the default. It is the
#: precision of measurements.
TIE: Final = 0.02

# Calls are timed together until a sample takes this long, since a launch alone takes microseconds.
_SAMPLE_MS: Final = 2.0
_MAX_CALLS: Final = 20
# The longest time for which a GPU waits while the host launches the calls of a sample.
_MAX_HOLD_MS: Final = 30.0
# The factor for launches that take longer than the last ones did.
_HOLD_MARGIN: Final = 1.5
# Clocks of data center GPUs are lower, so a hold of this many cycles takes at least a millisecond.
_CYCLES_PER_MS: Final = 2_100_000
# The smallest time of a call, since a clock may show no time at all.
_MIN_MS: Final = 1e-3
# The time for all samples of all candidates, unless it allows less than the fewest rounds.
_TOTAL_MS: Final = 800.0
_MIN_ROUNDS: Final = 3
_MAX_ROUNDS: Final = 9


@dataclass(frozen=True)
class Tuning:
    """A choice between candidates that compute the same.

    Attributes:
        key: The computation in words: operator, shapes, dtype, direction. The same on all ranks.
        candidates: The names of the candidates. The first one is the baseline, the computation
            without the feature.
        default: The candidate to choose if nothing is measured, or if it is hardly slower than the
            fastest candidate.
        make: Makes the candidates, on data drawn from a generator.
        needs: The largest number of bytes of memory that the candidates occupy. Default: 0.
        usable: Returns whether a candidate can be used. All ranks call it and get the same result.
            It may be a collective. Default: all can.
        host_ms: The additional host time of a call in milliseconds, compared with the baseline, by
            candidate. Samples do not show it, because the device is busy while the host launches. A
            step that is limited by the host is longer by it. Default: none.
        recover: Called after a candidate has failed on all ranks, which leave it out. Default: nothing.
    """

    key: str
    candidates: tuple[str, ...]
    default: str
    make: Callable[[torch.Generator], Candidates]
    needs: int = 0
    usable: Callable[[str], bool] = lambda name: True
    host_ms: Mapping[str, float] = field(default_factory=dict)
    recover: Callable[[], object] = lambda: None

    def pick(self, times: Mapping[str, float]) -> str:
        """Return the candidate to choose.

        Args:
            times: The milliseconds of each candidate, to which its host time is added.
        """
        total_times = {name: ms + self.host_ms.get(name, 0.0) for name, ms in times.items()}
        return pick_fastest(total_times, self.default)


@dataclass(frozen=True)
class Choice:
    """The candidate that all ranks choose.

    Attributes:
        candidate: The name of the candidate.
        why: The reason, in words.
        times: The median of each candidate's milliseconds on the slowest rank, if known.
        final: Whether the choice holds for all later calls.
    """

    candidate: str
    why: str
    times: Mapping[str, float] = field(default_factory=dict)
    final: bool = True


def pick_fastest(times: Mapping[str, float], default: str) -> str:
    """Return the fastest candidate, but prefer the default and the baseline in a tie.

    Args:
        times: The milliseconds of each candidate. The first candidate is the baseline.
        default: The preferred candidate. It need not be in ``times``. If no candidate beats the
            baseline, the default is chosen only if its time is no longer than the baseline's.
    """
    baseline = next(iter(times))
    best = min(times, key=times.__getitem__)
    # Candidates within this time are in a tie with the best one.
    tie_ms = times[best] / (1 - TIE)
    if times.get(default, math.inf) <= min(tie_ms, times[baseline]):
        return default
    return best if times[baseline] > tie_ms else baseline


class RankNumbers:
    """The exchange of measured numbers between ranks.

    All ranks call the same methods in the same order. The host waits for each result, and so for
    the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the values of the group's first rank."""
        numbers = self._make_tensor(values)
        dist.broadcast(numbers, group=self._group, group_src=0)
        return list(numbers.tolist())

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return each number's maximum over the ranks. No rank returns before all have called."""
        numbers = self._make_tensor(values)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return list(numbers.tolist())

    def _make_tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def measure_candidates(
    candidates: Candidates,
    numbers: RankNumbers,
    device: torch.device,
    seconds_left: Callable[[], float],
    first_call: Callable[[str, Callable[[], object]], bool],
) -> dict[str, float] | None:
    """Return the median milliseconds of each candidate that can be measured.

    The result is the same on all ranks. Candidates alternate, so that drift of the device's clock
    affects all of them.

    Args:
        candidates: The candidates.
        numbers: Exchanges times between ranks.
        device: The device of the candidates.
        seconds_left: Returns the seconds that this rank may still spend.
        first_call: Calls a candidate for the first time, which compiles, connects and allocates.
            Returns whether the candidate can be measured, the same on all ranks.

    Returns:
        The times by candidate, or None if a rank has no time left.
    """
    single_ms = {}
    launch_ms = {}
    for name, candidate in candidates.items():
        if not first_call(name, candidate):
            continue
        # One collective exchanges the time of a call and the overdrawn time. All ranks stop if one
        # has overdrawn its budget.
        (hold_ms,) = numbers.maximum([_time_launch(candidate, device)])
        sample = _time_calls(candidate, 1, device, hold_ms=min(hold_ms, _MAX_HOLD_MS))
        single_ms[name], overtime = numbers.maximum([max(sample, _MIN_MS), -seconds_left()])
        launch_ms[name] = hold_ms
        if overtime >= 0:
            return None
    calls = {name: _count_calls(ms, launch_ms[name]) for name, ms in single_ms.items()}
    holds = {name: min(launch_ms[name] * calls[name], _MAX_HOLD_MS) for name in calls}
    round_ms = sum(single_ms[name] * calls[name] + holds[name] for name in single_ms)
    rounds = min(max(int(_TOTAL_MS / round_ms), _MIN_ROUNDS), _MAX_ROUNDS)
    if _MIN_ROUNDS * round_ms / 1e3 > -numbers.maximum([-seconds_left()])[0]:
        return None
    samples: dict[str, list[float]] = {name: [] for name in single_ms}
    for index in range(rounds):
        for name in single_ms if index % 2 == 0 else reversed(single_ms):
            # This exchange lets all ranks begin together.
            numbers.maximum([0.0])
            sample = _time_calls(candidates[name], calls[name], device, hold_ms=holds[name])
            samples[name].append(max(sample, _MIN_MS))
    slowest = {name: numbers.maximum(times) for name, times in samples.items()}
    return {name: statistics.median(times) for name, times in slowest.items()}


def _count_calls(call_ms: float, launch_ms: float) -> int:
    """Return the number of calls of a sample.

    Args:
        call_ms: The milliseconds of a call.
        launch_ms: The milliseconds for which the host launches it.
    """
    held_calls = max(1, int(_MAX_HOLD_MS / max(launch_ms, _MIN_MS)))
    return min(math.ceil(_SAMPLE_MS / call_ms), _MAX_CALLS, held_calls)


def _time_launch(candidate: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds that the device has to wait so that the host launches a call; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    began = time.perf_counter()
    candidate()
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    return (launched - began) * 1e3 * _HOLD_MARGIN


def _time_calls(
    candidate: Callable[[], object], calls: int, device: torch.device, *, hold_ms: float
) -> float:
    """Return the milliseconds of one of several calls that follow each other.

    On a GPU, this is the time between two events. A step hides a slow host if enough launches are
    queued. So the device waits before the first event until the host has launched all calls. A
    candidate whose host waits for the device is timed with its host.

    Args:
        candidate: The candidate.
        calls: The number of calls.
        device: The device.
        hold_ms: The milliseconds for which a GPU waits, the same on all ranks.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            candidate()
        return (time.perf_counter() - began) / calls * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(hold_ms * _CYCLES_PER_MS))
    begin.record()
    for _ in range(calls):
        candidate()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


FORMAT: Final = 1
Times = dict[str, float]


class TuningCache:
    """The stored measurements of one feature in one environment.

    The environment is everything that times depend on besides their keys. Without a directory
    nothing is stored.

    Attributes:
        path: The file, or None.
        problem: The reason why the content of the file was not used. It is empty if the content was
            used, or if there is no readable file.
    """

    def __init__(
        self, directory: Path | None, feature: str, environment: Mapping[str, str]
    ) -> None:
        self._environment = dict(environment)
        digest = hashlib.sha256(json.dumps(self._environment, sort_keys=True).encode()).hexdigest()[
            :16
        ]
        name = f"{feature}-{digest}.json"
        self.path = None if directory is None else directory / "choices" / name
        self.problem = ""

    def read(self) -> dict[str, Times]:
        """Return the times of each key's candidates, in ms; empty if there is no readable file."""
        self.problem = ""
        if self.path is None:
            return {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            return _check_format(data, self._environment)
        except OSError:
            return {}
        except UnicodeDecodeError:
            why = "it is no text"
        except (ValueError, RecursionError) as error:
            # The errors of JSON are ValueErrors.
            why = str(error)
        self.problem = (
            f"{self.path} is damaged and was not used ({why}): the next measurement writes it again"
        )
        return {}

    def write(self, key: str, times: Mapping[str, float]) -> None:
        """Add the times of a key's candidates if the file can be written. The write is atomic."""
        if self.path is None:
            return
        choices = self.read() | {key: dict(times)}
        data = {"format": FORMAT, "environment": self._environment, "choices": choices}
        write_if_possible(self.path, data)


def write_if_possible(path: Path, data: Any) -> None:
    """Write a JSON file of the user's cache, unless it is read-only, full or no directory."""
    # A measurement that cannot be stored is repeated by the next run.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically: readers find all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _check_format(data: Any, environment: Mapping[str, str]) -> dict[str, Times]:
    if (
        not isinstance(data, dict)
        or data.get("format") != FORMAT
        or data.get("environment") != environment
    ):
        raise ValueError("its header has another format or environment")
    choices = data.get("choices")
    if not isinstance(choices, dict) or not all(map(_are_valid_times, choices.values())):
        raise ValueError("its choices are not times by candidate")
    return choices


def _are_valid_times(times: Any) -> bool:
    return isinstance(times, dict) and all(
        isinstance(ms, float) and math.isfinite(ms) and ms > 0 for ms in times.values()
    )


T = TypeVar("T")

#: The seconds that a process may spend on measurements.
BUDGET_S: Final = 30.0
#: Limit for peers to reach a first call, since ranks may reach it at different times.
FIRST_CALL_TIMEOUT_S: Final = 300.0
#: Limit for peers to fail. A candidate that fails on all ranks fails at about the same time.
FAILURE_TIMEOUT_S: Final = 20.0
#: Limit for a measurement to end after Ctrl-C. Its collectives must not pair with later ones.
INTERRUPT_TIMEOUT_S: Final = 10.0
# The factor for memory that the allocator cannot use.
_MEMORY_MARGIN: Final = 1.25

_ERROR_MISMATCH_REMEDY: Final = (
    "Make the same calls, with the same shapes and settings, on all ranks that choose by "
    "measurement, or set the option to a value that needs no measurement."
)

_REASON_CREATION_FAILED: Final = (
    "not measured, since a rank could not create the candidates; its report gives the reason"
)


class TuningBudget:
    """The seconds that a process may spend on measurements."""

    def __init__(
        self, seconds: float = BUDGET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._spent = 0.0
        self._lock = threading.Lock()
        # The start times of running measurements. Threads may measure concurrently for several
        # groups.
        self._start_times: list[float] = []

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        """Count the time of a block."""
        began = self._clock()
        with self._lock:
            self._start_times.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._start_times.remove(began)
                self._spent += self._clock() - began

    def seconds_left(self) -> float:
        """Return the remaining seconds, which are negative if the budget is overdrawn."""
        with self._lock:
            running = sum(self._clock() - began for began in self._start_times)
            return self.seconds - self._spent - running


#: The budget of the process, for all features and groups.
BUDGET: Final = TuningBudget()

# The reason why a rank has no candidates, as a number. The largest number of all ranks is reported.
_FITS: Final = 0.0
_NO_MEMORY: Final = 1.0
_ERROR: Final = 2.0


class Autotuner:
    """The choices between candidates for a feature on a process group.

    It does not keep the group alive.

    Ranks that compute in different ways issue different collectives and hang. So all ranks know
    every number that decides: the stored time of the first rank, or the measured time of the
    slowest rank. Ranks compare keys through the store before they measure, and an error names a
    rank that is about to compute something else.

    [Note: when to measure] A measurement is a collective. It runs when an operator first receives a
    shape, since all ranks reach that call. It never runs in a backward, which one rank may run
    alone, during the capture of a CUDA graph, or while a compiler traces. Then the default is used,
    and the next call tries again.
    """

    def __init__(
        self,
        device: torch.device,
        feature: str,
        directory: Path | None,
        budget: TuningBudget,
    ) -> None:
        """Create an autotuner without choices.

        Args:
            device: The device of the candidates.
            feature: The feature whose report names the choices.
            directory: The directory of stored measurements; None stores none.
            budget: The seconds that may be spent.
        """
        self._device = device
        self._feature = feature
        self._directory = directory
        self._budget = budget
        self._choices: dict[tuple[bool, str, tuple[str, ...]], Choice] = {}
        # Created by the first measurement, because its environment needs a collective.
        self._cache: TuningCache | None = None

    def tune(
        self,
        group: dist.ProcessGroup,
        tuning: Tuning,
        communicator: dist.ProcessGroup | None = None,
    ) -> Choice:
        """Return the candidate that all ranks choose.

        It is a collective if the key is new to the group; see [Note: when to measure].

        Args:
            group: The process group, the same in every call.
            tuning: The candidates.
            communicator: The group that exchanges numbers. Default: ``group``.

        Raises:
            RankMismatchError: Ranks pass different keys, or a rank is missing.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        choice_key = (deterministic, tuning.key, tuning.candidates)
        known = self._choices.get(choice_key)
        if known is not None:
            return known
        if _cannot_measure(self._device):
            return Choice(tuning.default, "nothing can be measured here", final=False)
        choice = self._decide(group, communicator or group, tuning, deterministic)
        self._choices[choice_key] = choice
        if choice.why:
            times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in choice.times.items())
            reasons = "; ".join(filter(None, (times, choice.why)))
            add_report_line(self._feature, f"{tuning.key}: {choice.candidate} ({reasons})")
        return choice

    def _decide(
        self,
        group: dist.ProcessGroup,
        communicator: dist.ProcessGroup,
        tuning: Tuning,
        deterministic: bool,
    ) -> Choice:
        if group.size() == 1 or dist.get_backend(group) == "fake" or len(tuning.candidates) == 1:
            return Choice(tuning.candidates[0], "")
        terms = {
            "what is computed": tuning.key,
            "candidates": list(tuning.candidates),
            "deterministic algorithms": deterministic,
        }
        limit = wait_limit_s(group, FIRST_CALL_TIMEOUT_S)
        topic = f"{self._feature}: choice"
        check_consistent(group, topic, terms, timeout_s=limit, remedy=_ERROR_MISMATCH_REMEDY)
        if deterministic:
            # A choice by time would differ from run to run.
            return Choice(tuning.default, "not measured, since algorithms must be deterministic")
        work = functools.partial(self._look_up_or_measure, group, communicator, tuning)
        return run_in_own_thread(work, self._device)

    def _look_up_or_measure(
        self, group: dist.ProcessGroup, communicator: dist.ProcessGroup, tuning: Tuning
    ) -> Choice:
        numbers = RankNumbers(communicator, self._device)
        cache = self._cache
        if cache is None:
            cache = TuningCache(self._directory, self._feature, self._describe_environment(group))
            self._cache = cache
        usable = tuple(filter(tuning.usable, tuning.candidates))
        tuning = dataclasses.replace(tuning, candidates=usable)
        if len(tuning.candidates) == 1:
            return Choice(tuning.candidates[0], "")
        # Only the first rank reads the file, since ranks may have different ones. Zeros say that it
        # has no times for these candidates.
        stored = cache.read().get(tuning.key, {}) if group.rank() == 0 else {}
        if cache.problem:
            add_report_line(self._feature, cache.problem)
        own_times = [0.0] * len(tuning.candidates)
        if set(stored) == set(tuning.candidates):
            own_times = [stored[name] for name in tuning.candidates]
        found = numbers.broadcast(own_times)
        if all(found):
            times = dict(zip(tuning.candidates, found, strict=True))
            return Choice(tuning.pick(times), "measured in an earlier run", times)
        if numbers.maximum([-self._budget.seconds_left()])[0] >= 0:
            return self._choose_default_for_time(tuning)
        with self._budget.spend():
            return self._measure(group, tuning, numbers, cache)

    def _measure(
        self, group: dist.ProcessGroup, tuning: Tuning, numbers: RankNumbers, cache: TuningCache
    ) -> Choice:
        candidates, own_problem = self._make_candidates(tuning)
        (problem,) = numbers.maximum([own_problem])
        if problem == _NO_MEMORY:
            why = f"not measured, which takes {tuning.needs / 2**30:.2g} GiB of memory"
            return Choice(tuning.default, why)
        if problem:
            return Choice(tuning.default, _REASON_CREATION_FAILED)
        first_call = functools.partial(self._first_call, group, tuning)
        times = measure_candidates(
            candidates, numbers, self._device, self._budget.seconds_left, first_call
        )
        if times is None:
            return self._choose_default_for_time(tuning)
        if group.rank() == 0:
            cache.write(tuning.key, times)
        return Choice(tuning.pick(times), "measured", times)

    def _make_candidates(self, tuning: Tuning) -> tuple[Candidates, float]:
        """Return the candidates, the baseline first, and the reason if there are none.

        It must not raise, because peers would wait.
        """
        if tuning.needs * _MEMORY_MARGIN > _count_free_bytes(self._device):
            return {}, _NO_MEMORY
        try:
            candidates = tuning.make(torch.Generator(self._device).manual_seed(0))
        except torch.OutOfMemoryError:
            return {}, _NO_MEMORY
        except RuntimeError as error:
            reason = _summarize(error)
            add_report_line(self._feature, f"nothing was measured for {tuning.key}: {reason}")
            return {}, _ERROR
        return {name: candidates[name] for name in tuning.candidates}, _FITS

    def _first_call(
        self,
        group: dist.ProcessGroup,
        tuning: Tuning,
        name: str,
        candidate: Callable[[], object],
    ) -> bool:
        """Call a candidate; return whether it can be measured.

        A kernel that does not compile must not end a training. So a candidate that fails on all
        ranks is omitted, unless it is the baseline. If it fails on some ranks only, their peers are
        in its collectives, and the error is raised.
        """
        try:
            candidate()
        except Exception as error:
            # Compilers of kernels have their own error classes.
            is_baseline = name == tuning.candidates[0]
            if is_baseline or not _fails_on_all_ranks(
                group, f"{self._feature}: {name}", tuning.key
            ):
                raise
            tuning.recover()
            reason = _summarize(error)
            add_report_line(self._feature, f"{name} was left out for {tuning.key}: {reason}")
            return False
        return True

    def _choose_default_for_time(self, tuning: Tuning) -> Choice:
        seconds = self._budget.seconds
        return Choice(tuning.default, f"not measured, since measuring has taken its {seconds:g} s")

    def _describe_environment(self, group: dist.ProcessGroup) -> dict[str, str]:
        """Return the facts that times depend on besides the key. All ranks call this."""
        hosts = gather_values(group, f"{self._feature}: hosts", socket.gethostname())
        on_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self._device) if on_gpu else platform.machine(),
            "ranks": str(group.size()),
            "hosts": str(len(set(hosts))),
            "backend": backend_name(group, self._device),
            "torch": str(torch.__version__),
            "ovpatch": importlib.metadata.version("ovpatch"),
            # Earlier versions counted a slow host, too.
            "times": "on the device",
        }


def get_autotuner(
    group: dist.ProcessGroup, device: torch.device, feature: str, directory: Path | None
) -> Autotuner:
    """Return the autotuner of a feature on a group, created by the first call."""
    key = (Autotuner, feature, device)
    return group_state(group).get_or_create(
        key, lambda: Autotuner(device, feature, directory, BUDGET)
    )


# --- the report ---

# The lines of each feature, in order and without duplicates. They outlive the groups.
_report_lines: dict[str, dict[str, None]] = {}


def add_report_line(feature: str, text: str) -> None:
    """Add a line to the report of a feature, unless it is there already."""
    _report_lines.setdefault(feature, {})[text] = None


def report_lines(feature: str) -> list[str]:
    """Return the lines of a feature in the order of :func:`add_report_line`."""
    return list(_report_lines.get(feature, ()))


# --- a thread without the caller's modes ---


def run_in_own_thread(work: Callable[[], T], device: torch.device) -> T:
    """Run a function in a new thread and return its result.

    The function runs on the default stream of the device, without gradients. The caller may be
    inside of modes that change, count or save results: a checkpoint, autocast, inference mode, a
    profiler, a default device. Modes belong to a thread, so a new thread has none. The device is
    idle before and after, and no additional memory of it remains reserved. An interrupted caller
    waits some seconds for the function to end, and a second Ctrl-C ends this wait.
    """
    reserved = _synchronize(device)
    future: futures.Future[T] = futures.Future()
    # The arguments are in no variable, since this frame must not hold the future at its end.
    thread = threading.Thread(
        target=_run_into, args=(future, work, device), name="ovpatch-autotune", daemon=True
    )
    try:
        thread.start()
        # If join() is interrupted, Python 3.11 takes the thread for ended.
        futures.wait([future])
    except BaseException:
        # After Ctrl-C, or an error in a signal handler, the collectives of the thread must not pair
        # with later ones.
        if thread.is_alive():
            futures.wait([future], INTERRUPT_TIMEOUT_S)
        raise
    thread.join()
    if _synchronize(device) > reserved:
        torch.cuda.empty_cache()
    try:
        return future.result()
    finally:
        # The future holds its error, and the frames of the error would hold the future.
        del future


def _run_into(future: futures.Future[T], work: Callable[[], T], device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.no_grad():
            future.set_result(work())
    except BaseException as error:  # noqa: BLE001
        # The waiting caller raises it.
        future.set_exception(error)
    finally:
        # The frame of this function may outlive the result, in the traceback of an error.
        del future, work


def _synchronize(device: torch.device) -> int:
    """Wait for a GPU; return the number of bytes of its memory that this process has reserved."""
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


def _summarize(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _cannot_measure(device: torch.device) -> bool:
    """Return whether measuring is impossible here; see [Note: when to measure]."""
    return (
        torch.compiler.is_compiling()
        or torch._C._current_graph_task_id() != -1
        or is_capturing(device)
    )


def _count_free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    # Memory that torch's allocator has reserved and does not use is free for the candidates.
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

"""Choices by measurement: the same on all ranks, within a budget, and kept for the next run."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ovpatch.overlap.comm.consensus import RankMismatchError
from ovpatch.overlap.kernels import autotuner as autotuner_module
from ovpatch.overlap.kernels import copy_choice as selection
from ovpatch.overlap.kernels.autotuner import (
    Autotuner,
    Choice,
    RankNumbers,
    Tuning,
    TuningBudget,
    TuningCache,
    get_autotuner,
    pick_fastest,
    report_lines,
    run_in_own_thread,
)
from ovpatch.overlap.kernels.copy_choice import Chosen
from tests.overlap.test_collectives import group

CPU = torch.device("cpu")
ENVIRONMENT = {"device": "a", "ranks": "2"}
SLEEPS = {"first": 8e-3, "second": 5e-3, "third": 1e-3}


# --- in one process ---


class Alone(RankNumbers):
    """The exchange of numbers of one rank."""

    def __init__(self) -> None:
        pass

    def broadcast(self, values):
        return list(values)

    maximum = broadcast


@pytest.mark.gpu(1)
def test_on_a_gpu_a_slow_host_does_not_count():
    x = torch.zeros(1, device="cuda")

    def launch_slowly() -> None:
        time.sleep(2e-3)
        x.add_(1)

    times = autotuner_module.measure_candidates(
        {"slow host": launch_slowly, "slow device": lambda: torch.cuda._sleep(2_000_000)},
        Alone(),
        x.device,
        seconds_left=lambda: 60.0,
        first_call=lambda name, candidate: candidate() is None or True,
    )
    assert times["slow host"] < times["slow device"] / 2, times


@pytest.mark.parametrize(
    ("times", "default", "expected"),
    [
        ({"base": 1.0, "a": 0.5, "b": 0.4}, "base", "b"),
        ({"base": 1.0, "a": 0.99}, "base", "base"),
        ({"base": 1.0, "a": 0.97}, "base", "a"),
        ({"base": 1.0, "a": 0.97, "b": 0.969}, "base", "b"),
        ({"base": 1.0, "a": 2.0}, "base", "base"),
        ({"base": 1.0}, "base", "base"),
        ({"base": 1.0, "a": 0.99, "b": 0.98}, "a", "a"),
        ({"base": 1.0, "a": 1.01}, "a", "base"),
        ({"base": 1.0, "a": 0.97, "b": 0.96}, "a", "a"),
        ({"base": 1.0, "a": 0.97, "b": 0.94}, "a", "b"),
        ({"base": 1.0, "a": 0.99}, "left out", "base"),
        ({"base": 1.0, "a": 0.9}, "left out", "a"),
    ],
)
def test_the_default_and_the_baseline_win_ties(times, default, expected):
    assert pick_fastest(times, default) == expected


@pytest.mark.parametrize(
    ("copies_ms", "gathers", "scatters"),
    [(3.8, False, True), (3.5, True, True), (4.2, False, False)],
)
def test_copy_engines_gather_only_if_that_saves_more_than_their_host_time(
    copies_ms, gathers, scatters
):
    chosen, tuner, group = Chosen(), mock.Mock(), mock.Mock()
    chosen.engine = mock.Mock()
    group.size.return_value = 2
    times = {selection.BACKEND: 4.0, selection.COPIES: copies_ms}
    tuner.tune.side_effect = lambda _group, tuning, _communicator: Choice(
        tuning.pick(times), "", times
    )
    with (
        mock.patch.object(selection, "get_choice", return_value=chosen),
        mock.patch.object(selection, "is_capturing", return_value=False),
        mock.patch.object(selection, "get_autotuner", return_value=tuner),
        mock.patch.object(selection.memory, "unsupported_reason", return_value=""),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
    ):
        selection.choose(group, torch.device("cuda"), "auto", feature="test", directory=None)
    assert (chosen.gathers, chosen.scatters, chosen.final) == (gathers, scatters, True)


def test_a_cache_reads_the_times_that_an_earlier_one_has_written(tmp_path):
    TuningCache(tmp_path, "f", ENVIRONMENT).write("key", {"a": 1.5, "b": 2.0})
    TuningCache(tmp_path, "f", ENVIRONMENT).write("other", {"a": 1.0})
    assert TuningCache(tmp_path, "f", ENVIRONMENT).read() == {
        "key": {"a": 1.5, "b": 2.0},
        "other": {"a": 1.0},
    }
    assert TuningCache(tmp_path, "f", ENVIRONMENT | {"ranks": "3"}).read() == {}
    assert TuningCache(tmp_path, "g", ENVIRONMENT).read() == {}
    assert [path.suffix for path in (tmp_path / "choices").iterdir()] == [".json"], (
        "no temporary file is left"
    )


def head(**changes: Any) -> str:
    return json.dumps({"format": 1, "environment": ENVIRONMENT, "choices": {}} | changes)


DAMAGE: dict[str, Any] = {
    "cut short": head()[:20],
    "empty": "",
    "no object": "[]",
    "no text": b"\xff\xfe\x00",
    "another format": head(format=0),
    "another environment": head(environment={}),
    "no times": head(choices={"key": {"a": "fast"}}),
    "no finite time": head(choices={"key": {"a": float("nan")}}),
    "a time that is none": head(choices={"key": {"a": 0}}),
    "a list of choices": head(choices=[1]),
    "a time that no float holds": head(choices={"key": {"a": 10**400}}),
    "without end": "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_reported_and_rewritten(tmp_path, damage):
    cache = TuningCache(tmp_path, "f", ENVIRONMENT)
    cache.write("key", {"a": 1.0})
    assert not cache.problem
    content = DAMAGE[damage]
    cache.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cache.read() == {}
    assert str(cache.path) in cache.problem
    assert "is damaged and was not used" in cache.problem
    cache.write("key", {"a": 2.0})
    assert TuningCache(tmp_path, "f", ENVIRONMENT).read() == {"key": {"a": 2.0}}


def test_a_directory_that_cannot_be_created_or_written_to_is_not_used(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "choices").mkdir()
    blocked = TuningCache(tmp_path, "f", ENVIRONMENT)
    # No permission would keep root from writing, but this folder does.
    blocked.path.mkdir()
    for cache in (
        TuningCache(tmp_path / "file", "f", ENVIRONMENT),
        TuningCache(None, "f", ENVIRONMENT),
        blocked,
    ):
        cache.write("key", {"a": 1.0})
        assert cache.read() == {}
        assert not cache.problem
    assert [path.name for path in (tmp_path / "choices").iterdir()] == [blocked.path.name]


def test_a_budget_counts_only_the_time_of_measurements():
    now = [100.0]
    budget = TuningBudget(10, lambda: now[0])
    assert budget.seconds_left() == 10
    with budget.spend():
        now[0] += 4
        assert budget.seconds_left() == 6
    now[0] += 50
    assert budget.seconds_left() == 6
    with budget.spend():
        now[0] += 7
    assert budget.seconds_left() == -1


def test_a_budget_counts_threads_that_measure_at_the_same_time():
    now = [0.0]
    budget = TuningBudget(10, lambda: now[0])
    first, second = budget.spend(), budget.spend()
    first.__enter__()
    now[0] += 1
    second.__enter__()
    now[0] += 2
    first.__exit__(None, None, None)
    assert budget.seconds_left() == 10 - 3 - 2
    second.__exit__(None, None, None)
    assert budget.seconds_left() == 10 - 3 - 2


def test_an_interrupted_caller_waits_for_the_measurement_in_flight():
    main, ended = threading.get_ident(), []

    def work() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_in_own_thread(work, CPU)
    assert ended


# --- on several ranks ---


class Sleepers:
    """Candidates that sleep, and the thread and the modes in which they were called."""

    def __init__(self, sleeps: dict[str, float], default: str = "first") -> None:
        self.sleeps, self.default, self.made, self.calls = sleeps, default, 0, 0
        self.seen: set[Any] = set()
        self.before: Callable[[], object] = int

    def tuning(self, key: str = "key", **changes: Any) -> Tuning:
        return Tuning(
            **{
                "key": key,
                "candidates": tuple(self.sleeps),
                "default": self.default,
                "make": self.make,
            }
            | changes
        )

    def make(self, generator: torch.Generator) -> dict[str, Callable[[], object]]:
        self.made += 1
        torch.randn(3, generator=generator)
        return {
            name: (lambda seconds=seconds: self.call(seconds))
            for name, seconds in self.sleeps.items()
        }

    def call(self, seconds: float) -> None:
        self.calls += 1
        self.before()
        modes = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch._C._len_torch_dispatch_stack(),
        )
        self.seen.add((threading.current_thread() is threading.main_thread(), *modes))
        time.sleep(seconds)


def make_tuner(directory: Path | None = None, budget: TuningBudget | None = None) -> Autotuner:
    return Autotuner(CPU, "f", directory, budget or TuningBudget(30))


def measuring() -> dict[str, Any]:
    """Tune candidates whose speed differs by rank. The times of the slowest rank decide on all ranks."""
    rank = dist.get_rank()
    candidates = Sleepers({"first": 6e-3, "second": 1e-3 if rank else 9e-3, "third": 2e-3})
    state = torch.get_rng_state()
    tuner = make_tuner()
    with FlopCounterMode(display=False), torch.autocast("cpu", torch.bfloat16):
        chosen = tuner.tune(group(), candidates.tuning())
        calls = candidates.calls
        again = tuner.tune(group(), candidates.tuning())
    second = tuner.tune(group(), Sleepers({"first": 1e-3, "second": 1e-3}).tuning("another"))
    return {
        "chosen": chosen,
        "again": again is chosen and candidates.calls == calls,
        "second key": second.candidate,
        "seen": candidates.seen,
        "rng": torch.equal(state, torch.get_rng_state()),
        "line": [line for line in report_lines("f") if line.startswith("key: ")][-1],
    }


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_make_the_same_choice_by_the_slowest_rank(ranks, world):
    results = ranks(world)(measuring)
    for result in results:
        assert result["chosen"] == results[0]["chosen"]
        assert result["chosen"].candidate == "third"
        assert result["chosen"].times["second"] > 8
        assert result["again"]
        assert result["second key"] == results[0]["second key"]
        assert result["seen"] == {(False, False, False, 0)}, (
            "on its own thread, without the modes of the caller"
        )
        assert result["rng"]
        assert result["line"].startswith("key: third (first ")
        assert result["line"].endswith("; measured)")


def kept(
    directory: Path, spoil: bool, sleeps: dict[str, float] = SLEEPS
) -> tuple[str, str, int, list[str], list[str]]:
    candidates = Sleepers(sleeps if dist.get_rank() == 0 else dict.fromkeys(sleeps, 1e-4))
    if spoil and dist.get_rank() == 0:
        for path in (directory / "choices").iterdir():
            path.write_text(path.read_text()[:-9])
    dist.barrier()
    chosen = make_tuner(directory if dist.get_rank() == 0 else directory / "elsewhere").tune(
        group(), candidates.tuning()
    )
    dist.barrier()
    problems = [line for line in report_lines("f") if "damaged" in line]
    return (
        chosen.candidate,
        chosen.why,
        candidates.calls,
        problems,
        sorted(path.name for path in directory.iterdir()),
    )


def test_the_next_run_reads_the_times_that_a_run_has_written(ranks, tmp_path):
    for arm, why, calls, _, names in ranks(2)(kept, tmp_path, False):
        assert (arm, why, names) == ("third", "measured", ["choices"]), (
            "the first rank alone writes"
        )
        assert calls > 0
    for arm, why, calls, _, _ in ranks(2)(kept, tmp_path, False, dict(reversed(SLEEPS.items()))):
        assert (arm, why, calls) == ("third", "measured in an earlier run", 0), (
            "the first rank alone reads"
        )
    for _, why, _, _, _ in ranks(2)(kept, tmp_path, False, SLEEPS | {"fourth": 1e-3}):
        assert why == "measured", "the file has no times for other candidates"
    first, second = ranks(2)(kept, tmp_path, True)
    assert first[1] == second[1] == "measured"
    assert str(tmp_path) in first[3][-1]
    assert "is damaged and was not used" in first[3][-1]
    assert ranks(2)(kept, tmp_path, False)[1][1] == "measured in an earlier run"


def spending() -> list[tuple[str, str, int]]:
    """Tune three keys. On the last rank, the second measurement exceeds the budget."""
    now, last = [0.0], dist.get_rank() == dist.get_world_size() - 1
    tuner = make_tuner(budget=TuningBudget(10, lambda: now[0]))
    candidates = Sleepers(SLEEPS, default="second")
    found = []
    for key, seconds in (("cheap", 0.0), ("dear", 6.0), ("late", 0.0)):
        candidates.before = lambda seconds=seconds: now.append(now.pop() + seconds * last)
        chosen = tuner.tune(group(), candidates.tuning(key))
        found.append((chosen.candidate, chosen.why, candidates.made))
    return found


def test_once_the_budget_is_spent_the_default_is_chosen(ranks):
    for cheap, dear, late in ranks(2)(spending):
        assert cheap == ("third", "measured", 1)
        assert dear == ("second", "not measured, since measuring has taken its 10 s", 2)
        assert late == ("second", "not measured, since measuring has taken its 10 s", 2), (
            "no candidates are made"
        )


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, choose: Callable[[], Any]) -> torch.Tensor:
        ctx.choose = choose
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.choose()
        return grad, None


def unmade(generator: torch.Generator) -> Any:
    raise RuntimeError("no such kernel (here)\nand more")


def not_measured() -> dict[str, Any]:
    candidates = Sleepers(SLEEPS, default="second")
    tuner = make_tuner()
    found: dict[str, Any] = {}

    def choose(name: str, **changes: Any) -> None:
        chosen = tuner.tune(group(), candidates.tuning(**changes))
        found[name] = chosen.candidate, chosen.final, candidates.calls

    # These choices must not need peers.
    if dist.get_rank() == 0:
        InBackward.apply(
            torch.ones(1, requires_grad=True), lambda: choose("in a backward")
        ).sum().backward()
        with mock.patch("torch.compiler.is_compiling", return_value=True):
            choose("traced")
    torch.use_deterministic_algorithms(True)
    try:
        choose("deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found["alone"] = tuner.tune(alone, candidates.tuning("alone")).candidate, candidates.calls
    memory = autotuner_module._count_free_bytes
    autotuner_module._count_free_bytes = lambda device: 100.0 * (1 - dist.get_rank())
    try:
        choose("without memory", key="big", needs=80)
    finally:
        autotuner_module._count_free_bytes = memory
    before = len(report_lines("f"))
    choose("failing to make", key="failing", make=unmade if dist.get_rank() else candidates.make)
    found["lines"] = [line.partition(" (")[2] for line in report_lines("f")[before:]]
    choose("with one that is usable", key="one", usable=lambda name: name == "first")
    choose("with two that are usable", key="two", usable=lambda name: name != "third")
    found["of them"] = tuner.tune(
        group(), candidates.tuning("two", usable=lambda name: name != "third")
    ).times
    found["different candidates"] = tuner.tune(
        group(), Sleepers({"first": 1e-3, "another": 0.0}).tuning("two")
    ).candidate
    choose("at last")
    found["same"] = get_autotuner(group(), CPU, "f", None) is get_autotuner(group(), CPU, "f", None)
    return found


def test_choices_without_a_measurement(ranks):
    for rank, found in enumerate(ranks(2)(not_measured)):
        if rank == 0:
            assert found["in a backward"] == found["traced"] == ("second", False, 0)
        assert found["deterministic"] == ("second", True, 0)
        assert found["alone"] == ("first", 0), "one rank has nothing to choose"
        assert found["without memory"] == ("second", True, 0), "for want of memory on one rank"
        assert found["failing to make"] == ("second", True, 0), "for want of candidates on one rank"
        where = "not measured, since a rank could not create the candidates; its report gives the reason)"
        assert found["lines"] == (["here) and more", where] if rank else [where])
        assert found["with one that is usable"] == ("first", True, 0)
        assert found["with two that are usable"][0] == "second"
        assert list(found["of them"]) == ["first", "second"]
        assert found["different candidates"] == "another", "a choice depends on its candidates"
        arm, final, calls = found["at last"]
        assert (arm, final) == ("third", True)
        assert calls > 0
        assert found["same"]


def differing() -> list[str]:
    found = []
    for key, candidates in (
        (f"rows {dist.get_rank()}", SLEEPS),
        ("key", SLEEPS if dist.get_rank() else {"first": 0.0, "x": 0.0}),
    ):
        with pytest.raises(RankMismatchError) as caught:
            make_tuner().tune(group(), Sleepers(candidates).tuning(key))
        found.append(str(caught.value))
    return found


def failing() -> dict[str, Any]:
    """Tune candidates that raise in their first call: one on all ranks, the baseline, and one on rank 0 alone."""
    candidates, found = Sleepers(SLEEPS), {}

    def fail(at: float) -> Any:
        return lambda seconds: [][1] if seconds == at else time.sleep(seconds)

    candidates.call = fail(SLEEPS["third"])
    recovered: list[bool] = []
    tuning = dataclasses.replace(
        candidates.tuning("third fails"), recover=lambda: recovered.append(True)
    )
    chosen = make_tuner().tune(group(), tuning)
    assert recovered == [True]
    found["left out"] = chosen.candidate, list(chosen.times), report_lines("f")[-2]
    candidates.call = fail(SLEEPS["first"])
    with pytest.raises(IndexError):
        make_tuner().tune(group(), candidates.tuning("first fails"))
    if dist.get_rank() == 0:
        candidates.call = fail(SLEEPS["third"])
        tuner, tuning = make_tuner(), candidates.tuning("third fails here")
        with (
            mock.patch.object(autotuner_module, "FAILURE_TIMEOUT_S", 0.5),  # expires
            pytest.raises(IndexError) as caught,
        ):
            tuner._first_call(group(), tuning, "third", tuning.make(torch.Generator())["third"])
        found["alone"] = str(caught.value)
    return found


def test_ranks_that_tune_different_keys_or_candidates_are_named(ranks):
    for keys, candidates in ranks(2)(differing):
        assert 'what is computed is "rows 0" on rank 0 but "rows 1" on rank 1' in keys
        assert keys.endswith("that needs no measurement.")
        assert "candidates is" in candidates


def test_an_arm_that_fails_on_all_ranks_is_left_out(ranks):
    first, second = ranks(2)(failing)
    assert first.pop("alone") == "list index out of range"
    assert first == second
    arm, times, line = first["left out"]
    assert (arm, times) == ("second", ["first", "second"])
    assert line == "third was left out for third fails: IndexError: list index out of range"

"""schedule=auto measures, solves, races and keeps the faster order, the same on all ranks, with the bits of torch."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.pipelining.ir import Kind
from ovpatch.overlap.pipelining.orders import build_order
from ovpatch.planner import solver
from ovpatch.planner.memory_limit import read_memory_limit
from ovpatch.planner.simulator import Costs, Footprint
from ovpatch_plugins.pipeline import pipeline_attach
from ovpatch_plugins.pipeline.auto import auto_schedule
from ovpatch_plugins.pipeline.auto import order_race as race
from ovpatch_plugins.pipeline.auto.measured_costs import PipelineCosts, make_problem
from ovpatch_plugins.pipeline.auto.order_race import LAPS, ROUNDS, SETTLING, judge, merge_ranks
from ovpatch_plugins.pipeline.pipeline_report import list_schedules
from ovpatch_plugins.pipeline.runtime.step_clock import DeviceClock
from tests.plugins.pipeline.cases import (
    Case,
    Outcome,
    differences,
    feature_report,
    make_schedule,
    run_steps,
    train,
    train_both,
)
from tests.plugins.pipeline.models import ROWS, WIDTH, Block, Part
from tests.plugins.pipeline.test_data_parallel import SETTINGS
from tests.support.rarely import ALL_CASES

# These tests compare bits. For that, a turn shorter than a real one is enough.
WARM_UP, MEASURED, TIMED = 1, 2, 1
# The fewest rounds of a lap that can decide a race.
FEW = 3
LAP = FEW * 2 * (1 + TIMED)
RACE = WARM_UP + MEASURED + 2 * SETTLING
STEPS = RACE + LAP + 2
LOOP: dict[str, Any] = {"microbatches": 4, "chunks": 2, "steps": STEPS}
CASES = {
    "Schedule1F1B": Case(steps=STEPS, microbatches=4),
    "ScheduleGPipe, dropout": Case(
        "ScheduleGPipe", steps=STEPS, part=lambda _: Part(Block(0.2, False), Block())
    ),
    "ScheduleInterleaved1F1B": Case("ScheduleInterleaved1F1B", **LOOP),
    "ScheduleZBVZeroBubble, dropout": Case(
        "ScheduleZBVZeroBubble", vee=True, part=lambda _: Part(Block(0.2), Block()), **LOOP
    ),
}


def _plant_costs(cache: str) -> pytest.MonkeyPatch:
    """Plant costs of F, B and W with which the solved order differs from the given one, also on a busy machine.

    If Bs were as short as Fs, no order would be faster than ZBV. The solver searches for a good order for seconds; here
    it may stop early.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("OVPATCH_CACHE_DIR", cache)
    patch.setattr("ovpatch_plugins.pipeline.auto.order_candidates._GAIN", -9.0)
    patch.setitem(race.Race.__init__.__kwdefaults__, "rounds", FEW)
    patch.setattr(race, "TIMED", TIMED)
    patch.setattr(auto_schedule, "WARM_UP", WARM_UP)
    patch.setattr(auto_schedule, "MEASURED", MEASURED)
    patch.setitem(solver.solve.__kwdefaults__, "effort", 10_000)
    patch.setattr(
        "ovpatch_plugins.pipeline.auto.auto_schedule.read_times",
        lambda _times, stages: {str(index): [1.0, 2.0, 1.0] for index in stages},
    )
    return patch


def _fit(case: Case) -> Case:
    return dataclasses.replace(case, microbatches=max(case.microbatches, 2 * dist.get_world_size()))


def _run(names: list[str], cache: str, winner: int) -> dict[str, Outcome]:
    """Train with ``schedule=auto``; the given order wins (0), or the solved one (1)."""
    patch = _plant_costs(cache)
    patch.setattr(
        race.Race, "_read_turn", lambda _self, candidate, _number: 1.0 + (candidate != winner)
    )
    try:
        return {name: train_both(_fit(CASES[name]), "auto", memory_limit="1.5x") for name in names}
    finally:
        patch.undo()


@pytest.mark.parametrize("world", [2, 4])
def test_each_step_has_the_bits_of_torch_whichever_order_wins(
    ranks: Any, tmp_path: Path, world: int
) -> None:
    names = (
        [*CASES]
        if world == 2
        else ["Schedule1F1B", "ScheduleZBVZeroBubble, dropout"][: 2 if ALL_CASES else 1]
    )
    found = ranks(world)(_run, names, str(tmp_path), 1, timeout=120)
    for rank, outcomes in enumerate(found):
        for name, outcome in outcomes.items():
            assert not outcome.differences, f"rank {rank}, {name}: {outcome.differences[:4]}"
            assert outcome.counters["steps"] == STEPS, name
            text = " ".join(outcome.remarks)
            assert f"{CASES[name].schedule} runs as solved for 1.5x" in text, text
            assert text.count(" runs as ") == 1, f"also of an earlier apply(): {text}"
            assert (
                "solved for 1.5x takes 1000.0 ms a step against 2000.0 ms as given (predicted "
                in text
            ), text


def test_the_given_order_stays_if_it_is_faster(ranks: Any, tmp_path: Path) -> None:
    for outcomes in ranks(2)(_run, ["Schedule1F1B"], str(tmp_path), 0, timeout=120):
        outcome = outcomes["Schedule1F1B"]
        assert not outcome.differences, outcome.differences[:4]
        text = " ".join(outcome.remarks)
        assert (
            "the order as given stays: 1000.0 ms a step against 2000.0 ms of solved for 1.5x"
            in text
        ), text
        assert "Schedule1F1B runs as 1f1b" in text, text


def _evaluate_after_each_step(cache: str, replicas: int) -> tuple[list[str], float, list[str]]:
    """Train until orders race, and evaluate after each step, which frees buffers and has torch infer shapes again."""
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
    group, patch = mesh["pp"].get_group(), _plant_costs(cache)
    case = Case(steps=1, microbatches=4)
    if replicas > 1:
        replicated = mesh["dp"].get_group()
        case = dataclasses.replace(
            case, wrap=lambda module: DistributedDataParallel(module, process_group=replicated)
        )
    rank = mesh.get_local_rank("pp")

    def run() -> list[Any]:
        schedule, parts = make_schedule(case, group)
        params = [(name, param) for part in parts for name, param in part.named_parameters()]
        optimizer, found = torch.optim.SGD([param for _, param in params], lr=1e-2), []
        rows = torch.ones(case.microbatches * ROWS, 2, WIDTH)
        for number in range(RACE + 3):
            found += run_steps(case, schedule, params, optimizer, number)
            schedule.eval(*(() if rank else (rows,)), target=rows if rank else None)
        return found

    stock = run()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "auto"}})
    try:
        patched = run()
    finally:
        patch.undo()
    last = [abs(stock[-1][name] - patched[-1][name]).max().item() for name in stock[-1]]
    return differences(stock, patched), max(last), list(feature_report().remarks)


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_between_steps(ranks: Any, tmp_path: Path, replicas: int) -> None:
    for changes, largest, remarks in ranks(2 * replicas)(
        _evaluate_after_each_step, str(tmp_path), replicas
    ):
        # The inference arms torch's reducer, which then reduces the first microbatch twice, and so rounds once more.
        assert largest < 1e-6 if replicas > 1 else not changes
        assert any("races against the order as given" in remark for remark in remarks), remarks


def _find_deferrals(cache: str) -> tuple[list[str], list[str], list[set[bool]]]:
    """Train as given, and until that order has won a race.

    Returns:
        The reasons of stage 0 not to defer as given and after the race, and for each order whether it had a reason.
    """
    patch, turns = _plant_costs(cache), list[set[bool]]([set(), set()])
    patch.setattr(race.Race, "_read_turn", lambda _self, candidate, _number: 1.0 + candidate)
    add_time = race.Race.add_time

    def look(self: race.Race, turn: race.Turn, timer: Any) -> None:
        add_time(self, turn, timer)
        turns[turn.candidate].add(
            any(stage.objection for stage in list_schedules()[-1].stages.values())
        )

    patch.setattr(race.Race, "add_time", look)
    try:
        found = []
        for order in ("as-given", "auto"):
            outcome = train_both(CASES["Schedule1F1B"], order, memory_limit="1.5x")
            found.append(
                [line for line in outcome.remarks if line.startswith("stage 0: weight gradients")]
            )
        return found[0], found[1], turns
    finally:
        patch.undo()


def test_an_order_defers_during_and_after_the_race_as_without_a_race(
    ranks: Any, tmp_path: Path
) -> None:
    """Rank 0 sends no input gradient: as given it defers nothing, and the solved order defers Ws."""
    (given, auto, turns), _ = ranks(2)(_find_deferrals, str(tmp_path), timeout=120)
    assert (
        given
        == auto
        == [
            "stage 0: weight gradients stay in the backward: no rank waits for the stage's input "
            "gradient"
        ]
    )
    assert turns == [{True}, {False}]


class _HostEvent:
    """An event on a device that keeps up with its host."""

    def record(self, _stream: Any) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return 1000 * (end.time_s - self.time_s)


def _find_costs_after_a_race(cache: str) -> tuple[list[str], float]:
    """Return the computations whose costs the report has after a race, and the bubble, if the device is read late."""
    patch = _plant_costs(cache)
    patch.setattr(race.Race, "_read_turn", lambda _self, candidate, _number: 2.0 - candidate)
    patch.setattr(
        pipeline_attach, "make_clock", lambda times, device: DeviceClock(times, device, _HostEvent)
    )
    try:
        train_both(CASES["Schedule1F1B"], "auto", memory_limit="1.5x")
    finally:
        patch.undo()
    times = list_schedules()[-1].times
    bubble = times.bubble(4)
    assert bubble is not None
    return sorted(
        {kind.value for kind in Kind for stage in times.stages() if times.cost(stage, kind)}
    ), bubble


def test_costs_of_orders_that_lost_are_forgotten(ranks: Any, tmp_path: Path) -> None:
    """As given, rank 0 runs full backwards; the device reports the last one after the choice."""
    for kinds, bubble in ranks(2)(_find_costs_after_a_race, str(tmp_path), timeout=120):
        assert kinds == ["B", "F", "W"]
        assert bubble > -0.3


# --- the memory limit ---


@pytest.mark.parametrize(
    ("text", "spare", "limits"),
    [
        # Twice the memory of 1F1B.
        ("auto", [90.0, 90.0], [40.0, 40.0]),
        # The free memory of the first rank, besides two microbatches.
        ("auto", [8.0, 90.0], [28.0, 40.0]),
        ("auto", [-5.0, 90.0], [20.0, 40.0]),
        ("auto", [], [20.0, 20.0]),
        ("1x", [90.0, 90.0], [20.0, 20.0]),
        ("3x", [0.0, 0.0], [60.0, 60.0]),
        ("55B", [90.0, 90.0], [55.0, 55.0]),
    ],
)
def test_what_a_memory_limit_means(text: str, spare: list[float], limits: list[float]) -> None:
    costs = Costs.uniform(2, forward=1, backward=1, weight=1)
    measured = PipelineCosts(costs, Footprint((10.0, 10.0), (10.0, 10.0)), spare, draws=False)
    stock = build_order("1f1b", ranks=2, microbatches=8)
    problem, _ = make_problem(measured, (0, 1), 8, stock, read_memory_limit(text))
    assert list(problem.memory_limit) == limits


def test_an_order_may_hold_as_much_as_the_given_order() -> None:
    costs = Costs.uniform(2, forward=1, backward=1, weight=1)
    measured = PipelineCosts(costs, Footprint((10.0, 10.0), (10.0, 10.0)), [0.0, 90.0], draws=False)
    stock = build_order("gpipe", ranks=2, microbatches=8)
    problem, _ = make_problem(measured, (0, 1), 8, stock, read_memory_limit("auto"))
    assert list(problem.memory_limit) == [80.0, 80.0]


# --- choices of earlier runs ---


def _run_twice(cache: str) -> tuple[Outcome, Outcome]:
    first = _run(["Schedule1F1B"], cache, 1)["Schedule1F1B"]
    patch = _plant_costs(cache)
    try:
        return first, train_both(Case(steps=3, microbatches=4), "auto", memory_limit="1.5x")
    finally:
        patch.undo()


def test_a_later_run_takes_the_order_that_was_chosen(ranks: Any, tmp_path: Path) -> None:
    for first, second in ranks(2)(_run_twice, str(tmp_path), timeout=120):
        assert not first.differences, first.differences[:4]
        assert not second.differences, second.differences[:4]
        assert "chosen in an earlier run" not in " ".join(first.remarks)
        assert "solved for 1.5x, chosen in an earlier run (as given 2000.0 ms" in " ".join(
            second.remarks
        ), second.remarks


# --- the race ---


def _run_undecided(cache: str) -> tuple[Outcome, Outcome, list[str]]:
    """Train twice: first turns of both orders scatter at random, then one order is faster."""
    case = Case(steps=RACE + LAPS * LAP + 2, microbatches=4)
    patch = _plant_costs(cache)
    noise = [1.0, 1.3, 0.8]
    patch.setattr(
        race.Race,
        "_read_turn",
        lambda _self, candidate, number: noise[(2 * candidate + number) % 3],
    )
    try:
        first = train_both(case, "auto", memory_limit="1.5x")
        files = [path.name for path in Path(cache).rglob("pipeline-*")]
        patch.setattr(race.Race, "_read_turn", lambda _self, candidate, _number: 2.0 - candidate)
        return first, train_both(CASES["Schedule1F1B"], "auto", memory_limit="1.5x"), files
    finally:
        patch.undo()


def test_a_race_that_noise_decides_continues_and_is_not_kept(ranks: Any, tmp_path: Path) -> None:
    for first, second, files in ranks(2)(_run_undecided, str(tmp_path), timeout=120):
        assert not first.differences, first.differences[:4]
        assert not second.differences, second.differences[:4]
        assert "times scatter too much to decide, and a later run races again" in " ".join(
            first.remarks
        )
        assert "Schedule1F1B runs as 1f1b" in " ".join(first.remarks)
        assert not files
        assert "solved for 1.5x takes 1000.0 ms a step against 2000.0 ms as given" in " ".join(
            second.remarks
        )


def _run_without_rival(cache: str) -> tuple[Outcome, Outcome]:
    patch = pytest.MonkeyPatch()
    patch.setenv("OVPATCH_CACHE_DIR", cache)
    patch.setattr("ovpatch_plugins.pipeline.auto.order_candidates._GAIN", 9.0)
    case = Case(steps=auto_schedule.WARM_UP + auto_schedule.MEASURED + 2, microbatches=4)
    try:
        first = train_both(case, "auto", memory_limit="1x")
        return first, train_both(Case(steps=2, microbatches=4), "auto", memory_limit="1x")
    finally:
        patch.undo()


def test_a_run_keeps_the_finding_that_no_order_is_faster(ranks: Any, tmp_path: Path) -> None:
    for first, second in ranks(2)(_run_without_rival, str(tmp_path), timeout=120):
        assert "the order as given stays: no order is expected to be faster" in " ".join(
            first.remarks
        ), first.remarks
        text = " ".join(second.remarks)
        assert "as given, chosen in an earlier run (no order was expected to be faster)" in text, (
            text
        )


def _simulate(ratio: float, noise: float, seed: int) -> race.Verdict:
    """Race two orders on a machine whose speed drifts; the second order takes ``ratio`` times as long."""
    random = Random(seed)
    verdict = judge([[1.0], [1.0]])
    seconds: list[list[float | None]] = [[], []]
    for number in range(LAPS * ROUNDS):
        drift = 1 + 0.3 * number / ROUNDS
        for candidate, own in enumerate((1.0, ratio)):
            seconds[candidate].append(own * drift * random.lognormvariate(0, noise))
        if (number + 1) % ROUNDS == 0:
            verdict = judge(seconds)
            if verdict.is_sure:
                break
    return verdict


@pytest.mark.parametrize("noise", [0.003, 0.03, 0.15])
@pytest.mark.parametrize("ratio", [0.8, 0.95, 1.0, 1.05, 1.3])
def test_a_kept_order_is_not_slower_by_more_than_two_percent(ratio: float, noise: float) -> None:
    verdicts = [_simulate(ratio, noise, seed) for seed in range(200)]
    wrong = sum(
        verdict.is_sure and (1.0, ratio)[verdict.best] > 1.02 * min(1.0, ratio)
        for verdict in verdicts
    )
    # Each of 200 races decides up to three times at 97.5%.
    assert wrong <= 10
    assert all(verdict.best == 0 for verdict in verdicts if not verdict.is_sure)
    if noise < 0.01:
        assert all(
            verdict.is_sure and verdict.best == (ratio < 1) for verdict in verdicts if ratio != 1.0
        )


@pytest.mark.parametrize("ratio", [0.993, 0.999, 1.001])
def test_an_order_that_is_not_clearly_faster_does_not_replace_the_given_one(ratio: float) -> None:
    assert all(_simulate(ratio, 0.002, seed).best == 0 for seed in range(100))
    assert sum(_simulate(ratio, 0.1, seed).best for seed in range(100)) <= 5


def test_one_turn_that_took_long_decides_nothing() -> None:
    given, solved = [1.0, 1.0, 5.0, 1.0], [1.01, 1.01, 1.01, 1.01]
    assert judge([given, solved]).best == 0
    assert judge([[1.0] * 4, [0.95, 0.95, 5.0, 0.95]]).best == 0
    assert judge([[1.0] * 4, [0.95] * 4]).best == 1


def test_each_order_has_the_same_turns() -> None:
    found = race.Race(2, torch.device("cpu"))
    found.add_lap()
    for candidate in range(2):
        own = [turn for turn in found.turns if turn.candidate == candidate]
        assert [turn.is_timed for turn in own] == [False] * SETTLING + [
            False,
            True,
            True,
        ] * 2 * ROUNDS
    assert found.can_continue
    found.add_lap()
    assert not found.can_continue


def test_turns_that_failed_do_not_count() -> None:
    merged = merge_ranks([[[1.0, None, 3.0, 1.0], [2.0] * 4], [[2.0, 2.0, 1.0, 1.0], [1.0] * 4]])
    assert merged == [[2.0, None, 3.0, 1.0], [2.0] * 4]
    failed = judge([[1.0] * 4, [None] * 4])
    assert (failed.best, failed.is_sure) == (0, True)
    assert not judge([[None] * 4, [None] * 4]).is_sure
    assert judge([[None] * 4, [1.0] * 4]).best == 1


# --- with other parallelism ---


def _run_in_two_dimensions(names: list[str], cache: str) -> dict[str, tuple[list[str], list[str]]]:
    """Train pipelines of two ranks in two replicas, or with tensor parallelism, until the solved order has won."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, found = mesh["pp"].get_group(), {}
    patch = _plant_costs(cache)
    patch.setattr(race.Race, "_read_turn", lambda _self, candidate, _number: 2.0 - candidate)
    try:
        for name in names:
            wrap, arguments, more, features = SETTINGS[name]
            more = {**more, "steps": STEPS + 1, "pieces": 1, "microbatches": 4}
            case = Case(wrap=wrap(mesh["dp"], **arguments), **more)
            seed = 0 if name == "tp_linear" else mesh.get_local_rank("dp")
            if features:
                ovpatch.apply(*features)
            stock = train(case, group, seed)
            ovpatch.revert()
            options = {"pipeline": {"schedule": "auto", "memory_limit": "1.5x"}}
            ovpatch.apply("pipeline", *features, options=options)
            patched = train(case, group, seed)
            found[name] = differences(stock, patched), list(feature_report().remarks)
            ovpatch.revert()
    finally:
        patch.undo()
    return found


def test_with_replicas_shards_and_tensor_parallelism(ranks: Any, tmp_path: Path) -> None:
    names = ["our ddp", "fsdp", "tp_linear"]
    for rank, found in enumerate(
        ranks(4)(_run_in_two_dimensions, names, str(tmp_path), timeout=200)
    ):
        for name, (changes, remarks) in found.items():
            assert not changes, f"rank {rank}, {name}: {changes[:4]}"
            assert "runs as solved for 1.5x" in " ".join(remarks), f"{name}: {remarks}"

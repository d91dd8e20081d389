"""``schedule=auto``: an order solved from costs of the first steps, raced against the order as given.

All ranks of the job decide the same, also the ranks of other replicas of the pipeline. Collectives inside of
computations, such as those of tensor parallelism, and reductions of stages must keep one sequence in the whole job.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.consensus import (
    LATE_START_S,
    check_consistent,
    gather_values,
    wait_limit_s,
)
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch.overlap.pipelining.ir import Kind, Placement, Schedule, ScheduleError, write_orders
from ovpatch.overlap.pipelining.order_rules import check_schedule
from ovpatch_plugins.pipeline.auto.measured_costs import (
    PipelineCosts,
    RankCosts,
    StageProbe,
    measure_sends,
    merge_costs,
    read_spare,
    read_times,
)
from ovpatch_plugins.pipeline.auto.order_candidates import (
    AS_GIVEN_NAME,
    STOCK_NAME,
    Candidate,
    ChosenOrder,
    ScheduleCache,
    find_candidates,
    write_plan,
)
from ovpatch_plugins.pipeline.auto.order_race import (
    Race,
    StepTimer,
    Turn,
    Verdict,
    find_medians,
    judge,
    merge_ranks,
)
from ovpatch_plugins.pipeline.pipeline_report import Prediction, ScheduleReport
from ovpatch_plugins.pipeline.runtime.engine import Engine, Programs, StepInputs

WARM_UP: Final = 2
"""The number of steps before costs are measured."""

MEASURED: Final = 4
"""The number of steps whose costs are measured."""

PLAN_ROUNDS: Final = 2
"""The rounds of the race of all orders whose times a plan shows."""

_REMEDY: Final = (
    "With schedule=auto every rank of the job must run a pipeline, with the same calls. Set "
    "OVPATCH_PIPELINE_SCHEDULE=as-given if some ranks run none."
)


@dataclass(frozen=True)
class Pipeline:
    """The pipeline for which an order is chosen.

    Attributes:
        name: Class of the schedule.
        orders: The order as given.
        placement: Rank of each stage.
        microbatches: Number of microbatches.
        group: Its process group.
        device: The device on which its stages compute.
        options: Resolved options of the feature.
    """

    name: str
    orders: Schedule
    placement: Placement
    microbatches: int
    group: dist.ProcessGroup
    device: torch.device
    options: Mapping[str, Any]


class AutoSchedule:
    """The controller that finds an order for an engine while the engine runs its steps.

    [Note: steps of schedule=auto] The order as given runs for :data:`WARM_UP` steps and for :data:`MEASURED` more,
    whose costs are measured. Then the first rank of the job solves, and sends the orders to its peers. Orders run in
    turns, lap by lap, each with weight gradients deferred as without a race. The race ends when another order is
    surely faster, or surely none is. In doubt, the order as given stays. Ranks count calls, not successes. So a rank
    that had finished a step before a peer failed is at the same number.

    Args:
        engine: Runs the steps.
        pipeline: The pipeline.
        plan: Returns this rank's programs of an order. All ranks call this.
        report: Gets the choice.
        directory: The user's cache; None for no cache.

    Attributes:
        is_final: Whether an order is chosen.
    """

    may_change_order = True

    def __init__(
        self,
        engine: Engine,
        pipeline: Pipeline,
        plan: Callable[[Schedule], Programs],
        report: ScheduleReport,
        directory: Path | None,
    ) -> None:
        self.engine = engine
        self.is_final = False
        self._pipeline = pipeline
        self._plan = plan
        self._report = report
        self._directory = directory
        # The program of the order as given.
        self._given = engine.program
        self._world: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        # All ranks of the job make their objects in the same order, so the number is the same.
        number = next(group_state(self._world).get_or_create(("pipeline", "auto"), itertools.count))
        self._topic = f"pipeline: schedule=auto {number}"
        self._plan_file = str(pipeline.options.get("plan_file", ""))
        self._probe = StageProbe(engine.stages, pipeline.device)
        # The number of started steps.
        self._calls = 0
        # - The race
        # The candidates and this rank's programs for them; the order as given comes first.
        self._candidates: list[Candidate] = []
        self._programs: list[Programs] = []
        # The turn of the running step, and the timer of that step.
        self._turn: Turn | None = None
        self._timer: StepTimer | None = None
        # Candidates that have had a turn.
        self._settled: set[int] = set()
        self._race: Race | None = None
        # The value of `_calls` in the race's first step.
        self._race_begins = 0
        # Whether torch's own runtime has its turn.
        self._runs_stock = False
        # - Measurements and choices
        self._measured: PipelineCosts | None = None
        self._cache: ScheduleCache | None = None
        # The choice of an earlier run.
        self._kept: ChosenOrder | None = None
        report.notes = ["schedule=auto: the order as given runs while costs are measured"]

    @property
    def next_controller(self) -> AutoSchedule | Prediction:
        """The controller of the next step: this object until an order is chosen, then the order's prediction."""
        return self._report.prediction if self.is_final else self

    def before_step(self, inputs: StepInputs) -> bool:
        """Prepare a step; in some steps, all ranks of the job agree first.

        Returns:
            Whether torch runs the step. A plan measures torch as well.

        Raises:
            RankMismatchError: A rank of the job does not take part in an agreement.
        """
        self._calls += 1
        self._turn = self._prepare_step(inputs)
        is_timed = self._turn is not None and self._race is not None
        self._timer = StepTimer(self._pipeline.device) if is_timed else None
        return self._runs_stock

    def after_step(self) -> None:
        """Add the time of a step that has succeeded."""
        if self._timer is not None and self._turn is not None and self._race is not None:
            self._timer.stop()
            self._race.add_time(self._turn, self._timer)

    def _prepare_step(self, inputs: StepInputs) -> Turn | None:
        """Do the work that is due before a step; return the turn for which its time counts, if any."""
        if self._calls == 1:
            self._look_up(inputs)
        if self.is_final:
            return None
        if self._calls == WARM_UP + 1:
            self.engine.forget_times()
            self.engine.observer = self._probe
        if self._calls == WARM_UP + MEASURED + 1:
            self.engine.observer = None
            self._start_race()
        if self.is_final or self._race is None:
            return None
        place = self._calls - self._race_begins
        if place == len(self._race.turns) and not self._race_on(self._race):
            return None
        turn = self._race.turns[place]
        if not place or turn.candidate != self._race.turns[place - 1].candidate:
            self._take_turn(turn.candidate)
        return turn if turn.is_timed else None

    def _take_turn(self, candidate: int) -> None:
        """Run a candidate from this step on."""
        schedule = self._candidates[candidate].schedule
        self._runs_stock = self._candidates[candidate].name == STOCK_NAME
        if self._runs_stock:
            return
        self.engine.program = self._programs[candidate].steady
        self._split(schedule)
        if candidate not in self._settled:
            self._settled.add(candidate)
            self.engine.settling = self._programs[candidate].settling

    def _split(self, schedule: Schedule) -> None:
        """Defer weight gradients as an order needs it; in the first steps, all Ws are measured separately."""
        split = {action.stage for order in schedule for action in order if action.kind is Kind.W}
        for index, stage in self.engine.stages.items():
            stage.set_splits(index in split)

    # --- agreements ---

    def _gather(self, value: Any) -> list[Any]:
        return gather_values(self._world, self._topic, value)

    def _publish(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the value of the job's first rank."""
        found: Mapping[str, Any] = self._gather(dict(value) if self._world.rank() == 0 else {})[0]
        return found

    def _look_up(self, inputs: StepInputs) -> None:
        """Take the order that an earlier run has chosen, if any."""
        limit = wait_limit_s(self._world, LATE_START_S)
        check_consistent(self._world, self._topic, {}, timeout_s=limit, remedy=_REMEDY)
        facts = [json.dumps(self._describe_environment(inputs), sort_keys=True)]
        digest = hashlib.sha256(json.dumps(self._gather(facts)).encode()).hexdigest()
        self._cache = ScheduleCache(self._directory, {"pipelines": digest, **self._list_facts()})
        kept = None if self._world.rank() or self._plan_file else self._cache.read()
        found = self._publish({"choice": kept and kept.to_json()})["choice"]
        if found is None:
            return
        self._kept = ChosenOrder.from_json(found)
        # If a rank has several stages, the first steps must show whether Fs draw random numbers.
        if len(self._pipeline.placement) == len(self._pipeline.orders):
            self._take_kept()

    def _take_kept(self) -> None:
        """Run the order that an earlier run has chosen, unless this pipeline must not run it."""
        choice = self._kept
        if choice is None:
            return
        try:
            self._check(choice.schedule)
        except ScheduleError:
            # Another version wrote it, or Fs now draw random numbers. All ranks find the same.
            return
        steps = ", ".join(
            f"{name} {1000 * seconds:.1f} ms" for name, seconds in choice.steps.items()
        )
        note = (
            f"schedule=auto: {choice.name}, chosen in an earlier run "
            f"({steps or 'no order was expected to be faster'})"
        )
        self._settle(choice.schedule, choice.name, [note])

    def _start_race(self) -> None:
        """Exchange costs, solve on the first rank of the job, and start a race of the orders."""
        pipeline = self._pipeline
        sends = measure_sends(
            self.engine.messages,
            self.engine.stages,
            pipeline.placement,
            dist.get_rank(pipeline.group),
            pipeline.device,
        )
        mine = RankCosts(
            ranks=dist.get_process_group_ranks(pipeline.group),
            facts=self._list_facts(),
            times=read_times(self.engine.times, self.engine.stages),
            memory=self._probe.read_footprints(),
            spare=read_spare(pipeline.device),
            sends=sends,
            overhead=self.engine.times.overhead,
            draws=self._probe.draws and len(pipeline.placement) > len(pipeline.orders),
        )
        found = merge_costs(
            [RankCosts(**costs) for costs in self._gather(mine.to_json())], pipeline.placement
        )
        if isinstance(found, str):
            self._keep_as_given(found)
            return
        self._measured = found
        self._take_kept()
        if self.is_final:
            return
        solved = self._publish(self._solve(found) if self._world.rank() == 0 else {})
        self._candidates = [Candidate.from_json(data) for data in solved["candidates"]]
        if len(self._candidates) < 2:
            self._keep_as_given(solved["remark"] or "no order is expected to be faster")
            if not solved["remark"]:
                self._write_choice(0, {})
            return
        for candidate in self._candidates:
            self._check(candidate.schedule)
        self._programs = [self._plan(candidate.schedule) for candidate in self._candidates]
        self._programs[0] = replace(self._programs[0], steady=self._given)
        laps = {"rounds": PLAN_ROUNDS, "laps": 1} if self._plan_file else {}
        self._race = Race(len(self._candidates), pipeline.device, **laps)
        self._race_begins = self._calls
        names = " and ".join(candidate.name for candidate in self._candidates[1:])
        self._report.notes = [
            f"schedule=auto: {names} races against the order as given",
            *filter(None, [solved["remark"]]),
        ]

    def _solve(self, measured: PipelineCosts) -> dict[str, Any]:
        pipeline = self._pipeline
        candidates, remark = find_candidates(
            measured,
            pipeline.placement,
            pipeline.microbatches,
            pipeline.orders,
            str(pipeline.options["memory_limit"]),
            plans=bool(self._plan_file),
        )
        return {"candidates": [candidate.to_json() for candidate in candidates], "remark": remark}

    def _race_on(self, race: Race) -> bool:
        """Add a lap if noise may have decided; otherwise choose by the times of the slowest rank."""
        if self._pipeline.device.type == "cuda":
            torch.cuda.synchronize(self._pipeline.device)
        seconds = merge_ranks(self._gather(race.read()))
        orders = [candidate for candidate in self._candidates if candidate.name != STOCK_NAME]
        verdict = judge(seconds[: len(orders)])
        if not verdict.is_sure and race.can_continue:
            race.add_lap()
            return True
        self._finish_plan(find_medians(seconds))
        self._candidates = orders
        self._choose(verdict)
        return False

    def _choose(self, verdict: Verdict) -> None:
        best, steps = verdict.best, verdict.steps
        chosen, given = self._candidates[best], self._candidates[0]
        if len(steps) == 1:
            self._keep_as_given("no order is expected to be faster")
        elif not best:
            fastest = min(range(1, len(steps)), key=steps.__getitem__)
            rival = self._candidates[fastest]
            doubt = (
                ""
                if verdict.is_sure
                else "; times scatter too much to decide, and a later run races again"
            )
            self._keep_as_given(
                f"{1000 * steps[0]:.1f} ms a step against {1000 * steps[fastest]:.1f} ms of "
                f"{rival.name} "
                f"(predicted {1000 * given.predicted:.1f} and {1000 * rival.predicted:.1f}){doubt}"
            )
        else:
            text = (
                f"schedule=auto: {chosen.name} takes {1000 * steps[best]:.1f} ms a step against "
                f"{1000 * steps[0]:.1f} ms as given (predicted {1000 * chosen.predicted:.1f} and "
                f"{1000 * given.predicted:.1f}), with {chosen.memory:.2f}x the memory of 1F1B"
            )
            self._settle(chosen.schedule, chosen.name, [text])
        if verdict.is_sure:
            names = [candidate.name for candidate in self._candidates]
            self._write_choice(best, dict(zip(names, steps, strict=True)))

    def _write_choice(self, best: int, steps: Mapping[str, float]) -> None:
        """Write a choice for later runs."""
        if self._world.rank() == 0 and self._cache is not None and not self._plan_file:
            chosen = self._candidates[best]
            finite = {name: seconds for name, seconds in steps.items() if math.isfinite(seconds)}
            self._cache.write(ChosenOrder(chosen.name, chosen.schedule, finite))

    # --- the chosen order ---

    def _keep_as_given(self, reason: str) -> None:
        self._settle(
            self._pipeline.orders,
            AS_GIVEN_NAME,
            [f"schedule=auto: the order as given stays: {reason}"],
        )

    def _settle(self, schedule: Schedule, name: str, notes: Sequence[str]) -> None:
        """Run an order in all further steps."""
        self.is_final = True
        self._runs_stock = False
        pipeline = self._pipeline
        is_given = write_orders(schedule) == write_orders(pipeline.orders)
        program = self._given if is_given else self._plan(schedule).steady
        self._split(schedule)
        if self._programs and pipeline.device.type == "cuda":
            # Otherwise memory that only the other orders need would stay allocated.
            torch.cuda.empty_cache()
        self._programs = []
        self._race = None
        self._report.prediction = Prediction(
            pipeline.group, schedule, pipeline.placement, self.engine.times
        )
        self.engine.set_program(program)
        self.engine.forget_times()
        self._report.notes = list(notes)
        self._report.peak_activations = program.peak_activations
        if name != AS_GIVEN_NAME:
            self._report.order = name

    def _check(self, schedule: Schedule) -> None:
        draws = self._measured is not None and self._measured.draws
        pipeline = self._pipeline
        check_schedule(
            schedule, pipeline.placement, stock=pipeline.orders, keep_forward_order=draws
        )

    def _finish_plan(self, steps: Sequence[float]) -> None:
        """Write the plan if the user wants one; afterwards all ranks know that its file exists."""
        if not self._plan_file:
            return
        if self._world.rank() == 0 and self._measured is not None:
            pipeline = self._pipeline
            numbers = (pipeline.microbatches, pipeline.placement)
            write_plan(
                Path(self._plan_file),
                pipeline.name,
                self._measured,
                numbers,
                self._candidates,
                steps,
            )
        self._gather("written")

    def _list_facts(self) -> dict[str, Any]:
        """Return the facts that must be the same in all pipelines of a job, or no order is chosen."""
        pipeline = self._pipeline
        orders = " / ".join(write_orders(pipeline.orders))
        return {
            "class": pipeline.name,
            "microbatches": pipeline.microbatches,
            "placement": list(pipeline.placement),
            "order": hashlib.sha256(orders.encode()).hexdigest(),
            "options": {
                name: str(value) for name, value in pipeline.options.items() if name != "plan_file"
            },
        }

    def _describe_environment(self, inputs: StepInputs) -> dict[str, Any]:
        """Return the facts on which this rank's times depend: shapes, device and versions."""
        device = self._pipeline.device
        stages = {
            index: [
                [*map(int, param.shape), str(param.dtype), param.requires_grad]
                for param in run.stage.submod.parameters()
            ]
            for index, run in self.engine.stages.items()
        }
        return {
            "stages": stages,
            "inputs": [
                list(tensor.shape) for tensor in _list_tensors((inputs.args[0], inputs.kwargs[0]))
            ],
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else platform.machine(),
            "threads": torch.get_num_threads(),
            "backend": backend_name(self._pipeline.group, device),
            "copies": self.engine.messages.is_copied,
            "torch": str(torch.__version__),
            "ovpatch": importlib.metadata.version("ovpatch"),
        }


def _list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [tensor for part in parts for tensor in _list_tensors(part)]

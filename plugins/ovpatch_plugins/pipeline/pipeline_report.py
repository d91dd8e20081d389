"""The remarks of the feature in this process: schedules, their costs, and the bubble that the simulator expects."""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import group_store
from ovpatch.overlap.pipelining.ir import Kind, Schedule
from ovpatch.overlap.pipelining.orders import split_backwards
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS, StageReport
from ovpatch_plugins.pipeline.runtime.step_clock import StepTimes
from ovpatch_plugins.pipeline.runtime.step_failures import name_keys

# The number of steps before ranks share their costs, because the first steps are slower.
_SHARED_AFTER_STEPS: Final = 6

# The report shows the last schedules alone, because a script may make many.
_MAX_SCHEDULES: Final = 8
_schedules: deque[ScheduleReport] = deque(maxlen=_MAX_SCHEDULES)
_stock_reasons: dict[str, None] = {}


class Prediction:
    """The expected cost of a schedule; ranks share the costs of their stages once, through the group's store.

    It acts after steps until it knows the costs of all stages. Only the report simulates.

    Args:
        group: The pipeline's group. All its ranks make this together.
        schedule: Orders by rank.
        placement: Rank of each stage.
        times: The durations of this rank's computations.

    Attributes:
        next_controller: This object while costs are unknown, then None.
    """

    may_change_order = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: Schedule,
        placement: Sequence[int],
        times: StepTimes,
    ) -> None:
        self.next_controller: Prediction | None = self
        # The report keeps the prediction, and must not keep the group.
        self._group = weakref.ref(group)
        self._schedule = schedule
        self._placement = placement
        self._times = times
        self._name = name_keys(group, "pipeline costs")
        self._steps = 0
        # Seconds of F, B, W and overhead by stage; empty until all are known.
        self._costs: Sequence[Sequence[float]] = ()
        # The result of :meth:`find_bubbles`; empty before its first call.
        self._bubbles: Sequence[float] = ()

    def before_step(self, inputs: object) -> bool:
        """Do nothing."""
        del inputs
        return False

    def after_step(self) -> None:
        """Share costs after some steps, and read the costs of peers once all have shared theirs."""
        self._steps += 1
        if self._steps < _SHARED_AFTER_STEPS:
            return
        group = self._group()
        store = None if group is None else group_store(group)
        if store is None:
            self.next_controller = None
            return
        if self._steps == _SHARED_AFTER_STEPS:
            times = self._times
            overhead = times.overhead / max(1, len(times.stages()))
            for stage in times.stages():
                backward = times.mean(stage, Kind.B) or times.mean(stage, Kind.BW)
                costs = [times.mean(stage, Kind.F), backward, times.mean(stage, Kind.W), overhead]
                store.set(self._key(stage), json.dumps(costs))
        keys = [self._key(stage) for stage in range(len(self._placement))]
        if store.check(keys):
            self._costs = [json.loads(store.get(key)) for key in keys]
            self.next_controller = None

    def find_bubbles(self) -> Sequence[float]:
        """Return the part of a step in which a rank does not compute, by rank; empty until all costs are known."""
        if self._costs and not self._bubbles:
            from ovpatch.planner.simulator import Costs, simulate

            forward, backward, weight, parts = (
                tuple(column) for column in zip(*self._costs, strict=True)
            )
            overhead = [0.0] * len(self._schedule)
            for rank, part in zip(self._placement, parts, strict=True):
                overhead[rank] += part
            costs = Costs(forward, backward, weight, overhead=tuple(overhead))
            # A stage that defers sends its input gradient before its weight gradients. Ws of other stages cost nothing.
            found = simulate(split_backwards(self._schedule), self._placement, costs)
            self._bubbles = [1 - busy / found.step if found.step else 0.0 for busy in found.busy]
        return self._bubbles

    def _key(self, stage: int) -> str:
        return f"{self._name}/{stage}"


@dataclass
class ScheduleReport:
    """The part of the report about a schedule. It outlives the schedule, so nothing in it references stages.

    Attributes:
        name: Its class.
        order: Name of the order that it runs.
        rank: Rank in the pipeline.
        microbatches: Number of microbatches in a step.
        peak_activations: Most microbatches with activations at one time.
        prediction: The cost that the simulator expects.
        stages: The rank's stages.
        times: Costs of the computations.
        transport: The lines about its messages.
        notes: Other lines, such as the choice of its order.
    """

    name: str
    order: str
    rank: int
    microbatches: int
    peak_activations: int
    prediction: Prediction
    stages: dict[int, StageReport]
    times: StepTimes
    transport: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)


def note_schedule(schedule: ScheduleReport) -> None:
    """Add a schedule to the report."""
    COUNTERS.schedules += 1
    _schedules.append(schedule)


def list_schedules() -> list[ScheduleReport]:
    """Return the schedules that the report shows, the latest last."""
    return list(_schedules)


def note_stock(reason: str) -> None:
    """Add the reason for which a schedule fell back to torch to the report."""
    _stock_reasons.setdefault(reason)


def drop_remarks() -> None:
    """Remove all remarks."""
    _schedules.clear()
    _stock_reasons.clear()


def write_remarks() -> list[str]:
    """Return the lines about schedules that ran, their costs, and the reasons of schedules that fell back to torch."""
    remarks = [line for schedule in _schedules for line in _describe(schedule)]
    return remarks + [f"a schedule fell back to torch: {reason}" for reason in _stock_reasons]


def _describe(schedule: ScheduleReport) -> list[str]:
    times = schedule.times
    lines = [
        f"{schedule.name} runs as {schedule.order} on rank {schedule.rank}: "
        f"{schedule.microbatches} microbatches, "
        f"at most {schedule.peak_activations} with activations"
    ]
    lines += [*schedule.transport, *schedule.notes]
    for index, stage in schedule.stages.items():
        where = f"stage {index}"
        costs = [
            f"{kind.value} {1000 * cost:.2f}" for kind in Kind if (cost := times.cost(index, kind))
        ]
        lines.append(f"{where}: {', '.join(costs)} ms" if costs else f"{where}: not run yet")
        if stage.receive_nbytes:
            size = f"{stage.receive_nbytes / 2**20:.1f} MiB a microbatch"
            lines.append(
                f"{where}: receive buffers of {size}, for those in flight instead of "
                f"{schedule.microbatches}"
            )
        if stage.objection:
            lines.append(f"{where}: weight gradients stay in the backward: {stage.objection}")
        lines += [
            f"{where}: {_count(number)} in B: {reason}" for reason, number in stage.reasons.items()
        ]
        if stage.expert_weights:
            lines.append(
                f"{where}: {stage.expert_weights} weights of experts in B: their GEMMs are grouped"
            )
    bubble = times.bubble(schedule.microbatches)
    if bubble is not None:
        expected = schedule.prediction.find_bubbles()
        text = f", {100 * expected[schedule.rank]:.1f}% predicted" if expected else ""
        lines.append(
            f"bubble on rank {schedule.rank}: {100 * bubble:.1f}% of a step measured{text}"
        )
    return lines


def _count(number: int) -> str:
    return f"{number} linear{'s' if number > 1 else ''}"

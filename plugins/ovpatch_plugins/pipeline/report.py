"""Counters, costs and remarks of the feature in this process."""

from __future__ import annotations

import statistics
import weakref
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ovpatch_plugins.pipeline.actions import Kind

if TYPE_CHECKING:
    from ovpatch_plugins.pipeline.engine import Engine


@dataclass
class Counters:
    """Totals since the process started.

    Attributes:
        schedules: Schedules taken over.
        steps: Steps that the engine ran.
        actions: Computations of those steps.
        early_sends: Input gradients sent before the weight gradients of their microbatch.
        weight_grads: Weight gradients of linears computed later than their backward.
        messages: Messages sent to other ranks.
        failed_steps: Steps that ended with an exception.
        stock_steps: Steps with a backward that stock ran.
    """

    schedules: int = 0
    steps: int = 0
    actions: int = 0
    early_sends: int = 0
    weight_grads: int = 0
    messages: int = 0
    failed_steps: int = 0
    stock_steps: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


COUNTERS = Counters()

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_stock_reasons: dict[str, None] = {}


def note_engine(engine: Engine) -> None:
    """Have the report show an engine as long as it lives."""
    COUNTERS.schedules += 1
    _engines.add(engine)


def note_stock(reason: str) -> None:
    """Have the report say why a schedule was left to stock."""
    _stock_reasons.setdefault(reason)


class StepTimes:
    """Durations of a rank's computations and steps, in seconds of the host; the last :attr:`WINDOW` of each kind.

    On a device whose work the host does not wait for, they are the times to issue it, and no bubble is reported.
    """

    WINDOW = 64

    def __init__(self) -> None:
        self._costs: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
        self._steps: list[float] = []

    def add_action(self, stage: int, kind: Kind, seconds: float) -> None:
        """Add a computation."""
        _append(self._costs[stage, kind], seconds)

    def add_step(self, seconds: float) -> None:
        """Add a step."""
        _append(self._steps, seconds)

    def cost(self, stage: int, kind: Kind) -> float:
        """Return the median cost; 0 without one."""
        costs = self._costs.get((stage, kind))
        return statistics.median(costs) if costs else 0.0

    def bubble(self, microbatches: int) -> float | None:
        """Return ``1 - m (F + B + W) / T`` over all stages of the rank; None before the first step."""
        if not self._steps:
            return None
        work = sum(self.cost(stage, kind) for stage, kind in self._costs)
        return 1 - microbatches * work / statistics.median(self._steps)


def _append(values: list[float], value: float) -> None:
    if len(values) >= StepTimes.WINDOW:
        del values[0]
    values.append(value)


def write_remarks() -> list[str]:
    """Return what ran, what it cost, and what was left to stock, with reasons."""
    remarks = [line for engine in _engines for line in _describe(engine)]
    return remarks + [f"a schedule was left to stock: {reason}" for reason in _stock_reasons]


def _describe(engine: Engine) -> list[str]:
    program, times, name = engine.program, engine.times, engine.class_name
    lines = [
        f"{name} runs as {engine.order_name} on rank {program.rank}: {engine.microbatches} microbatches, "
        f"at most {program.peak_activations} with activations"
    ]
    for index, stage in engine.stages.items():
        costs = {kind: 1000 * times.cost(index, kind) for kind in Kind}
        text = ", ".join(f"{kind.value} {cost:.2f}" for kind, cost in costs.items() if cost)
        lines.append(f"stage {index}: {text} ms" if text else f"stage {index}: not run yet")
        if stage.objection:
            lines.append(f"stage {index}: weight gradients stay in the backward: {stage.objection}")
        elif stage.queue is not None:
            lines += [
                f"stage {index}: {count} linear{'s' if count > 1 else ''} {reason} stay{'' if count > 1 else 's'} in B"
                for reason, count in stage.queue.reasons.items()
            ]
            undeferred = stage.queue.count_undeferred()
            if undeferred:
                lines.append(
                    f"stage {index}: {undeferred} linears stay in B whose input needs no gradient or is not contiguous"
                )
    bubble = times.bubble(engine.microbatches)
    if bubble is not None and engine.is_host_timed:
        lines.append(f"bubble measured on rank {program.rank}: {100 * bubble:.1f}% of a step")
    return lines

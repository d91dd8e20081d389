"""The bubble that the simulator expects, from costs that the ranks of a pipeline tell each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch.distributed as dist

from ovpatch.overlap.comm.kept_state import group_state, group_store
from ovpatch_plugins.pipeline.orders import Kind, Schedule, split_backwards
from ovpatch_plugins.pipeline.report import StepTimes
from ovpatch_plugins.pipeline.simulator import Costs, simulate

_SHARED_AFTER = 6  # steps; the first ones are slower


class Prediction:
    """What a schedule should cost; ranks share the costs of their stages once, through the group's store.

    Args:
        group: The pipeline's group; all ranks make their predictions in the same order.
        schedule: Orders by rank.
        placement: Rank of each stage.

    Attributes:
        bubbles: Part of a step in which a rank does not compute, by rank; empty until all costs are known.
    """

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule, placement: Sequence[int]) -> None:
        self.bubbles: Sequence[float] = ()
        self._group = group
        self._schedule, self._placement = schedule, placement
        self._number = next(group_state(group).get_or_create(("pipeline", "predictions"), itertools.count))
        self._steps = 0

    def add_step(self, times: StepTimes) -> None:
        """Share costs after some steps, and read those of the others when they are there."""
        self._steps += 1
        store = None if self.bubbles or self._steps < _SHARED_AFTER else group_store(self._group)
        if store is None:
            return
        if self._steps == _SHARED_AFTER:
            overhead = times.overhead / max(1, len(times.stages()))
            for stage in times.stages():
                forward, full = times.mean(stage, Kind.F), times.mean(stage, Kind.BW)
                backward, weight = times.mean(stage, Kind.B), times.mean(stage, Kind.W)
                costs = [forward, backward or full, weight, overhead]
                store.set(self._key(stage), json.dumps(costs))
        keys = [self._key(stage) for stage in range(len(self._placement))]
        if store.check(keys):
            self._simulate([json.loads(store.get(key)) for key in keys])

    def _simulate(self, shared: Sequence[Sequence[float]]) -> None:
        forward, backward, weight, parts = (tuple(column) for column in zip(*shared, strict=True))
        overhead = [0.0] * len(self._schedule)
        for rank, part in zip(self._placement, parts, strict=True):
            overhead[rank] += part
        costs = Costs(forward, backward, weight, overhead=tuple(overhead))
        # A stage that defers sends its input gradient before its weight gradients. Ws of others cost nothing.
        found = simulate(split_backwards(self._schedule), self._placement, costs)
        self.bubbles = [1 - busy / found.step if found.step else 0.0 for busy in found.busy]

    def _key(self, stage: int) -> str:
        return f"ovpatch/pipeline/costs/{self._number}/{stage}"

"""The placement of a pipeline, and the stages of this rank in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ovpatch.overlap.pipelining.ir import Placement
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages


@dataclass(frozen=True)
class StageInfo:
    """A stage of this rank.

    Attributes:
        number: Its index in the placement.
        stage: The stage of ``torch.distributed.pipelining``.
        first_input: The microbatch of the step that is number 0 of the stage.
        replicas: A group with other replicas of the stage in the same pipeline; None without one.
    """

    number: int
    stage: Any
    first_input: int = 0
    replicas: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline as one rank sees it.

    Attributes:
        placement: Rank of each stage.
        stages: This rank's stages.
    """

    placement: Placement
    stages: tuple[StageInfo, ...]

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this rank's stages, with their indices."""
        return [_find_device(info.stage) for info in self.stages]


def read_shape(schedule: Any) -> PipelineShape:
    """Return the shape of a schedule's pipeline; schedules of ovpatch describe themselves by ``describe_shape``."""
    if hasattr(schedule, "describe_shape"):
        shape: PipelineShape = schedule.describe_shape()
        return shape
    stages = list_stages(schedule)
    ranks = stages[0].stage_index_to_group_rank
    placement = [ranks[number] for number in range(schedule._num_stages)]
    return PipelineShape(placement, tuple(StageInfo(stage.stage_index, stage) for stage in stages))


def _find_device(stage: Any) -> torch.device:
    device = torch.device(stage.device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device

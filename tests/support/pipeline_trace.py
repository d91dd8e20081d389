"""A program that traces one steady step of a pipeline whose two stages are on one rank, so that it has no messages.

python -m tests.support.pipeline_trace    # prints a trace as JSON
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from tests.support.step_trace import Calls

#: Steps before the traced one: costs have been shared after six.
_WARM_UP_STEPS: Final = 8
_MICROBATCHES: Final = 4


def trace() -> dict[str, Any]:
    """Return the calls and the work of a steady step, see :func:`tests.support.step_trace.trace`."""
    import ovpatch

    ovpatch.apply("pipeline")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parts = [torch.nn.Linear(8, 8) for _ in range(2)]
    stages = [
        PipelineStage(part, number, 2, torch.device("cpu")) for number, part in enumerate(parts)
    ]
    schedule = ScheduleInterleavedZeroBubble(
        stages, _MICROBATCHES, loss_fn=torch.nn.functional.mse_loss
    )
    rows = torch.randn(2 * _MICROBATCHES, 8)

    def step() -> None:
        schedule.step(rows, target=rows, losses=[])

    for _ in range(_WARM_UP_STEPS):
        step()
    # A collection would call finalizers of earlier steps.
    gc.collect()
    gc.disable()
    before = dict(ovpatch.report()["pipeline"].counters)
    with Calls() as calls:
        step()
    after = ovpatch.report()["pipeline"].counters
    with Calls() as again:
        step()
    grown = {name: after[name] - count for name, count in before.items()}
    return {"calls": calls.found, "counters": grown, "is_steady": calls.found == again.found}


if __name__ == "__main__":
    print(json.dumps(trace()), flush=True)
    os._exit(0)

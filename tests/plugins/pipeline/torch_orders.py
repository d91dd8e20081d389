"""Orders of torch's schedule classes, made without a process group."""

from __future__ import annotations

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from ovpatch.overlap.pipelining.ir import Schedule
from ovpatch.overlap.pipelining.orders import build_placement, convert_torch_order

PLACEMENT_OF = {
    "LoopedBFS": "loop",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "vee",
    "DualPipeV": "vee",
}


class BareStage(_PipelineStageBase):
    """A stage with the attributes that the constructors of schedules read."""

    def __init__(self, index: int, *, stages: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = (
            index,
            stages,
            ranks,
            rank,
        )
        self.has_backward = True
        self.submod = self.group = self.dw_builder = None
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(stages)}

    def _create_grad_recv_info(self, *args, **kwargs):
        raise NotImplementedError

    _shape_inference = _prepare_forward_infra = _prepare_backward_infra = _create_grad_recv_info


def torch_object(name: str, *, ranks: int, microbatches: int, chunks: int = 2):
    placement = build_placement(PLACEMENT_OF[name], ranks=ranks, chunks=chunks)
    own = [stage for stage, rank in enumerate(placement) if rank == 0]
    stages = [BareStage(stage, stages=len(placement), ranks=ranks, rank=0) for stage in own]
    return getattr(schedules, f"Schedule{name}")(
        stages, microbatches, loss_fn=lambda output, target: output
    )


def torch_order(
    name: str, *, ranks: int, microbatches: int, chunks: int = 2
) -> tuple[Schedule, tuple[int, ...]]:
    """Return the order of a class and its placement."""
    made = torch_object(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = build_placement(PLACEMENT_OF[name], ranks=ranks, chunks=chunks)
    return convert_torch_order(made.pipeline_order), placement

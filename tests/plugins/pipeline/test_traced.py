"""Stages that ``torch.distributed.pipelining.pipeline()`` has traced: chains, and models with skip connections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline, schedules

import ovpatch
from tests.plugins.pipeline.cases import compute_loss, counters, differences, feature_report
from tests.plugins.pipeline.models import ROWS, WIDTH, Block

MICROBATCHES, STEPS = 4, 2


class Model(nn.Module):
    """Blocks that pass on one tensor or two; with a skip connection, the last block reads a tensor of the first."""

    def __init__(self, kind: str, blocks: int) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        carried = x
        for number, block in enumerate(self.blocks):
            x = block(x) + (carried if self.kind == "two tensors" else 0)
            if self.kind == "two tensors" or number == 0:
                carried = torch.tanh(x)
        return x + carried if self.kind == "skip" else x


def _train(kind: str, name: str) -> list[Any]:
    """Return losses, outputs and gradients of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    example = torch.randn(ROWS, 2, WIDTH)
    spec = {f"blocks.{number}": SplitPoint.BEGINNING for number in range(1, size)}
    stage = pipeline(Model(kind, size), mb_args=(example,), split_spec=spec).build_stage(
        rank, torch.device("cpu")
    )
    schedule = getattr(schedules, name)(stage, MICROBATCHES, loss_fn=compute_loss)
    found: list[Any] = []
    for step in range(STEPS):
        rows = torch.randn(
            MICROBATCHES * ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(step)
        )
        losses: list[Tensor] = []
        stage.submod.zero_grad()
        out = schedule.step(
            *((rows,) if rank == 0 else ()),
            target=rows if rank == size - 1 else None,
            losses=losses,
        )
        found += [[loss.detach() for loss in losses], None if out is None else out.detach()]
        found.append({key: param.grad.clone() for key, param in stage.submod.named_parameters()})
    return found


def _compare(
    names: list[tuple[str, str]],
) -> dict[tuple[str, str], tuple[list[str], dict[str, int], str]]:
    found = {}
    for name in names:
        stock = _train(*name)
        with ovpatch.applied("pipeline"):
            before = counters()
            changes = differences(stock, _train(*name))
            advance = {key: count - before[key] for key, count in counters().items()}
            found[name] = changes, advance, " ".join(feature_report().remarks)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_engine_runs_a_chain_of_traced_stages(ranks: Any, world: int) -> None:
    names = [
        ("one tensor", "Schedule1F1B"),
        ("two tensors", "Schedule1F1B"),
        ("one tensor", "ScheduleGPipe"),
    ]
    for rank, found in enumerate(ranks(world)(_compare, names)):
        for name, (changes, advance, remarks) in found.items():
            assert not changes, f"rank {rank}, {name}: {changes[:3]}"
            assert (advance["steps"], advance["stock_steps"]) == (STEPS, 0), (
                f"rank {rank}, {name}: {remarks}"
            )
            assert advance["messages"] == STEPS * MICROBATCHES * (
                (rank > 0) + (rank < world - 1)
            ), name


def test_torch_runs_traced_stages_with_a_skip_connection(ranks: Any) -> None:
    name = ("skip", "ScheduleGPipe")
    for rank, found in enumerate(ranks(3)(_compare, [name])):
        changes, advance, remarks = found[name]
        assert not changes, f"rank {rank}: {changes[:3]}"
        assert (advance["steps"], advance["stock_steps"]) == (0, STEPS)
        assert "a traced stage has skip connections" in remarks

"""One training step of a pipeline under stock schedules and under feature ``pipeline``, in one run.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.pipeline_step --json pipeline_step.jsonl

Arms alternate; each is built anew, warmed up and timed; the slowest rank counts. ``limit`` is the step of the slowest
rank without any wait: all of its microbatches one after the other, every rank alone with its own stage.
On gloo, choose a width whose F takes much longer than a message, and no more ranks than the machine has cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import ovpatch
from benchmarks.runs import device, start, timed

# Name of the arm: class, stages per rank, order of the feature or None for stock.
ARMS: dict[str, tuple[str, int, str | None]] = {
    "stock 1F1B": ("Schedule1F1B", 1, None),
    "1F1B, as given": ("Schedule1F1B", 1, "as-given"),
    "ZB-H1": ("Schedule1F1B", 1, "zb-h1"),
    "ZB-H2": ("Schedule1F1B", 1, "zb-h2"),
    "stock GPipe": ("ScheduleGPipe", 1, None),
    "GPipe, as given": ("ScheduleGPipe", 1, "as-given"),
    "stock Interleaved1F1B": ("ScheduleInterleaved1F1B", 2, None),
    "Interleaved1F1B, as given": ("ScheduleInterleaved1F1B", 2, "as-given"),
    "stock InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", 2, None),
    "InterleavedZeroBubble, as given": ("ScheduleInterleavedZeroBubble", 2, "as-given"),
    "stock ZBVZeroBubble": ("ScheduleZBVZeroBubble", 2, None),
    "ZBVZeroBubble, as given": ("ScheduleZBVZeroBubble", 2, "as-given"),
}


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def make_part(args: argparse.Namespace, chunks: int) -> nn.Module:
    """Return the module of a stage."""
    return nn.Sequential(*(Block(args.width) for _ in range(args.blocks // chunks))).to(device())


def build(args: argparse.Namespace, arm: tuple[str, int, str | None]) -> Any:
    """Return an arm's schedule."""
    name, chunks, _ = arm
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * chunks
    indices = [rank, count - 1 - rank] if name == "ScheduleZBVZeroBubble" else list(range(rank, count, size))
    stages = [PipelineStage(make_part(args, chunks), index, count, device()) for index in indices]
    cls = getattr(schedules, name)
    return cls(stages[0] if chunks == 1 else stages, args.microbatches, loss_fn=nn.functional.mse_loss)


def measure(args: argparse.Namespace, arm: tuple[str, int, str | None]) -> list[float]:
    """Return the times of an arm's steps in ms."""
    if arm[2] is not None:
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": arm[2]}})
    schedule = build(args, arm)
    rows = torch.randn(args.microbatches * args.rows, args.width, device=device())
    inputs = (rows,) if dist.get_rank() == 0 else ()

    def step() -> None:
        schedule.step(*inputs, target=rows, return_outputs=False)

    timed(step, 3)
    times = timed(step, args.steps)
    ovpatch.revert()
    return times


def measure_limit(args: argparse.Namespace) -> list[float]:
    """Return the times in ms in which each rank computes its microbatches without any message."""
    part = make_part(args, 1)
    x = torch.randn(args.rows, args.width, device=device(), requires_grad=True)

    def step() -> None:
        for _ in range(args.microbatches):
            part(x).square().mean().backward()

    timed(step, 1)
    return timed(step, args.steps)


def main() -> None:
    """Measure all arms and print their medians."""
    parser = argparse.ArgumentParser(description="Time a step of a pipeline, stock and patched.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="rows of a microbatch")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a rank")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start()
    times: dict[str, list[float]] = {"limit": []}
    for _ in range(args.rounds):
        times["limit"] += measure_limit(args)
        for name in args.arms:
            times.setdefault(name, []).extend(measure(args, ARMS[name]))
    if dist.get_rank() == 0:
        medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
        for name, median in medians.items():
            print(f"{name:32s} {median:9.1f} ms  {median / medians['limit']:.3f} of limit")
        if args.json is not None:
            facts = {key: value for key, value in vars(args).items() if isinstance(value, int)}
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"ranks": dist.get_world_size(), **facts, "ms": medians}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

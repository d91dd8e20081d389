"""Train a small decoder over a mesh of pipeline, data and tensor parallelism.

    OVPATCH=+pipeline torchrun --nproc-per-node 8 examples/three_d.py                     # 2 stages, 2 copies, 2 shards
    OVPATCH=+pipeline OVPATCH_PIPELINE_SCHEDULE=zb-h1 torchrun --nproc-per-node 8 examples/three_d.py
    OVPATCH=+pipeline torchrun --nproc-per-node 2 examples/three_d.py --dp 1 --tp 1      # a pipeline alone

It is written as people write such scripts: stock ``parallelize_module``, stock ``fully_shard``, a stock schedule of
``torch.distributed.pipelining``. The line of ovpatch after the imports is all that it adds.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ovpatch; ovpatch.apply()  # fmt: skip

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Stage(nn.Module):
    """The blocks of one stage; the first has the embedding, the last the head."""

    def __init__(self, args: argparse.Namespace, index: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, args.width) if index == 0 else None
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads) for _ in range(args.layers // args.pp)
        )
        self.head = nn.Linear(args.width, VOCABULARY) if index == args.pp - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def make_stage(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> PipelineStage:
    """Return this rank's stage, cut over ``tp`` and sharded over ``dp``."""
    index = mesh.get_local_rank("pp")
    torch.manual_seed(index)
    module = Stage(args, index).to(device)
    plan = {
        "q": ColwiseParallel(),
        "k": ColwiseParallel(),
        "v": ColwiseParallel(),
        "out": RowwiseParallel(),
    }
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in module.blocks:
        if args.tp > 1:
            parallelize_module(block, mesh["tp"], plan)
        if args.dp > 1:
            fully_shard(block, mesh=mesh["dp"])
    if args.dp > 1:
        fully_shard(module, mesh=mesh["dp"])
    return PipelineStage(module, index, args.pp, device, group=mesh.get_group("pp"))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next bytes."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small decoder over a mesh of three dimensions."
    )
    add = parser.add_argument
    add("--steps", type=int, default=20)
    add("--microbatches", type=int, default=8)
    add("--rows", type=int, default=2, help="sequences per microbatch")
    add("--context", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--pp", type=int, default=2, help="stages")
    add("--dp", type=int, default=2, help="copies")
    add("--tp", type=int, default=2, help="ranks that share a layer")
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss and the time of a step."""
    args = parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(
        device.type, (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp")
    )
    stage = make_stage(args, mesh, device)
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3, foreach=False)
    for step in range(args.steps):
        data = torch.Generator().manual_seed(1000 * step + mesh.get_local_rank("dp"))
        rows = torch.randint(
            VOCABULARY, (args.microbatches * args.rows, args.context + 1), generator=data
        ).to(device)
        # torch 2.11 checks the strides of inputs.
        inputs = (rows[:, :-1].contiguous(),) if stage.is_first else ()
        started, losses = time.perf_counter(), list[Tensor]()
        schedule.step(*inputs, target=rows[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if stage.is_last and mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 0:
            seconds = time.perf_counter() - started
            print(
                f"step {step}: loss {torch.stack(losses).mean():.4f}, {1000 * seconds:.0f} ms",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Transformer blocks under tensor and sequence parallelism, forward and backward: stock, compiled, and ``tp_linear``.

    torchrun --nproc-per-node 8 -m benchmarks.tp_blocks --size 8b --json benchmarks/results/tp_blocks.jsonl

One stack of blocks, cut by ``parallelize_module`` over all ranks, on random data in bf16. Arms alternate; each is
built again, warmed up and timed; the slowest rank counts. The arm ``limit`` is a rank's computation, without any
communication. ``graphed`` arms replay a CUDA graph of forward and backward. Without CUDA it runs on gloo
(``--size tiny``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ovpatch
from benchmarks.runs import CUDA, add_timing, alternate, clocked, device, graphed, start, timed

SIZES = {
    "8b": {"width": 4096, "heads": 32, "hidden": 14336, "layers": 8, "tokens": 8192},
    "70b": {"width": 8192, "heads": 64, "hidden": 28672, "layers": 4, "tokens": 8192},
    "gpt": {"width": 3072, "heads": 32, "hidden": 12288, "layers": 8, "tokens": 4096},
    "tiny": {"width": 64, "heads": 8, "hidden": 128, "layers": 2, "tokens": 64},
}

STOCK: dict[str, dict[str, Any]] = {
    "limit": {"limit": True},
    "stock": {},
    "stock, compiled": {"compile": True},
    "stock, compiled, micro pipeline": {"compile": True, "micro_pipeline": True},
    "stock, graphed": {"graph": True},
}
OURS: dict[str, dict[str, Any]] = {
    **{
        f"ovpatch, {name}": {"options": {"schedule": name}}
        for name in ("stock", "bulk", "ring", "fused")
    },
    "ovpatch, auto": {"options": {"schedule": "auto"}},
    "ovpatch, auto, graphed": {"options": {"schedule": "auto"}, "graph": True},
    **{f"ovpatch, chunk {n}": {"options": {"schedule": "chunk", "chunks": n}} for n in (2, 4)},
    "ovpatch, bulk, stock's gathers": {"options": {"schedule": "bulk", "shared_gather": False}},
    "ovpatch, bulk, regather": {"options": {"schedule": "bulk", "regather": True}},
    "ovpatch, bulk, compiled": {"options": {"schedule": "bulk", "compiled": True}, "compile": True},
    "ovpatch, bulk, graphed": {"options": {"schedule": "bulk"}, "graph": True},
    "ovpatch, fused, regather": {"options": {"schedule": "fused", "regather": True}},
    "ovpatch, fused, compiled": {
        "options": {"schedule": "fused", "compiled": True},
        "compile": True,
    },
    "ovpatch, fused, graphed": {"options": {"schedule": "fused"}, "graph": True},
    "ovpatch, chunk 2, graphed": {"options": {"schedule": "chunk", "chunks": 2}, "graph": True},
}
ARMS = STOCK | OURS


class Attention(nn.Module):
    """Causal self-attention; how many heads a rank has follows from its features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


class MLP(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Alone(nn.Module):
    """A block's computation on one rank: norms on its part of the sequence, linears on all of it."""

    def __init__(self, block: Block, world: int) -> None:
        super().__init__()
        self.block, self.world = block, world

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        block, part = self.block, x.shape[1]
        x = x + block.attention(block.norm1(x).repeat(1, self.world, 1))[:, :part]
        return x + block.mlp(block.norm2(x).repeat(1, self.world, 1))[:, :part]


def cut(block: Block, mesh: DeviceMesh, local: bool) -> None:
    """Cut a block as sequence-parallel plans do; ``local``: plain tensors between modules instead of DTensors."""
    sequence, replicated = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(replicated,))
    scattered = RowwiseParallel(output_layouts=sequence, use_local_output=local)
    plan: dict[str, Any] = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": gathered,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": scattered,
        "mlp": gathered,
        "mlp.up": ColwiseParallel(),
        "mlp.down": scattered,
    }
    parallelize_module(block, mesh, plan)


def shrink(block: Block, world: int) -> None:
    """Give each linear a rank's shard of its weight."""
    for name, dim in {"q": 0, "k": 0, "v": 0, "out": 1, "up": 0, "down": 1}.items():
        linear = getattr(block.attention if name in ("q", "k", "v", "out") else block.mlp, name)
        linear.weight = nn.Parameter(linear.weight.detach().chunk(world, dim)[0].contiguous())


def build(arm: dict[str, Any], args: argparse.Namespace, mesh: DeviceMesh) -> Callable[[], object]:
    """Return forward and backward of one arm."""
    size, world = SIZES[args.size], dist.get_world_size()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if CUDA else torch.float32
    made = []
    with torch.device(device()):
        given = torch.randn(
            args.batch, size["tokens"] // args.batch // world, size["width"], dtype=dtype
        )
        for _ in range(size["layers"]):
            block = Block(size["width"], size["heads"], size["hidden"]).to(dtype)
            shrink(block, world) if arm.get("limit") else cut(block, mesh, args.plain)
            made.append(block)
    blocks: list[Any] = [Alone(block, world) for block in made] if arm.get("limit") else list(made)
    if arm.get("compile"):
        blocks = [torch.compile(block, fullgraph=True) for block in blocks]
    params = [param for block in made for param in block.parameters()]
    distributed = not arm.get("limit") and not args.plain

    def step() -> None:
        x: Any = (
            DTensor.from_local(given, mesh, (Shard(1),), run_check=False)
            if distributed
            else given.detach()
        )
        x.requires_grad_()
        for block in blocks:
            x = block(x)
        (x.to_local() if distributed else x).float().mean().backward()
        for param in params:
            param.grad = None

    return graphed(step) if arm.get("graph") else step


@contextlib.contextmanager
def settings(arm: dict[str, Any], mesh: DeviceMesh) -> Iterator[None]:
    """Switch on the features of an arm."""
    with contextlib.ExitStack() as stack:
        if "options" in arm:
            stack.enter_context(ovpatch.applied("tp_linear", options={"tp_linear": arm["options"]}))
        if arm.get("micro_pipeline"):
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(mesh.get_group().group_name)
            stack.enter_context(torch._inductor.config.patch(_micro_pipeline_tp=True))
        yield


def measure(name: str, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Run one arm once."""
    step = None
    # The stream of a graph leaves workspaces of cuBLAS.
    before = torch.cuda.memory_allocated() if CUDA else 0
    try:
        with settings(ARMS[name], mesh):
            step = build(ARMS[name], args, mesh)
            found = clocked(step, args, timed, base_bytes=before)
    finally:
        del step
        torch._dynamo.reset()
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    return {"arm": name, **found}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--size", choices=SIZES, default="8b")
    made.add_argument("--arms", nargs="*", default=[*ARMS], choices=[*ARMS])
    made.add_argument("--batch", type=int, default=1, help="sequences, which share the tokens")
    made.add_argument(
        "--plain", action="store_true", help="plain tensors between modules instead of DTensors"
    )
    add_timing(made, rounds=2)
    return made


def main() -> None:
    """Run all arms and print a table on rank 0."""
    args = parser().parse_args()
    start()
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    arms = [arm for arm in args.arms if CUDA or not ARMS[arm].get("graph")]
    alternate("tp_blocks", arms, lambda name: measure(name, args, mesh), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

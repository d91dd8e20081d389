"""One tensor-parallel linear: all-gather and product, product and reduce-scatter, by all that can compute them.

    torchrun --nproc-per-node 8 -m benchmarks.tp_operators --shapes 8b 70b --json benchmarks/results/tp_operators.jsonl

Forward only, bf16, random data. Arms alternate; a step is ``--inner`` calls in sequence, of which the time of
one is reported; the slowest rank counts. ``graphed`` arms replay a CUDA graph of such a step; ``stock`` arms are
torch's styles, on DTensors. All arms except the limits, ``product`` and ``collective``, must compute the results of
cuBLAS and NCCL in sequence. ``--tp`` cuts features for more ranks than there are, so that a GEMM's share of the time is
as in a larger group. Without CUDA it runs on gloo (``--shapes tiny``).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# This import gives torch.ops.symm_mem its operators.
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.runs import (
    CUDA,
    add_timing,
    alternate,
    clocked,
    device,
    get_world,
    graphed,
    start,
    timed,
)
from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.schedules import parse_schedule

# Tokens, features outside, features between, over all ranks.
SHAPES = {
    "gpt": (4096, 3072, 12288),
    "8b": (8192, 4096, 14336),
    "70b": (8192, 8192, 28672),
    "8b, 1k tokens": (1024, 4096, 14336),
    "8b, 2k tokens": (2048, 4096, 14336),
    "8b, 16k tokens": (16384, 4096, 14336),
    "70b, 1k tokens": (1024, 8192, 28672),
    "70b, 2k tokens": (2048, 8192, 28672),
    "70b, 4k tokens": (4096, 8192, 28672),
    "70b, attention": (8192, 8192, 8192),
    "8b, attention": (8192, 4096, 4096),
    "tiny": (64, 32, 128),
}
LIMITS = ("product", "collective")
COMPILED = ("stock, compiled", "stock, compiled, micro pipeline")
Operator = Callable[[], Tensor]


class Linear:
    """A tensor-parallel linear; those that follow have ``product``, ``collective``, ``in_sequence`` and so on."""

    def __init__(self) -> None:
        self.group, self.world = get_world(), dist.get_world_size()
        self.mesh = DeviceMesh.from_group(self.group, device().type)
        self.ranks = tp_group.get_tp_group(self.group, device())
        self.draw = functools.partial(
            torch.randn, dtype=torch.bfloat16 if CUDA else torch.float32, device=device()
        )

    def sharded(self, local: Tensor, dim: int) -> DTensor:
        """Return a DTensor with a shard on this rank."""
        return DTensor.from_local(local, self.mesh, (Shard(dim),), run_check=False)

    def kernels(self, tiles: Any) -> Tensor:
        """Compute by the kernels of ``fused``, with tiles as given."""
        from ovpatch.overlap.kernels import symmetric_memory as memory

        found = self.launch(memory.get_workspace(self.group, device()), tiles)
        if found is None:
            raise RuntimeError("the workspace cannot be made")
        return found

    def launch(self, workspace: Any, tiles: Any) -> Tensor | None:
        """Launch the kernels of ``fused``; None where the workspace cannot be made."""
        raise NotImplementedError


class Gather(Linear):
    """All-gather, then GEMM.

    Args:
        tokens: Over all ranks.
        outside: Features of the input.
        between: Features of the output, of this rank.
    """

    method = "gather_linear"

    def __init__(self, tokens: int, outside: int, between: int) -> None:
        super().__init__()
        self.x, self.weight = (
            self.draw(tokens // self.world, outside),
            self.draw(between, outside) * outside**-0.5,
        )
        self.full, self.cut = self.draw(tokens, outside), self.sharded(self.weight, 0)

    def product(self) -> Tensor:
        """Multiply rows that are there already."""
        return self.full @ self.weight.t()

    def collective(self) -> Tensor:
        """Gather only."""
        dist.all_gather_into_tensor(self.full, self.x, group=self.group)
        return self.full

    def in_sequence(self) -> Tensor:
        """Gather by NCCL, then multiply by cuBLAS."""
        return self.collective() @ self.weight.t()

    def stock(self) -> Tensor:
        """Compute as a linear under ``ColwiseParallel`` does."""
        full = self.sharded(self.x, 0).redistribute(placements=(Replicate(),))
        # The stubs of torch do not know that this is a DTensor.
        product: Any = F.linear(full, self.cut)
        return product.to_local()

    def torch_fused(self) -> Tensor:
        """Compute by torch's operator on symmetric memory."""
        name = self.group.group_name
        (out,) = torch.ops.symm_mem.fused_all_gather_matmul(self.x, [self.weight.t()], 0, name)[1]
        return out

    def ours(self, schedule: str) -> Tensor:
        """Compute by a schedule of the feature."""
        (out,), _ = parse_schedule(schedule).gather_linear(
            self.ranks, self.x, [self.weight], [None], True
        )
        return out

    def launch(self, workspace: Any, tiles: Any) -> Tensor | None:
        """Launch the kernels of ``fused``."""
        from ovpatch.overlap.tensor_parallel import triton_launch as launch

        found = launch.gather_linear(workspace, self.x, [self.weight], [None], tiles=tiles)
        return None if found is None else found[0][0]


class Scatter(Linear):
    """GEMM, then reduce-scatter.

    Args:
        tokens: Over all ranks.
        outside: Features of the output.
        between: Features of the input, of this rank.
    """

    method = "linear_scatter"

    def __init__(self, tokens: int, outside: int, between: int) -> None:
        super().__init__()
        self.x, self.weight = (
            self.draw(tokens, between),
            self.draw(outside, between) * (between * self.world) ** -0.5,
        )
        self.terms, self.part = self.draw(tokens, outside), self.draw(tokens // self.world, outside)
        self.cut = self.sharded(self.weight, 1)

    def product(self) -> Tensor:
        """Multiply only."""
        return self.x @ self.weight.t()

    def collective(self) -> Tensor:
        """Reduce terms that are there already."""
        dist.reduce_scatter_tensor(self.part, self.terms, group=self.group)
        return self.part

    def in_sequence(self) -> Tensor:
        """Multiply by cuBLAS, then reduce by NCCL."""
        part = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(part, self.product(), group=self.group)
        return part

    def stock(self) -> Tensor:
        """Compute as a linear under ``RowwiseParallel`` does."""
        # The linear of a DTensor is a DTensor of partial sums.
        terms: Any = F.linear(self.sharded(self.x, 1), self.cut)
        return terms.redistribute(placements=(Shard(0),)).to_local()

    def torch_fused(self) -> Tensor:
        """Compute by torch's operator on symmetric memory."""
        name = self.group.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            self.x, self.weight.t(), "sum", 0, name
        )

    def ours(self, schedule: str) -> Tensor:
        """Compute by a schedule of the feature."""
        return parse_schedule(schedule).linear_scatter(self.ranks, self.x, self.weight)

    def launch(self, workspace: Any, tiles: Any) -> Tensor | None:
        """Launch the kernels of ``fused``."""
        from ovpatch.overlap.tensor_parallel import triton_launch as launch

        return launch.linear_scatter(workspace, [self.x], [self.weight], tiles=tiles)


OPERATORS = {"gather": Gather, "scatter": Scatter}


def variants(operator: Any) -> dict[str, Any]:
    """Return the tile settings of the kernels to try."""
    if not CUDA:
        return {}
    from ovpatch.overlap.tensor_parallel.triton_launch import Tiles

    found = {
        "128x128": Tiles(columns=128, stages=4),
        "128x256 in halves": Tiles(split=True, stages=4),
    }
    found |= {f"groups of {n}": Tiles(group=n) for n in (1, 16)}
    if isinstance(operator, Gather):
        found |= {f"{n} fetch": Tiles(pullers=n) for n in (12, 20, 32)}
    return found


def arms(operator: Any) -> dict[str, Operator]:
    """Return the timed functions by name."""
    ours = {
        f"ovpatch, {name}": functools.partial(operator.ours, name) for name in ("bulk", "fused")
    }
    eager: dict[str, Operator] = {
        "product": operator.product,
        "collective": operator.collective,
        "in sequence": operator.in_sequence,
        **ours,
    }
    peers = {
        "stock": operator.stock,
        "stock, compiled": torch.compile(operator.stock, fullgraph=True),
    }
    if not CUDA:
        return eager | peers
    peers |= {
        COMPILED[1]: torch.compile(operator.stock, fullgraph=True),
        "torch symm_mem": operator.torch_fused,
    }
    captured = {name: call for name, call in eager.items() if name != "ovpatch, bulk"}
    captured |= {
        f"kernels, {name}": functools.partial(operator.kernels, tiles)
        for name, tiles in variants(operator).items()
    }
    return eager | peers | {f"{name}, graphed": call for name, call in captured.items()}


@contextlib.contextmanager
def settings(name: str, group: Any) -> Iterator[None]:
    """Compile an arm again, as it demands."""
    if name not in COMPILED:
        yield
        return
    micro_pipeline = name == COMPILED[1]
    if micro_pipeline:
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    torch._dynamo.reset()
    with torch._inductor.config.patch(_micro_pipeline_tp=micro_pipeline):
        yield


def check(name: str, compute: Operator, operator: Any) -> None:
    """Check against cuBLAS and NCCL, up to rounding.

    Raises:
        RuntimeError: It is something else.
    """
    right, found = operator.in_sequence().float(), compute().float()
    worst = (right - found).norm() / right.norm()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not worst < 0.01:
        raise RuntimeError(f"{name} computes something else: it is off by {worst:.1%}")


def measure(name: str, operator: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm once."""
    with settings(name, operator.group):
        return _measured(name, arms(operator)[name], operator, args)


def _measured(
    name: str, compute: Operator, operator: Any, args: argparse.Namespace
) -> dict[str, Any]:
    if name.removesuffix(", graphed") not in LIMITS:
        check(name, compute, operator)

    def calls() -> None:
        for _ in range(args.inner):
            compute()

    step = graphed(calls) if name.endswith(", graphed") else calls
    found = clocked(step, args, timed)
    del step
    gc.collect()
    return {"arm": name, **found, "ms": [ms / args.inner for ms in found["ms"]]}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--shapes", nargs="*", choices=SHAPES, default=["8b"])
    made.add_argument("--operators", nargs="*", choices=OPERATORS, default=[*OPERATORS])
    made.add_argument("--tokens", type=int, help="instead of the shape's")
    made.add_argument(
        "--tp",
        type=int,
        help="over how many ranks features are cut; by default as many as there are",
    )
    made.add_argument("--inner", type=int, default=10, help="calls of a step")
    made.add_argument("--arms", nargs="*", help="by default all")
    add_timing(made, rounds=2)
    return made


def main() -> None:
    """Run all arms of operators and shapes, and print tables on rank 0."""
    args = parser().parse_args()
    start()
    torch.manual_seed(dist.get_rank())
    for shape, kind in itertools.product(args.shapes, args.operators):
        tokens, outside, between = SHAPES[shape]
        operator = OPERATORS[kind](
            args.tokens or tokens, outside, between // (args.tp or dist.get_world_size())
        )
        names = list(args.arms or arms(operator))
        if unknown := set(names) - set(arms(operator)):
            raise SystemExit(
                f"unknown arms {sorted(unknown)}: choose from {', '.join(arms(operator))}"
            )
        given = argparse.Namespace(**{**vars(args), "shapes": shape, "operators": kind})
        if dist.get_rank() == 0:
            print(f"\n{kind}, {shape}")
        alternate(
            "tp_operators", names, functools.partial(measure, operator=operator, args=args), given
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Host time of one tensor-parallel linear: ``F.linear``, the styles of torch, and ``tp_linear``.

    torchrun --nproc-per-node 2 -m benchmarks.tp_host --json benchmarks/results/tp_host.json

Tiny activations, so that the host is the limit: a block of calls is timed, with a wait for the device before and
after it. ``fused`` is the feature with that schedule, where its kernels can run; ``bare`` is the feature with
collectives that are not launched; ``over`` is the cost over ``F.linear``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import ovpatch
from benchmarks.runs import CUDA, described, device, start
from ovpatch.overlap.comm.collectives import WorkGroup

WIDTH, ROWS = 256, 16

KINDS: dict[str, tuple[Callable[..., ParallelStyle], dict[str, Any]]] = {
    "column, gathers": (ColwiseParallel, {"input_layouts": Shard(0)}),
    "column, replicated": (ColwiseParallel, {}),
    "row, scatters": (RowwiseParallel, {"output_layouts": Shard(0)}),
    "row, reduces": (RowwiseParallel, {}),
}


def per_call(function: Callable[[], object], rounds: int, calls: int = 50) -> float:
    """Return the median over blocks of calls of the host's time per call, in µs."""
    times = []
    for _ in range(rounds + 2):
        if CUDA:
            torch.cuda.synchronize()
        dist.barrier()
        if CUDA:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    return statistics.median(times[2:])


def linear(kind: str, mesh: DeviceMesh) -> tuple[nn.Linear, Tensor]:
    """Return a linear that is cut, and an input for it."""
    made, layouts = KINDS[kind]
    cut = nn.Linear(WIDTH, WIDTH, bias=False, device=device(), dtype=torch.bfloat16)
    parallelize_module(cut, mesh, made(**layouts))
    world = mesh.size()
    shape = {"column, gathers": (ROWS // world, WIDTH), "column, replicated": (ROWS, WIDTH)}
    x = torch.randn(*shape.get(kind, (ROWS, WIDTH // world)), device=device(), dtype=torch.bfloat16)
    return cut, x.requires_grad_()


@contextlib.contextmanager
def not_launched() -> Iterator[None]:
    """Let the feature's collectives do nothing."""
    from ovpatch.overlap.tensor_parallel import tp_group

    done = WorkGroup(())

    def all_gather(self: Any, rows: Tensor) -> Any:
        return rows.new_empty((self.world * rows.shape[0], rows.shape[1])), done

    def reduce_scatter(self: Any, rows: Tensor) -> Any:
        return rows.new_empty((rows.shape[0] // self.world, rows.shape[1])), done

    with (
        patch.object(tp_group.TPGroup, "all_gather", all_gather),
        patch.object(tp_group.TPGroup, "reduce_scatter", reduce_scatter),
        patch.object(tp_group.TPGroup, "all_reduce", lambda self, rows: done),
    ):
        yield


def measured(mesh: DeviceMesh, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of linear, with and without gradients."""
    world = mesh.size()
    for kind in KINDS:
        weight = torch.randn(WIDTH, WIDTH, device=device(), dtype=torch.bfloat16)
        columns = kind.startswith("column")
        weight = (
            (weight[: WIDTH // world] if columns else weight[:, : WIDTH // world])
            .contiguous()
            .requires_grad_()
        )
        x = torch.randn(
            ROWS, weight.shape[1], device=device(), dtype=torch.bfloat16, requires_grad=True
        )
        for grads in (True, False):
            row: dict[str, Any] = {"kind": kind, "grad": grads}
            with torch.set_grad_enabled(grads):
                row["F.linear"] = per_call(functools.partial(F.linear, x, weight), rounds)
                cut, given = linear(kind, mesh)
                row["stock"] = per_call(functools.partial(cut, given), rounds)
                with ovpatch.applied("tp_linear"):
                    cut, given = linear(kind, mesh)
                    row["ovpatch"] = per_call(functools.partial(cut, given), rounds)
                    with not_launched():
                        row["bare"] = per_call(functools.partial(cut, given), rounds)
                with ovpatch.applied("tp_linear", options={"tp_linear": {"schedule": "fused"}}):
                    cut, given = linear(kind, mesh)
                    row["fused"] = per_call(functools.partial(cut, given), rounds)
            row["over"] = row["bare"] - row["F.linear"]
            yield {
                name: round(value, 1) if isinstance(value, float) else value
                for name, value in row.items()
            }


def main() -> None:
    """Print a table and write the raw result on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start()
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows = list(measured(mesh, args.rounds))
    if dist.get_rank() == 0:
        columns = ["F.linear", "stock", "ovpatch", "fused", "bare", "over"]
        print(f"{'µs per forward':20} {'grad':5}" + "".join(f"{column:>10}" for column in columns))
        for row in rows:
            print(
                f"{row['kind']:20} {row['grad']!s:5}"
                + "".join(f"{row[column]:>10}" for column in columns)
            )
        if args.json:
            args.json.write_text(
                json.dumps(described("tp_host", {"rounds": args.rounds}) | {"rows": rows}, indent=1)
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

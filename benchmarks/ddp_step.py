"""One training step of torch's DistributedDataParallel and of feature ``ddp``, in one run.

    torchrun --nproc-per-node 8 -m benchmarks.ddp_step --size 3.8b --rounds 2 --json benchmarks/results/ddp_step.json

Arms alternate (A B C A B C …); each is built again, warmed up and timed; the slowest rank counts.
Stock runs with several bucket sizes and with gradient_as_bucket_view, so that its best is in the table. The arm
``no sync`` is the same step without any gradient communication. Without CUDA it runs on gloo (use ``--size tiny``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks.models import GPT, SIZES, flops_per_step
from benchmarks.peaks import PEAK_TFLOPS
from benchmarks.runs import CUDA, described, device, merged, start, timed
from ovpatch.overlap.comm.step_flags import PERIOD_STEPS

ARMS: dict[str, dict[str, Any]] = {
    "no sync": {"sync": False},
    "stock": {},
    "stock, bucket view": {"gradient_as_bucket_view": True},
    "stock, bucket view, 50 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 50},
    "stock, bucket view, 100 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 100},
    "stock, bucket view, 200 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 200},
    "stock, bucket view, 400 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 400},
    "ovpatch": {"patched": True},
    "ovpatch, 25 MiB": {"patched": True, "bucket_cap_mb": 25},
    "ovpatch, 50 MiB": {"patched": True, "bucket_cap_mb": 50},
    "ovpatch, 100 MiB": {"patched": True, "bucket_cap_mb": 100},
    "ovpatch, 200 MiB": {"patched": True, "bucket_cap_mb": 200},
    "ovpatch, 400 MiB": {"patched": True, "bucket_cap_mb": 400},
    "ovpatch, layer": {"patched": True, "options": {"bucket_granularity": "layer"}},
    "ovpatch, divide first": {"patched": True, "options": {"average_in_collective": False}},
    "ovpatch, max_ctas 8": {"patched": True, "options": {"max_ctas": 8}},
    "ovpatch, max_ctas 12": {"patched": True, "options": {"max_ctas": 12}},
    "ovpatch, max_ctas 16": {"patched": True, "options": {"max_ctas": 16}},
    "ovpatch, no overlap": {"patched": True, "options": {"overlap_grad_reduce": False}},
}


def build(arm: dict[str, Any], args: argparse.Namespace) -> tuple[Callable[[], None], GPT]:
    """Build model and optimizer for one arm; return its training step."""
    torch.manual_seed(0)
    with torch.device(device()):
        model = GPT(**SIZES[args.size])
    kwargs = {k: v for k, v in arm.items() if k in ("gradient_as_bucket_view", "bucket_cap_mb")}
    wrapped = DistributedDataParallel(
        model, device_ids=[device().index] if CUDA else None, **kwargs
    )
    trained = torch.compile(wrapped) if args.compile else wrapped
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=CUDA)
    shape = (args.batch, SIZES[args.size]["context"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = (
        torch.randint(0, SIZES[args.size]["vocabulary"], shape, generator=generator).to(device())
        for _ in range(2)
    )

    def step() -> None:
        for micro in range(args.accumulate):
            quiet = not arm.get("sync", True) or micro < args.accumulate - 1
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                with torch.autocast(device().type, dtype=torch.bfloat16, enabled=not args.fp32):
                    loss = trained(tokens, targets)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


@contextlib.contextmanager
def patched(arm: dict[str, Any]) -> Iterator[None]:
    """Turn feature ``ddp`` on if the arm wants it."""
    if not arm.get("patched"):
        yield
        return
    with ovpatch.applied("ddp", options={"ddp": arm.get("options", {})}):
        yield


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm once."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with patched(ARMS[name]):
        step, model = build(ARMS[name], args)
        first = timed(step, args.warmup)
        times = timed(step, args.steps)
        context = SIZES[args.size]["context"]
        flops = flops_per_step(model, args.batch * args.accumulate * context, context)
        peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
        del step, model
        if args.compile:
            # Otherwise the last arms reach the recompile limit of Dynamo and run eagerly.
            torch._dynamo.reset()
        gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    return {"arm": name, "ms": times, "first_ms": first, "peak_gib": peak, "flops": flops}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rounds of each arm: median and worst step time, peak memory, TFLOP/s per device and MFU."""
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name()) if CUDA else None
    found = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        merged_row = merged(rows, name)
        tflops = mine[0]["flops"] / merged_row["median_ms"] / 1e9
        steady = len(mine[0]["first_ms"]) * merged_row["median_ms"]
        found.append(
            {
                **merged_row,
                "tflops": round(tflops, 1),
                "mfu": round(tflops / peak, 3) if peak else None,
                # The warm-up steps take this beyond as many steady ones: compilation, communicators, first buckets.
                "start_ms": round(min(sum(row["first_ms"]) for row in mine) - steady, 1),
            }
        )
    return found


def main() -> None:
    """Run all arms and print a table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--batch", type=int, default=4, help="sequences per device and microbatch")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=PERIOD_STEPS + 4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fp32", action="store_true", help="no autocast")
    parser.add_argument(
        "--json", type=Path, help="append the result to this file, one JSON object a line"
    )
    args = parser.parse_args()
    start()
    rows = []
    for _ in range(args.rounds):
        for name in args.arms:
            rows.append(measure(name, args))
            if dist.get_rank() == 0:
                print(f"{name:32} {statistics.median(rows[-1]['ms']):9.2f} ms", flush=True)
    if dist.get_rank() == 0:
        report(args, summary(rows), rows)
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, found: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> None:
    """Print the table and append the raw result."""
    columns = ["median_ms", "worst_ms", "peak_gib", "tflops", "mfu", "start_ms"]
    print(f"\n{'arm':32}" + "".join(f"{column:>11}" for column in columns))
    for row in found:
        print(f"{row['arm']:32}" + "".join(f"{row[column]!s:>11}" for column in columns))
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "arms")}
        with args.json.open("a") as file:
            file.write(
                json.dumps({**described("ddp_step", settings), "summary": found, "rows": rows})
                + "\n"
            )


if __name__ == "__main__":
    main()

"""Shared parts of benchmarks: the device, the timing of steps, and the description of a run in results."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ovpatch
from ovpatch.overlap.comm.step_flags import PERIOD_STEPS
from ovpatch.overlap.kernels import autotuner

CUDA = torch.cuda.is_available()

# Variables that change the measurement.
_MATTERING = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_", "OVPATCH")


def start() -> None:
    """Join the process group, over NCCL where there are GPUs."""
    if CUDA:
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=device() if CUDA else None)


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


def get_world() -> dist.ProcessGroup:
    """Return the default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Return the times of ``steps`` steps in ms, each from standstill to standstill; those of the slowest rank."""
    times = []
    for _ in range(steps):
        if CUDA:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        step()
        if CUDA:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return _max_over_ranks(times)


def running(step: Callable[[], object], steps: int) -> list[float]:
    """Return the times of ``steps`` steps in ms as they follow each other in training; those of the slowest rank.

    There is no wait between steps, so that pending work of one overlaps the next; the step before is not timed.
    """
    if not CUDA:
        return timed(step, steps)
    torch.cuda.synchronize()
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for mark in marks:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    return _max_over_ranks(times)


def clocked(
    step: Callable[[], object],
    args: argparse.Namespace,
    how: Callable[[Callable[[], object], int], list[float]],
    *,
    base_bytes: int = 0,
) -> dict[str, Any]:
    """Warm a step up, and return its times and its peak of memory.

    Args:
        step: What is measured.
        args: With the options of :func:`add_timing`.
        how: :func:`timed` or :func:`running`.
        base_bytes: Bytes that were allocated before and do not belong to the step.
    """
    timed(step, args.warmup)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times = how(step, args.steps)
    return {
        "ms": times,
        "peak_gib": (torch.cuda.max_memory_allocated() - base_bytes) / 2**30 if CUDA else 0.0,
    }


def _max_over_ranks(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, device=device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def graphed(step: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    # The graph reads the tensors of the step that was captured.
    def replay(of: Callable[[], object] = step) -> None:
        graph.replay()

    return replay


def merged(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Merge the rounds of one arm: its median, each round's, the worst step time, and the peak of memory."""
    mine = [row for row in rows if row["arm"] == name]
    times = [ms for row in mine for ms in row["ms"]]
    return {
        "arm": name,
        "median_ms": round(statistics.median(times), 2),
        "round_medians_ms": [round(statistics.median(row["ms"]), 2) for row in mine],
        "worst_ms": round(max(times), 2),
        "peak_gib": round(max(row["peak_gib"] for row in mine), 3),
    }


def described(
    benchmark: str, settings: dict[str, Any], *, world: int = 0, device: str = ""
) -> dict[str, Any]:
    """Return the description of the run in a result.

    Args:
        benchmark: Its name.
        settings: Its settings.
        world: The number of ranks. Default: that of the process group.
        device: The name of the device. Default: that of this process, which then has memory on the device.
    """
    if not device:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv[1:]),
        "world": world or dist.get_world_size(),
        "device": device,
        "torch": torch.__version__,
        "ovpatch": ovpatch.__version__,
        "settings": settings,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_MATTERING)
        },
    }


def add_timing(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Add the options of how often is run and timed, and where the result goes."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--warmup",
        type=int,
        default=PERIOD_STEPS + 4,
        help="steps before the timed ones; in its first steps, ddp waits for what ranks agree on",
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--arm-timeout",
        type=float,
        default=900,
        help="seconds; a rank that hangs prints its stacks",
    )
    parser.add_argument(
        "--json", type=Path, help="append the result to this file, one JSON object a line"
    )


def _chooses(arm: str) -> bool:
    return "auto" in arm.split(", ")


def alternate(
    benchmark: str,
    arms: Sequence[str],
    measure: Callable[[str], dict[str, Any]],
    args: Any,
    *,
    chooses: Callable[[str], bool] = _chooses,
) -> None:
    """Run all arms in turn, ``args.rounds`` times, and report on rank 0.

    Those that ``chooses`` says choose by measurement run once before: their races leave a GPU so hot that for seconds
    it computes some percent slower, which the other arms would not share.
    """
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}

    def run(name: str) -> None:
        if dist.get_rank() == 0:
            # The name appears before the result, so that the output shows an arm that hangs.
            print(f"{name:36}", end=" ", flush=True)
        faulthandler.dump_traceback_later(args.arm_timeout, exit=True)
        started = time.perf_counter()
        try:
            rows.append(measure(name))
        except (
            RuntimeError,
            ValueError,
            AssertionError,
            ImportError,
        ) as error:
            # It is a result as well that a peer cannot run an arm.
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            found = failed.get(name) or f"{statistics.median(rows[-1]['ms']):9.3f} ms"
            print(f"{found}   ({time.perf_counter() - started:.0f} s)", flush=True)

    for name in filter(chooses, arms):
        run(name)
    rows.clear()
    for _ in range(args.rounds):
        for name in [arm for arm in arms if arm not in failed]:
            run(name)
    if dist.get_rank() == 0:
        report(benchmark, args, rows, failed)


def report(
    benchmark: str, args: argparse.Namespace, rows: list[dict[str, Any]], failed: dict[str, str]
) -> None:
    """Print a table of all arms, and append the raw result to ``args.json``, one JSON object a line."""
    columns = ["median_ms", "worst_ms", "peak_gib"]
    found = [merged(rows, name) for name in dict.fromkeys(row["arm"] for row in rows)]
    print(f"\n{'arm':36}" + "".join(f"{column:>11}" for column in columns))
    for row in found:
        print(f"{row['arm']:36}" + "".join(f"{row[column]!s:>11}" for column in columns))
    chosen = [
        line
        for feature in ("dist_optimizer", "tp_linear", "pipe_experts")
        for line in autotuner.report_lines(feature)
    ]
    print("".join(f"\nchosen: {line}" for line in chosen))
    if args.json:
        hidden = ("json", "arms", "profile", "profiled")
        given = {k: v for k, v in vars(args).items() if k not in hidden}
        result = {
            **described(benchmark, given),
            "summary": found,
            "failed": failed,
            "chosen": chosen,
            "rows": rows,
        }
        with args.json.open("a") as file:
            file.write(json.dumps(result) + "\n")

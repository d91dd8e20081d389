"""Run the rows of the result tables sequentially, the most wanted first, within a limit of time.

    python -m benchmarks.suite                               # on all GPUs: each feature once, in at most 9 minutes
    python -m benchmarks.suite zero_step tp_blocks --minutes 30     # all rows of two tables
    python -m benchmarks.suite --list zero_step                     # what there is

Results are appended to benchmarks/results/*.jsonl. Each row is one call of a benchmark under torchrun. After a row that
fails or is ended, the next row runs. The row's output is in ``LOGS/<number>.log``, and the exit status is the number of
missing rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.tables import RESULTS, ROOT

# The time in which an interrupted row writes its stacks and exits.
_EXIT_TIMEOUT_S = 15


@dataclass(frozen=True)
class Row:
    """One call of a benchmark.

    Attributes:
        benchmark: Its module.
        arguments: Its command line.
        world: Number of processes; by default as many as the suite is given.
        env: Variables that are set for it.
        least: The smallest number of processes that it makes sense for, or whose memory it fits into.
    """

    benchmark: str
    arguments: str = ""
    world: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    least: int = 1

    def command(self, world: int, results: Path) -> list[str]:
        """Return the command of the benchmark."""
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world}",
        ]
        file = results / f"{self.benchmark}.jsonl"
        return [
            *torchrun,
            "-m",
            f"benchmarks.{self.benchmark}",
            *shlex.split(self.arguments),
            f"--json={file}",
        ]

    def describe(self, world: int) -> str:
        """Return the command for the reader."""
        variables = [f"{name}={value}" for name, value in self.env.items()]
        return " ".join(
            [*variables, self.benchmark, self.arguments, f"({self.world or world} processes)"]
        )


_STEPS = "'limit, fp32' stock 'stock, bucket view' 'stock, bucket view, 400 MiB' 'ovpatch, no overlap' ovpatch"
_LOW_PRECISION_ARMS = (
    "'limit, bf16' 'limit, bf16 linears' 'FSDP2, ZeRO-2' Megatron-Core 'ovpatch, bf16 weights'"
)
_FEW = "'limit, fp32' 'stock, bucket view' 'FSDP2, ZeRO-2' ovpatch"
_TUNED = (
    "ovpatch 'ovpatch, NCCL' 'ovpatch, copy engines' 'ovpatch, gradients kept' "
    "'ovpatch, gather 128 MiB' 'ovpatch, gather 256 MiB' 'ovpatch, bucket 100 MiB' 'ovpatch, "
    "bucket 200 MiB' "
    "'ovpatch, max_ctas 8' 'ovpatch, max_ctas 16'"
)
_DATA_PARALLEL = (
    "'limit, fp32' stock 'stock, bucket view' 'FSDP2, ZeRO-2' 'ovpatch, ddp alone' ovpatch"
)
_BLOCKS = "limit stock 'stock, compiled' 'ovpatch, bulk' 'ovpatch, ring' 'ovpatch, auto'"
SHORT: list[Row] = [
    Row("zero_step", f"--size 3.8b --rounds 2 --arms {_DATA_PARALLEL}", least=8),
    Row("zero_step", f"--size 1b --rounds 3 --arms {_DATA_PARALLEL}", least=2),
    Row("pipeline_step", "--rounds 2 --warmup 3 --steps 4", least=2),
    Row("pipeline_step", "--rounds 3 --steps 4", world=1),
    Row("zero_step", f"--size 1b --rounds 2 --compile blocks --arms {_DATA_PARALLEL}", least=2),
    Row("collective_race", "--operation all-gather", least=2),
    Row("collective_race", "--operation reduce-scatter", least=2),
    Row("tp_blocks", f"--size 8b --rounds 2 --arms {_BLOCKS}", least=2),
    Row("moe_layer", "--shape qwen3 --backward --rounds 2", least=2),
    Row(
        "zero_step",
        f"--size 1b --accumulate 16 --steps 2 --rounds 2 --arms {_DATA_PARALLEL}",
        least=2,
    ),
    Row("zero_alone", "--size 1b --rounds 5", world=1),
    Row("zero_alone", "--size 1b --rounds 5 --compile blocks", world=1),
]
SUITE: dict[str, list[Row]] = {
    "zero_step": [
        Row("zero_step", f"--size 3.8b --arms {_STEPS} {_LOW_PRECISION_ARMS}"),
        Row("zero_step", f"--size 3.8b --rounds 1 --arms {_TUNED}"),
        Row(
            "zero_step", f"--size 1b --arms {_STEPS} ZeroRedundancyOptimizer {_LOW_PRECISION_ARMS}"
        ),
        Row("zero_step", f"--size 3.8b --clip 1.0 --arms {_FEW}"),
        Row(
            "zero_step",
            f"--size 3.8b --accumulate 16 --steps 4 --rounds 1 --arms {_FEW} Megatron-Core",
        ),
        Row("zero_step", f"--size 3.8b --compile blocks --rounds 1 --arms {_FEW}"),
        Row("zero_step", f"--size 3.8b --compile model --rounds 1 --arms {_FEW}"),
        Row("zero_step", f"--size 1b --arms {_FEW}", env={"NCCL_P2P_DISABLE": "1"}),
        *(
            Row("zero_step", f"--size 3.8b --rounds 1 --arms {_FEW}", world=world)
            for world in (4, 2, 1)
        ),
    ],
    "tp_blocks": [
        Row("tp_blocks", "--size 8b"),
        Row("tp_blocks", "--size 70b"),
        Row("tp_blocks", "--size gpt"),
        Row("tp_blocks", "--size 8b --plain"),
    ],
    "tp_operators": [
        Row("tp_operators", "--shapes 8b 70b gpt"),
        Row(
            "tp_operators",
            "--shapes '8b, 2k tokens' '8b, 16k tokens' '70b, 2k tokens' '70b, 4k tokens'",
        ),
        Row(
            "tp_operators",
            "--shapes '8b, 1k tokens' '70b, 1k tokens' '70b, attention' '8b, attention'",
        ),
        *(
            Row("tp_operators", "--shapes 8b 70b gpt '8b, 1k tokens' '8b, 16k tokens'", world=world)
            for world in (4, 2)
        ),
    ],
    "pipeline_step": [
        Row("pipeline_step", "--rounds 3", least=2),
        Row("pipeline_step", "--microbatches 32 --steps 4 --rounds 1", least=2),
        Row("pipeline_step", "--rounds 5", world=1),
    ],
    "megatron_step": [
        Row("megatron_step", "--tp 2", least=2),
        Row("megatron_step", "--tp 2 --pp 4 --microbatches 16", least=8),
        Row("megatron_step", "--tp 1 --pp 4 --microbatches 16 --arms stock 1f1b zb-h1", least=4),
        Row("megatron_step", "--linear", world=2, least=2),
    ],
    "ablation": [
        Row("ablation", "--size 8b --tp 4"),
        Row("ablation", "--size 3.8b --tp 4"),
        Row("ablation", "--size 8b --tp 4 --dtype fp32 --rounds 1"),
    ],
    "moe_layer": [
        *(
            Row("moe_layer", f"--shape {shape} --backward")
            for shape in ("dsv3", "qwen3", "mixtral")
        ),
        *(Row("moe_layer", f"--shape {shape}") for shape in ("dsv3", "qwen3", "mixtral")),
        *(
            Row("moe_layer", f"--shape {shape} --backward --skew 4")
            for shape in ("dsv3", "qwen3", "mixtral")
        ),
        *(
            Row("moe_layer", f"--shape {shape} --backward --tokens 2048 --rounds 2")
            for shape in ("dsv3", "qwen3")
        ),
    ],
}


def run(row: Row, number: int, world: int, results: Path, logs: Path, seconds: float) -> str:
    """Run a row.

    Args:
        row: What to run.
        number: Of the row, for its log.
        world: Number of processes, unless the row has its own.
        results: Folder of the benchmarks' results.
        logs: Where its output goes.
        seconds: When to cut it off.

    Returns:
        What went wrong, or "".
    """
    log = logs / f"{number:02}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            row.command(row.world or world, results), cwd=ROOT, env={**os.environ, **row.env},
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    if status is None:
        return f"cut off after {seconds:.0f} s, see {log}"
    return f"ended with status {status}, see {log}" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and all that it has started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        # Workers may outlive their launcher.
        os.killpg(process.pid, signal.SIGKILL)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "benchmarks", nargs="*", choices=[[], *SUITE], help="all rows of these", metavar="BENCHMARK"
    )
    gpus = torch.cuda.device_count()
    made.add_argument(
        "--nproc",
        type=int,
        default=gpus or 8,
        help="processes of the rows that do not say it, one a GPU",
    )
    made.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="start nothing later, and cut off what still runs",
    )
    made.add_argument(
        "--row-minutes", type=float, default=10.0, help="cut off a row that takes longer"
    )
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--logs", type=Path, default=ROOT / ".suite")
    made.add_argument(
        "--rows", nargs="*", type=int, help="only these, by the numbers that --list shows"
    )
    made.add_argument("--list", action="store_true", help="show the rows and end")
    return made


def main() -> int:
    """Run the chosen rows, and report the outcome of each."""
    args = parser().parse_args()
    rows = [row for name in args.benchmarks for row in SUITE[name]] or SHORT
    rows = [row for row in rows if row.least <= args.nproc]
    wanted = [(n, row) for n, row in enumerate(rows) if args.rows is None or n in args.rows]
    if args.list:
        print("\n".join(f"{number:3}  {row.describe(args.nproc)}" for number, row in wanted))
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    end, missing = time.monotonic() + 60 * args.minutes, 0
    for number, row in wanted:
        begin = time.monotonic()
        left = min(end - begin, 60 * args.row_minutes)
        wrong = (
            run(row, number, args.nproc, args.results, args.logs, left)
            if left > 0
            else "no time left"
        )
        missing += bool(wrong)
        print(
            f"{number:3}  {time.monotonic() - begin:5.0f} s  {wrong or 'ok':40}  "
            f"{row.describe(args.nproc)}",
            flush=True,
        )
    return min(missing, 125)


if __name__ == "__main__":
    sys.exit(main())

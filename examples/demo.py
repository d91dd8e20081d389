"""Train ``train_gpt.py`` stock and patched, and put the two side by side: what ``make demo`` runs.

    python examples/demo.py [--steps N] [--nproc N] [--quick] [--features LIST]

The first run has ``OVPATCH=0`` in its environment, the second is started by ``ovpatch run``; the script, its arguments
and its seed are the same. Two processes on the CPU with gloo, or one process per GPU with NCCL where there are at
least two GPUs.

Exits with 1 and the reason if a run failed, the losses disagree, a worker was not patched, or the feature never ran.
Losses and gradient norms must be bitwise equal on two ranks. On more ranks a sum depends on its order, which depends on
the buckets; there a third run, stock with other buckets, shows how much that is worth, and twice as much is allowed.

With ``--features=+dist_optimizer`` each process keeps its part of the optimizer's state only. Gradient norms are summed
from parts then and differ in the last bit, so nothing is clipped by them in either run, and only losses have to be
bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ovpatch.session.report_table import summarise_report

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_gpt.py"
OUT = ROOT / ".demo"
FEATURE = "ddp"
MAX_GPUS = 8
# A run without a new step for this time has hung.
STALL_S = 300.0
# Smaller differences are no failure on more than two ranks.
FLOOR = 1e-6
BY_PARTS = "dist_optimizer"
# The relative difference of a norm that is summed from parts.
LAST_BITS = 1e-5
TINY = ["--layers=2", "--width=128", "--heads=4"]
MUST_COUNT = ("models", "backwards", "collectives", "collectives_in_backward", "bytes_reduced")
ON_GPU = ["--batch-size=32", "--context=256", "--dtype=bfloat16", "--deterministic"]

Record = Mapping[str, float]
Advance = Callable[[int, str], None]


@dataclass
class Run:
    """One training run: how it was started and what came of it."""

    name: str
    command: list[str]
    records: list[Record] = field(default_factory=list)
    returncode: int = 0
    output: str = ""
    seconds: float = 0.0


# --- running -------------------------------------------------------------------------------------------------------


@contextmanager
def progress(console: Console, name: str, steps: int) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere a line for each tenth of the steps. Yields what to call with (done, note)."""
    if not console.is_terminal:
        console.print(f"{name}: starting")
        shown = 0

        def line(done: int, note: str) -> None:
            nonlocal shown
            if done * 10 // steps > shown:
                shown = done * 10 // steps
                console.print(f"{name}: {done}/{steps} steps, {note}")

        yield line
        return
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task(name, total=steps, note="starting")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def read_log(log: Path) -> list[Record]:
    """Return the finished lines of a log that is perhaps still being written."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def follow(process: subprocess.Popen[bytes], log: Path, advance: Advance) -> bool:
    """Show progress until the process ends; return False if it stopped getting on."""
    seen, latest = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        records = read_log(log)
        if len(records) > seen:
            seen, latest = len(records), time.monotonic()
            advance(seen, f"loss {records[-1]['loss']:.4f}")
        elif time.monotonic() - latest > STALL_S:
            return False
    records = read_log(log)
    if records:
        advance(len(records), f"loss {records[-1]['loss']:.4f}")
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run: torchrun ends its workers on SIGTERM."""
    if process.poll() is not None:
        return
    # Only the first process gets the signal and hands it to its workers. A second signal would disturb torchrun.
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def train(
    name: str, command: Sequence[str], env: Mapping[str, str], steps: int, console: Console
) -> Run:
    """Run a command that trains; its standard streams go to ``.demo/NAME.out``, its steps to ``.demo/NAME.jsonl``."""
    log, out = OUT / f"{name}.jsonl", OUT / f"{name}.out"
    log.unlink(missing_ok=True)
    run = Run(name, [*command, f"--log-file={log}"])
    started = time.monotonic()
    with out.open("wb") as file, progress(console, name, steps) as advance:
        process = subprocess.Popen(
            run.command,
            env={**env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            finished = follow(process, log, advance)
        finally:
            end(process)
    run.seconds = time.monotonic() - started
    run.records, run.output, run.returncode = (
        read_log(log),
        out.read_text(errors="replace"),
        process.returncode,
    )
    if not finished:
        run.returncode = 1
        run.output += f"\nNo new step for {STALL_S:.0f} s: the run hung and was ended.\n"
    return run


def read_report(file: Path) -> dict[str, Any]:
    """Return the report that ``ovpatch run`` wrote, or an empty one."""
    return json.loads(file.read_text()) if file.exists() else {}


# --- judging -------------------------------------------------------------------------------------------------------


def check_run(run: Run, steps: int) -> list[str]:
    """Return the faults of a run by itself."""
    if run.returncode != 0:
        tail = "\n    ".join(run.output.strip().splitlines()[-25:])
        return [
            f"the {run.name} run failed with exit status {run.returncode}; its last lines:\n    "
            f"{tail}"
        ]
    if len(run.records) != steps:
        return [f"the {run.name} run logged {len(run.records)} steps instead of {steps}"]
    return []


def largest_difference(a: Run, b: Run, key: str) -> float:
    """Return the largest difference over all steps; infinite if a value is not finite in one of the runs only."""
    pairs = [(x[key], y[key]) for x, y in zip(a.records, b.records, strict=True)]
    gaps = [0.0 if x == y or (x != x and y != y) else abs(x - y) for x, y in pairs]
    return max(float("inf") if gap != gap else gap for gap in gaps)


def check_losses(
    stock: Run, patched: Run, reordered: Run | None = None, *, by_parts: bool = False
) -> list[str]:
    """Return how the patched run differs from the stock one by more than it may."""
    problems = []
    for key in ("loss", "grad_norm"):
        allowed = max(FLOOR, 2 * largest_difference(stock, reordered, key)) if reordered else 0.0
        if by_parts and key == "grad_norm":
            allowed = max(allowed, LAST_BITS * max(record[key] for record in stock.records))
        gap = largest_difference(stock, patched, key)
        if gap > allowed:
            pairs = zip(stock.records, patched.records, strict=True)
            step = next(i for i, (x, y) in enumerate(pairs) if x[key] != y[key])
            problems.append(
                f"{key} differs by up to {gap:.3g}, allowed is {allowed:.3g}; first at step {step}"
            )
    return problems


def check_report(report: Mapping[str, Any], nproc: int, *, by_parts: bool = False) -> list[str]:
    """Return the faults that ``ovpatch run --report`` shows: workers not patched, a feature that never ran."""
    if not report.get("processes"):
        return ["no worker was patched: ovpatch got no report of any process"]
    feature = next((feature for feature in report["features"] if feature["name"] == FEATURE), None)
    if feature is None:
        return [
            f"the report does not know the feature {FEATURE}; is the package installed (pip "
            "install -e .)?"
        ]
    workers = {worker["rank"]: worker for worker in feature["processes"]}
    problems = [
        problem for rank in range(nproc) for problem in check_worker(rank, workers.get(rank))
    ]
    if by_parts and not any(
        row["name"] == BY_PARTS and row["counters"].get("steps") for row in report["features"]
    ):
        problems.append(f"the feature {BY_PARTS} made no step")
    return problems


def check_worker(rank: int, worker: Mapping[str, Any] | None) -> list[str]:
    """Return the faults in a worker's part of the report; None: the worker has no part in it."""
    if worker is None:
        return [f"the worker of rank {rank} was not patched: it is not in the report"]
    if worker["state"] != "applied":
        return [
            f"the worker of rank {rank} was not patched: {FEATURE} is {worker['state']} "
            f"({worker['reason']})"
        ]
    counters = worker["counters"]
    problems = [
        f"rank {rank}: counter {name} of {FEATURE} is 0"
        for name in MUST_COUNT
        if not counters.get(name)
    ]
    if counters.get("stock_models"):
        problems.append(f"rank {rank}: the model fell back to the stock reducer")
    return problems


# --- showing -------------------------------------------------------------------------------------------------------


def show_runs(console: Console, stock: Run, patched: Run) -> None:
    """Print losses and gradient norms of some steps side by side, and their largest differences.

    One run of each on a machine that may be busy shows no speed, so no times are printed.
    """
    table = Table("step", title="the same script, stock and patched", title_justify="left")
    for column in (
        "stock loss",
        "patched loss",
        "|difference|",
        "stock norm",
        "patched norm",
        "|difference|",
    ):
        table.add_column(column, justify="right")
    last = len(stock.records) - 1
    for i in sorted(
        {0, 1, 2, 5, *range(10, last, max(10, last // 6 // 10 * 10)), last} & set(range(last + 1))
    ):
        cells = []
        for key in ("loss", "grad_norm"):
            a, b = stock.records[i][key], patched.records[i][key]
            cells += [f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.3g}"]
        table.add_row(str(i), *cells)
    console.print(table)
    final = mean(record["loss"] for record in stock.records[-10:])
    gaps = (largest_difference(stock, patched, key) for key in ("loss", "grad_norm"))
    for line in (
        f"the loss fell from {stock.records[0]['loss']:.3f} to {final:.3f}, the mean of the last "
        "ten steps",
        "largest difference over all steps: loss {:.3g}, gradient norm {:.3g}".format(*gaps),
        "whether it is faster: ovpatch bench -- torchrun … measures that, in several runs of each",
    ):
        console.print(line, highlight=False)


def show_state(console: Console, report: Mapping[str, Any]) -> None:
    """Print how much optimizer state the process with most keeps by parts, and how much stock keeps of the same."""
    counters = next(
        feature["counters"] for feature in report["features"] if feature["name"] == BY_PARTS
    )
    kept, stock = (counters.get(name, 0) / 2**20 for name in ("state_bytes", "state_bytes_whole"))
    console.print(
        f"optimizer state per process: {kept:.1f} MiB, where stock keeps {stock:.1f} MiB",
        highlight=False,
    )


# --- the demo ------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, gpus: int) -> tuple[int, list[str], str]:
    """Return the number of processes, the script's arguments and a sentence about both."""
    on_gpu = gpus >= 2 and (args.nproc or 2) <= gpus
    nproc = args.nproc or (min(gpus, MAX_GPUS) if on_gpu else 2)
    script_args = [
        f"--steps={args.steps or (20 if args.quick else 100)}",
        *(TINY if args.quick else []),
    ]
    if on_gpu:
        return nproc, [*script_args, *ON_GPU], f"{nproc} processes, one GPU each, NCCL"
    why = " (one GPU is not enough to show it on: two processes need two)" if gpus == 1 else ""
    return nproc, [*script_args, "--device=cpu"], f"{nproc} processes on the CPU, gloo{why}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train examples/train_gpt.py stock and patched, side by side."
    )
    parser.add_argument("--steps", type=int, help="default: 100, or 20 with --quick")
    parser.add_argument(
        "--nproc", type=int, help="processes; default: one per GPU, at most 8, or 2 on the CPU"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model and fewer steps, to see that it works"
    )
    parser.add_argument(
        "--features",
        metavar="LIST",
        help="what OVPATCH says in the patched run, as +dist_optimizer",
    )
    args = parser.parse_args(argv)
    if (args.nproc is not None and args.nproc < 2) or (args.steps is not None and args.steps < 1):
        parser.error("--nproc must be at least 2 and --steps at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    nproc, script_args, sentence = plan(args, torch.cuda.device_count())
    console.print(
        f"{SCRIPT.relative_to(ROOT)}: {sentence}; {script_args[0].lstrip('-')}", highlight=False
    )
    OUT.mkdir(exist_ok=True)
    report_file = OUT / "report.json"
    report_file.unlink(missing_ok=True)

    by_parts = BY_PARTS in (args.features or "")
    script_args += ["--clip=0"] if by_parts else []
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={nproc}",
    ]
    job = [*torchrun, str(SCRIPT), *script_args]
    ovpatch_run = [sys.executable, "-m", "ovpatch", "run", f"--report={report_file}", "--"]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    features = {} if args.features is None else {"OVPATCH": args.features}
    steps = int(script_args[0].partition("=")[2])
    runs: list[Run] = []
    problems: list[str] = []

    def launch(name: str, command: Sequence[str], **more: str) -> bool:
        runs.append(train(name, command, {**env, **more}, steps, console))
        problems.extend(check_run(runs[-1], steps))
        return not problems

    finished = launch("stock", job, OVPATCH="0") and launch(
        "patched", [*ovpatch_run, *job], **features
    )
    if finished and nproc > 2:
        finished = launch("reordered", [*job, "--bucket-cap-mb=1"], OVPATCH="0")
    report = read_report(report_file)
    if finished:
        problems += check_losses(*runs, by_parts=by_parts)
        show_runs(console, runs[0], runs[1])
    if len(runs) > 1:
        problems += check_report(report, nproc, by_parts=by_parts)
        if report.get("processes"):
            console.out(summarise_report(report), highlight=False)
            if by_parts and not problems:
                show_state(console, report)
    for problem in problems:
        console.print(f"FAILED: {problem}", style="bold red", markup=False, highlight=False)
    if not problems:
        equal = (
            "bitwise equal"
            if nproc == 2
            else "equal within twice what stock differs by with other buckets"
        )
        what = "losses" if by_parts else "losses and gradient norms"
        console.print(f"OK: {what} are {equal}; all {nproc} workers were patched.", style="green")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

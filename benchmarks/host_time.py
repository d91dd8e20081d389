"""Host time of a training step per parameter, beyond stock PyTorch: what Python costs where the host is the limit.

    python -m benchmarks.host_time                              # 200 and 2,000 parameters
    python -m benchmarks.host_time --parameters 200 2000 10000 --rounds 5
    python -m benchmarks.host_time --arms "ddp + dist_optimizer" --profile

Arms are stock DDP, ``ddp``, ``ddp`` with ``dist_optimizer``, and FSDP2, with AdamW, on models of linears with 256
weights and 16 biases each. ``dist_optimizer`` shards them all here (``min_param_numel=1``); with its defaults, the last
arm, it shards no parameters of this size. On the CPU two gloo ranks train, each with one thread. Where there is
a GPU, one rank of eight trains alone, its collectives faked as in ``zero_alone``. A figure is the median over rounds of
rank 0's CPU time per step: that of the thread that trains, and of all its threads, gloo's included. Each round starts
every arm again. ``least`` compares the fastest step of all rounds, since other work on the machine only adds to a step.
Wall-clock time is reported, too. Time per arm is limited: large models have fewer steps
(``--seconds``).

``--profile`` prints where the time goes by function, in microseconds per parameter and step, cProfile's own overhead
included. ``--json`` appends the result to a file, as one line with date, versions and command.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks.runs import CUDA, described

_DEFAULTS: Final = "ddp + dist_optimizer, defaults"
ARMS: Final = ("stock", "ddp", "ddp + dist_optimizer", "FSDP2", _DEFAULTS)
OPTIONS: Final = {"dist_optimizer": {"min_param_numel": 1}}
# Linears in a block, the unit that FSDP2 gathers.
_BLOCK = 10
# In the first 16 steps, flags of all ranks take effect in the next step.
_WARM_STEPS = 4
_MIN_STEPS = 5
_FAKED_WORLD = 8


_CLOCKS: Final = ("main ms", "cpu ms", "wall ms")
# The columns of the table, by the name of the figure.
_COLUMNS: Final = {
    "main ms": "main thread ms",
    "main beyond us": "beyond, us",
    "least beyond us": "least, us",
    "cpu ms": "all threads ms",
    "beyond us": "beyond, us",
    "cpu ratio": "x stock",
    "wall ms": "wall ms",
    "least wall ratio": "least x stock",
}


def make_step(
    arm: str,
    layers: int,
    *,
    width: int = 16,
    block: int = _BLOCK,
    device: str = "cuda" if CUDA else "cpu",
) -> Callable[[], object]:
    """Build linears of a width, in blocks of some, and their optimizer; return one training step."""
    torch.manual_seed(0)
    linears = [nn.Linear(width, width) for _ in range(layers)]
    model: Any = nn.Sequential(
        *(nn.Sequential(*linears[i : i + block]) for i in range(0, layers, block))
    ).to(device)
    if arm == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for linear in model:
            fully_shard(linear)
        fully_shard(model)
        trained = model
    else:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=arm == "stock")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, width, device=device)

    def step() -> None:
        trained(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def joined(rank: int, arm: str, folder: str) -> Iterator[None]:
    """Run a block as one of two gloo ranks, or as one rank of a faked world on a GPU."""
    if not CUDA:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
        )
        yield
        dist.barrier()
    else:
        from benchmarks import zero_alone

        zero_alone.join(_FAKED_WORLD)
        ours = arm.startswith("ddp")
        with (
            zero_alone.without_peers(lambda: False, copied=False)
            if ours
            else zero_alone.stock_alone()
        ):
            yield
    dist.destroy_process_group()


def run(
    rank: int, arm: str, parameters: int, steps: int, seconds: float, profiled: bool, folder: str
) -> None:
    """Time warm steps of one arm; rank 0 writes the result."""
    with joined(rank, arm, folder):
        if arm.startswith("ddp"):
            features = arm.removesuffix(", defaults").split(" + ")
            ovpatch.apply(*features, options=OPTIONS if arm == "ddp + dist_optimizer" else {})
        step = make_step(arm, parameters // 2)
        begin = time.perf_counter()
        for _ in range(_WARM_STEPS):
            step()
        limit = torch.tensor([_WARM_STEPS * seconds / (time.perf_counter() - begin)])
        if not CUDA:
            # All ranks make the same number of steps.
            dist.broadcast(limit, 0)
        steps = max(_MIN_STEPS, min(steps, int(limit)))
        gc.collect()
        gc.disable()
        result: Any = (
            profile(step, steps, parameters) if profiled and not rank else clock(step, steps)
        )
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


def clock(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Return medians of CPU time, of this thread and of all, and of wall-clock time of a step, and the least, in ms."""
    main, cpu, wall = [], [], []
    for _ in range(steps):
        alone, used, begin = time.thread_time(), time.process_time(), time.perf_counter()
        step()
        wall.append(1e3 * (time.perf_counter() - begin))
        cpu.append(1e3 * (time.process_time() - used))
        main.append(1e3 * (time.thread_time() - alone))
    medians = {
        name: statistics.median(times)
        for name, times in zip(_CLOCKS, (main, cpu, wall), strict=True)
    }
    return medians | {"least main ms": min(main), "least wall ms": min(wall)}


def profile(
    step: Callable[[], object], steps: int, parameters: int
) -> list[tuple[str, float, float, float]]:
    """Return, by function, calls per step, and own and total time in microseconds per parameter and step."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    rows = []
    functions = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # no stub
    for (file, line, name), (_, calls, own, total, _) in functions.items():
        place = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
        rows.append(
            (place, calls / steps, 1e6 * own / steps / parameters, 1e6 * total / steps / parameters)
        )
    return sorted(rows, key=lambda row: -row[2])


def measure(
    arm: str, parameters: int, steps: int, seconds: float, *, profiled: bool = False
) -> Any:
    """Return the result of :func:`run` in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (arm, parameters, steps, seconds, profiled, folder), nprocs=1 if CUDA else 2)
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


def show(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the figures."""
    table = Table("parameters", "arm", *_COLUMNS.values())
    for row in rows:
        table.add_row(
            str(row["parameters"]), row["arm"], *(f"{row[name]:.2f}" for name in _COLUMNS)
        )
    return table


def summarize(found: dict[str, list[dict[str, float]]], parameters: int) -> list[dict[str, Any]]:
    """Return one row per arm: medians over rounds, and the excess over stock PyTorch in the same round."""

    def least(arm: str, clock: str) -> float:
        return min(row[f"least {clock}"] for row in found[arm])

    rows = []
    for arm, times in found.items():
        pairs = list(zip(times, found["stock"], strict=True))

        def beyond(clock: str, pairs: Any = pairs) -> float:
            return statistics.median(
                1e3 * (row[clock] - stock[clock]) / parameters for row, stock in pairs
            )

        rows.append(
            {"arm": arm, "parameters": parameters}
            | {clock: statistics.median(row[clock] for row in times) for clock in _CLOCKS}
            | {
                "cpu ratio": statistics.median(
                    row["cpu ms"] / stock["cpu ms"] for row, stock in pairs
                ),
                "wall ratio": statistics.median(
                    row["wall ms"] / stock["wall ms"] for row, stock in pairs
                ),
                "main beyond us": beyond("main ms"),
                "beyond us": beyond("cpu ms"),
                "least main ms": least(arm, "main ms"),
                "least beyond us": 1e3
                * (least(arm, "main ms") - least("stock", "main ms"))
                / parameters,
                "least wall ratio": least(arm, "wall ms") / least("stock", "wall ms"),
            }
        )
    return rows


def main() -> None:
    """Measure, print, and append the result to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=[200, 2000], help="sizes of the models"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of an arm in a round")
    parser.add_argument("--seconds", type=float, default=10, help="about how long these may take")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes by function"
    )
    parser.add_argument(
        "--functions", type=int, default=40, help="how many functions a profile shows"
    )
    parser.add_argument(
        "--json", type=Path, help="append the result to this file, as benchmarks/results/*.jsonl"
    )
    args = parser.parse_args()
    console, rows = Console(width=150), list[dict[str, Any]]()
    for parameters in args.parameters:
        if args.profile:
            for arm in args.arms:
                table = Table(
                    "function",
                    "calls a step",
                    "own us",
                    "total us",
                    title=f"{arm}, {parameters} parameters",
                )
                for place, *figures in measure(
                    arm, parameters, args.steps, args.seconds, profiled=True
                )[: args.functions]:
                    table.add_row(place, *(f"{figure:.2f}" for figure in figures))
                console.print(table)
            continue
        found: dict[str, list[dict[str, float]]] = {
            arm: [] for arm in dict.fromkeys(["stock", *args.arms])
        }
        for _ in range(args.rounds):
            for arm, times in found.items():
                times.append(measure(arm, parameters, args.steps, args.seconds))
        rows += summarize(found, parameters)
    if rows:
        console.print(show(rows))
    if rows and args.json:
        description = described("host_time", {}, world=_FAKED_WORLD if CUDA else 2) | {"rows": rows}
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(description) + "\n")


if __name__ == "__main__":
    main()

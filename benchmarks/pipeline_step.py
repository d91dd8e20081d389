"""One training step of a pipeline with schedules of torch and with feature ``pipeline``, in one run.

    torchrun --nproc-per-node 4 -m benchmarks.pipeline_step --json pipeline_step.jsonl                     # 4 GPUs
    torchrun --nproc-per-node 1 -m benchmarks.pipeline_step --json pipeline_step.jsonl                     # 1 GPU
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.pipeline_step --width 256 --batch 4        # CPU

With several processes, arms alternate. Each arm is built again, warmed up and timed without a stop between its steps;
the slowest rank counts. ``limit`` is m(F + B + W) in stock PyTorch: all microbatches of a step in sequence, every rank
alone with its own stage. The result of each order of the feature includes the simulated time of a step. The simulator
uses the costs that the engine measured in the same steps, and the time of a message to and fro before them. In arms
whose names end with ``copies``, copy engines send the messages; these arms are for GPUs of one host.

With one process, a stage alone is timed: F, B and W with deferred weight gradients, and F and the backward of stock
PyTorch. The result has the time of the device, the time in which the host issues the kernels, and the memory.

On gloo, choose a width whose F takes much longer than a message, and no more ranks than the machine has cores.
Otherwise time the steps by ``--clock cpu``, as if each rank had its own core, see ``benchmarks.message_clock``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import ovpatch
from benchmarks.message_clock import time_steps
from benchmarks.models import Block
from benchmarks.runs import CUDA, add_timing, alternate, clocked, described, device, running, start
from ovpatch.overlap.pipelining.ir import Kind
from ovpatch.overlap.pipelining.order_table import TORCH_ORDERS
from ovpatch.overlap.pipelining.orders import build_order, convert_torch_order, split_backwards
from ovpatch.planner.simulator import Costs, simulate
from ovpatch_plugins.pipeline.pipeline_report import list_schedules
from ovpatch_plugins.pipeline.runtime.step_clock import HostClock
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages

# The ending of the names of arms whose messages copy engines carry.
COPIES = ", copies"
# Name of the arm: class, stages per rank, order of the feature or None for stock.
ARMS: dict[str, tuple[str, int, str | None]] = {
    "stock 1F1B": ("Schedule1F1B", 1, None),
    "1F1B, as given": ("Schedule1F1B", 1, "as-given"),
    "1F1B, as given, copies": ("Schedule1F1B", 1, "as-given"),
    "ZB-H1": ("Schedule1F1B", 1, "zb-h1"),
    "ZB-H1, copies": ("Schedule1F1B", 1, "zb-h1"),
    "ZB-H2": ("Schedule1F1B", 1, "zb-h2"),
    "ZB-H2, copies": ("Schedule1F1B", 1, "zb-h2"),
    "1F1B, auto": ("Schedule1F1B", 1, "auto"),
    "stock GPipe": ("ScheduleGPipe", 1, None),
    "GPipe, as given": ("ScheduleGPipe", 1, "as-given"),
    "stock Interleaved1F1B": ("ScheduleInterleaved1F1B", 2, None),
    "Interleaved1F1B, as given": ("ScheduleInterleaved1F1B", 2, "as-given"),
    "Interleaved1F1B, as given, copies": ("ScheduleInterleaved1F1B", 2, "as-given"),
    "Interleaved1F1B, auto": ("ScheduleInterleaved1F1B", 2, "auto"),
    "stock InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", 2, None),
    "InterleavedZeroBubble, as given": ("ScheduleInterleavedZeroBubble", 2, "as-given"),
    "stock ZBVZeroBubble": ("ScheduleZBVZeroBubble", 2, None),
    "ZBVZeroBubble, as given": ("ScheduleZBVZeroBubble", 2, "as-given"),
    "ZBVZeroBubble, as given, copies": ("ScheduleZBVZeroBubble", 2, "as-given"),
    "ZBVZeroBubble, auto": ("ScheduleZBVZeroBubble", 2, "auto"),
}
LIMIT = "limit"
# The most steps that schedule=auto takes to measure, and to race one order against another.
_STEPS_TO_CHOOSE = 100
_CHOOSING = (
    "races against the order as given",
    "while costs are measured",
)
STAGE_ARMS = ("stock", "deferred", "stock, checkpoint", "deferred, checkpoint")


class Blocks(nn.Module):
    """The blocks of a stage, each checkpointed if ``checkpoint`` is on."""

    def __init__(self, args: argparse.Namespace, count: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(count))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Compute all blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def dtype() -> torch.dtype:
    """Return the dtype of parameters and activations."""
    return torch.bfloat16 if CUDA else torch.float32


def make_part(
    args: argparse.Namespace, chunks: int = 1, *, checkpointed: bool = False
) -> nn.Module:
    """Return the module of a stage."""
    with device():
        return Blocks(args, args.blocks // chunks, checkpointed=checkpointed).to(dtype())


def make_rows(args: argparse.Namespace, microbatches: int) -> Tensor:
    """Return activations of some microbatches, ``[batch, context, width]``."""
    return torch.randn(
        microbatches * args.batch, args.context, args.width, device=device(), dtype=dtype()
    )


# --- several processes: schedules ---


def build(args: argparse.Namespace, arm: tuple[str, int, str | None]) -> Any:
    """Return an arm's schedule."""
    name, chunks, _ = arm
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * chunks
    indices = (
        [rank, count - 1 - rank]
        if name == "ScheduleZBVZeroBubble"
        else list(range(rank, count, size))
    )
    stages = [PipelineStage(make_part(args, chunks), index, count, device()) for index in indices]
    cls = getattr(schedules, name)
    return cls(
        stages[0] if chunks == 1 else stages, args.microbatches, loss_fn=nn.functional.mse_loss
    )


def chained(step: Callable[[], object], steps: int) -> list[float]:
    """Return the times in ms of ``steps`` steps that follow each other without a barrier; those of the slowest rank."""
    if CUDA:
        return running(step, steps)
    if HostClock.read is time.thread_time:
        return time_steps(step, steps)
    dist.barrier()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found: list[float] = slowest.tolist()
    return found


def measure_limit(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times in which each rank computes its microbatches without any message."""
    part = make_part(args)
    x = make_rows(args, 1).requires_grad_()

    def step() -> None:
        for _ in range(args.microbatches):
            part(x).square().mean().backward()

    return clock(step, args)


def clock(step: Callable[[], object], args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of steps that follow each other, and the peak of memory on the fullest rank."""
    found = clocked(step, args, chained)
    peak = torch.tensor(found["peak_gib"], device=device())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {**found, "peak_gib": peak.item()}


def measure_schedule(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the times of an arm's steps and the peak of memory on the fullest rank."""
    arm = ARMS[name]
    if arm[2] is not None:
        transport = "copies" if name.endswith(COPIES) else "auto" if arm[2] == "auto" else "c10d"
        ovpatch.apply(
            "pipeline", options={"pipeline": {"schedule": arm[2], "p2p_transport": transport}}
        )
    try:
        schedule = build(args, arm)
        rows = make_rows(args, args.microbatches)
        inputs = (rows,) if any(stage.is_first for stage in list_stages(schedule)) else ()

        def step() -> None:
            schedule.step(*inputs, target=rows, return_outputs=False)

        send = measure_send(args)
        if arm[2] == "auto":
            choose(step)
        found = clock(step, args)
        if arm[2] is not None and arm[2] != "auto":
            found["predicted_ms"] = predict(schedule, arm, send)
        found["remarks"] = next(
            (list(f.remarks) for f in ovpatch.report().features if f.name == "pipeline"), []
        )
        return found
    finally:
        ovpatch.revert()


def choose(step: Callable[[], object]) -> None:
    """Run steps until ``schedule=auto`` has chosen: the steps of its race differ from the steps after it."""
    for _ in range(_STEPS_TO_CHOOSE):
        step()
        if not any(text in note for note in list_schedules()[-1].notes for text in _CHOOSING):
            return
    raise RuntimeError(f"schedule=auto has not chosen within {_STEPS_TO_CHOOSE} steps")


def measure_send(args: argparse.Namespace) -> float:
    """Return the seconds that a microbatch's activations take to the next rank; the slowest of all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    row, slowest = make_rows(args, 1), torch.zeros((), device=device())
    for lower in range(size - 1):
        if rank not in (lower, lower + 1):
            continue
        seconds = []
        for _ in range(8):
            if CUDA:
                torch.cuda.synchronize()
            begin = HostClock.read()
            for sends in (rank == lower, rank != lower):
                peer = lower + 1 if rank == lower else lower
                dist.send(row, peer) if sends else dist.recv(row, peer)
            if CUDA:
                torch.cuda.synchronize()
            seconds.append((HostClock.read() - begin) / 2)
        slowest.fill_(max(slowest.item(), statistics.median(seconds)))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def predict(schedule: Any, arm: tuple[str, int, str | None], send: float) -> float:
    """Return the ms of a step that the simulator expects from the costs of all ranks, which call this together."""
    times, stages = list_schedules()[-1].times, list_stages(schedule)
    mine = {}
    for stage in times.stages():
        input_grad = times.mean(stage, Kind.B) or times.mean(stage, Kind.BW)
        mine[stage] = (times.mean(stage, Kind.F), input_grad, times.mean(stage, Kind.W))
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, (mine, times.overhead))
    costs = dict(sorted((stage, cost) for part, _ in shared for stage, cost in part.items()))
    overhead = tuple(seconds for _, seconds in shared)
    forward, backward, weight = (tuple(column) for column in zip(*costs.values(), strict=True))
    if arm[1] == 1:
        own = TORCH_ORDERS[arm[0]]
        name = own if arm[2] in (None, "as-given") else str(arm[2])
        orders = build_order(name, ranks=len(costs), microbatches=schedule._n_microbatches)
    else:
        orders = convert_torch_order(schedule.pipeline_order)
    ranks = stages[0].stage_index_to_group_rank
    placement = [ranks[stage] for stage in range(len(costs))]
    found = Costs(forward, backward, weight, send, overhead)
    return 1000 * simulate(split_backwards(orders), placement, found).step


def compare_schedules(args: argparse.Namespace) -> None:
    """Measure all arms and print how much longer than the limit each takes."""
    medians: defaultdict[str, list[float]] = defaultdict(list)
    ratios: defaultdict[str, list[float]] = defaultdict(list)

    def measure(name: str) -> dict[str, Any]:
        # Schedules and stages form reference cycles, which only the collector frees.
        gc.collect()
        found = measure_limit(args) if name == LIMIT else measure_schedule(args, name)
        medians[name] += found["ms"]
        if "predicted_ms" in found:
            ratios[name].append(found["predicted_ms"] / statistics.median(found["ms"]))
        return {"arm": name, **found}

    alternate("pipeline_step", [LIMIT, *args.arms], measure, args)
    if dist.get_rank() == 0 and LIMIT in medians:
        limit = statistics.median(medians[LIMIT])
        for name, times in medians.items():
            expected = (
                f", {statistics.median(ratios[name]):.3f} of it simulated" if name in ratios else ""
            )
            print(f"{name:36}{statistics.median(times) / limit:11.3f} of m(F+B+W){expected}")


# --- one process: a stage alone ---


class StageAlone:
    """The only stage of a pipeline, run by the engine's means.

    Args:
        args: The command line.
        arm: One of :data:`STAGE_ARMS`.
    """

    def __init__(self, args: argparse.Namespace, arm: str) -> None:
        # Stock arms of other calls do not need it.
        from ovpatch_plugins.pipeline.runtime.pipeline_shape import StageInfo
        from ovpatch_plugins.pipeline.runtime.stage import Stage, StageOptions

        self.microbatches = args.microbatches
        stage = PipelineStage(make_part(args, checkpointed="checkpoint" in arm), 0, 1, device())
        self.x = make_rows(args, 1)
        schedule = schedules.ScheduleGPipe(stage, 1, loss_fn=lambda out, _: out.square().mean())
        # This step initialises the stage and makes gradients.
        schedule.step(self.x, target=self.x, return_outputs=False)
        self.is_deferred = arm.startswith("deferred")
        delay = "on" if self.is_deferred else "off"
        self.run = Stage(StageInfo(0, stage), StageOptions(delay, sends=True))

    def compute(self, mark: Callable[[str], None]) -> None:
        """Compute a microbatch; ``mark`` is called after each part with its name."""
        self.run.start_step(finalizes=True)
        mark("")
        out = self.run.forward(0, (self.x,), {}, False)
        loss = out.square().mean()
        if self.run.queue is not None and not self.run.queue.is_graph_known:
            self.run.queue.check_graph(loss)
        del out
        mark("F")
        is_deferred = self.run.backward(0, loss, self.microbatches)
        del loss
        mark("B")
        if is_deferred:
            self.run.weight_grads(0)
        mark("W")
        self.run.end_step()


def measure_stage(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Return ms of the device and of the host, and MiB, of the parts of a microbatch."""
    gc.collect()
    alone = StageAlone(args, arm)
    for _ in range(2):
        alone.compute(lambda _name: None)
    found: dict[str, Any] = {
        "arm": arm,
        "device_ms": {},
        "host_ms": {},
        "mib": _measure_memory(alone),
    }
    marks: list[tuple[str, float, Any]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True) if CUDA else None
        if event is not None:
            event.record()
        marks.append((name, time.perf_counter(), event))

    for _ in range(args.microbatches * args.steps):
        alone.compute(mark)
    if CUDA:
        torch.cuda.synchronize()
    host, on_device = defaultdict(list), defaultdict(list)
    for (_, begin, first), (name, end, last) in itertools.pairwise(marks):
        if name:
            host[name].append((end - begin) * 1e3)
            on_device[name].append(first.elapsed_time(last) if CUDA else host[name][-1])
    found["device_ms"] = {
        name: round(statistics.median(times), 3) for name, times in on_device.items()
    }
    found["host_ms"] = {name: round(statistics.median(times), 3) for name, times in host.items()}
    return found


def _measure_memory(alone: StageAlone) -> dict[str, float]:
    """Return the memory after each part of a microbatch, and its peak, without parameters and gradients."""
    if not CUDA:
        return {}
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    found: dict[str, float] = {}

    def mark(name: str) -> None:
        if name:
            found[f"after {name}"] = round((torch.cuda.memory_allocated() - base) / 2**20, 1)
            found[f"peak of {name}"] = round((torch.cuda.max_memory_allocated() - base) / 2**20, 1)
        torch.cuda.reset_peak_memory_stats()

    alone.compute(mark)
    return found


def compare_stages(args: argparse.Namespace) -> None:
    """Measure a stage alone in all arms, print the parts, and append the result to ``args.json``."""
    rows = [measure_stage(args, arm) for _ in range(args.rounds) for arm in args.stage_arms]
    summary = list(_summarize(rows, args.stage_arms))
    print(
        f"{'arm':24}{'F':>9}{'B':>9}{'W':>9}{'B+W':>9}{'host':>9}{'of device':>11}{'after F':>9}{'peak of B':>11}"
    )
    for row in summary:
        device_ms, mib = row["device_ms"], row["mib"]
        parts = "".join(f"{device_ms.get(kind, 0.0):9.2f}" for kind in "FBW")
        memory = "".join(
            f"{mib.get(key, 0):{width}.0f}" for key, width in (("after F", 9), ("peak of B", 11))
        )
        share = row["host_ms"] / sum(device_ms.values())
        print(
            f"{row['arm']:24}{parts}{row['backward_ms']:9.2f}{row['host_ms']:9.2f}{share:11.2f}{memory}"
        )
    backwards = {row["arm"]: row["backward_ms"] for row in summary}
    for arm in args.stage_arms:
        peer = arm.replace("deferred", "stock")
        if peer != arm and peer in backwards:
            print(f"{arm}: B + W is {backwards[arm] / backwards[peer]:.3f} of stock's backward")
    if args.json:
        given = {
            key: value
            for key, value in vars(args).items()
            if key not in ("json", "arms", "stage_arms")
        }
        with args.json.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({**described("pipeline_step", given), "summary": summary, "rows": rows})
                + "\n"
            )


def _summarize(rows: list[dict[str, Any]], arms: list[str]) -> Iterator[dict[str, Any]]:
    for arm in arms:
        mine = [row for row in rows if row["arm"] == arm]
        parts = {
            kind: round(statistics.median(row["device_ms"][kind] for row in mine), 3)
            for kind in "FBW"
        }
        yield {
            "arm": arm,
            "device_ms": parts,
            "backward_ms": round(
                statistics.median(sum(row["device_ms"][kind] for kind in "BW") for row in mine), 3
            ),
            "host_ms": round(statistics.median(sum(row["host_ms"].values()) for row in mine), 3),
            "mib": mine[-1]["mib"],
        }


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group, and leave it after the block."""
    start()
    try:
        yield
    finally:
        dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description="Time a step of a pipeline, stock and patched, or a stage alone."
    )
    made.add_argument("--width", type=int, default=3072 if CUDA else 128)
    made.add_argument("--heads", type=int, default=24 if CUDA else 4)
    made.add_argument("--batch", type=int, default=2, help="sequences of a microbatch")
    made.add_argument("--context", type=int, default=1024 if CUDA else 64)
    made.add_argument("--blocks", type=int, default=8 if CUDA else 2, help="blocks of a rank")
    made.add_argument("--microbatches", type=int, default=12)
    made.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="on gloo: cpu, as if cores were not shared",
    )
    arms = [name for name in ARMS if CUDA or not name.endswith(COPIES)]
    made.add_argument(
        "--arms", nargs="+", default=arms, choices=list(ARMS), help="with several processes"
    )
    made.add_argument(
        "--stage-arms",
        nargs="+",
        default=list(STAGE_ARMS),
        choices=STAGE_ARMS,
        help="with one process",
    )
    add_timing(made, rounds=2)
    return made


def main() -> None:
    """Measure schedules, or in one process a stage alone."""
    args = parser().parse_args()
    if args.clock == "cpu":
        HostClock.read = staticmethod(time.thread_time)
    with process_group():
        if dist.get_world_size() == 1:
            compare_stages(args)
        else:
            compare_schedules(args)


if __name__ == "__main__":
    main()

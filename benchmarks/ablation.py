"""The gain of each overlap: data and tensor parallelism over a mesh, one overlap at a time, and all of them.

    torchrun --nproc-per-node 8 -m benchmarks.ablation --size 8b --tp 4 --json benchmarks/results/ablation.jsonl

The script is as users write it: ``parallelize_module`` with sequence and loss parallelism over one dimension of a mesh,
``DistributedDataParallel(device_mesh=)`` over the other, fused AdamW, random tokens. Arms alternate; each is built
again, warmed up and timed, step after step without a stop; the slowest rank counts. A result has each arm's
features and counters: an overlap with counter 0 was not active.

``ovpatch, no overlap`` has all features on and all overlaps off. Its difference to ``stock`` is the gain of linears
without DTensor's dispatch, one all-gather for q, k and v, and sharded updates. The arm ``limit`` is a rank's
computation and update without communication. ``limit, pauses`` is the same with a GPU that rests for ``--pause-ms`` in
total where communication would be: a GPU at its power limit computes faster after a rest, so it takes less than the
sum. The rest of the sum is what an overlap cannot gain on such GPUs.

On GPUs a row has the clocks and the power of each rank's GPU. ``--profile FOLDER`` keeps rank 0's trace of three steps
of each arm, for ``ovpatch timeline``.

Memory: a rank of DP 2 x TP 4 has a quarter of Llama's 8.03e9 parameters. In bf16 (``--dtype bf16``: weights, gradients
and AdamW's moments) weights, gradients, DDP's buckets and moments take 10 bytes each, 20 GB; in fp32 under autocast to
bf16 22 with the casts, 44 GB. Activations of 8192 tokens in 32 layers are some 15 to 20 GB, by the sizes of saved
tensors. So all 32 layers fit a GPU of 141 GB in either, and ``--layers`` is for less. Without CUDA it runs on gloo
(``--size tiny --tp 2``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks.decoders import SIZES, Decoder, Shape, alone, cut, flops_per_step, parameters
from benchmarks.gpu_state import GpuState
from benchmarks.peaks import PEAK_TFLOPS
from benchmarks.runs import CUDA, add_timing, alternate, clocked, device, merged, running, start
from ovpatch.overlap.comm.lifetimes import drop_values
from ovpatch.overlap.kernels import autotuner
from ovpatch.overlap.peer_rpc.retention import Retention

Step = Callable[[], Tensor]
LR = 1e-4
# An H100 that rests has about this clock.
CYCLES_PER_MS = 1_900_000


class Problem:
    """The training of all arms: a model, its data, and the mesh.

    Args:
        args: The command line.
        mesh: Of :func:`mesh_of`.
    """

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.shape, self.autocast, self.mesh = shape_of(args), args.dtype == "fp32", mesh
        self.pause_ms = args.pause_ms
        self.dtype = torch.float32 if self.autocast else torch.bfloat16
        # Ranks that share a model have the same tokens.
        generator = torch.Generator().manual_seed(self.mesh["dp"].get_local_rank())
        size = self.shape.batch, self.shape.context
        self.tokens, self.targets = (
            torch.randint(0, self.shape.vocabulary, size, generator=generator).to(device())
            for _ in range(2)
        )

    def model(self) -> Decoder:
        """Build the same model on all ranks."""
        torch.manual_seed(0)
        with torch.device(device()):
            return Decoder(self.shape).to(self.dtype)

    def backward(
        self, model: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor
    ) -> Tensor:
        """Run forward and backward, and return the loss."""
        with torch.autocast(device().type, dtype=torch.bfloat16, enabled=self.autocast):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        return loss.detach()


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the model of the command line."""
    given = {
        name: getattr(args, name) for name in ("layers", "batch", "context") if getattr(args, name)
    }
    return dataclasses.replace(SIZES[args.size], **given)


def mesh_of(args: argparse.Namespace) -> DeviceMesh:
    """Return a mesh of all ranks, once for all arms: its communicators stay."""
    return init_device_mesh(
        device().type, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )


def trained(problem: Problem, **kwargs: Any) -> Step:
    """A training step, stock or patched: the script is the same.

    Args:
        problem: What is trained.
        kwargs: Further arguments of ``DistributedDataParallel``.
    """
    model = problem.model()
    cut(model, problem.mesh["tp"])
    # DDP refuses DTensors by process_group=, and makes local tensors of them by device_mesh=.
    wrapped = DistributedDataParallel(model, device_mesh=problem.mesh["dp"], **kwargs)
    # From the first forward on, torch has DTensors instead of the module's parameters.
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR, fused=CUDA)

    def step() -> Tensor:
        with loss_parallel():
            loss = problem.backward(wrapped, problem.tokens, problem.targets)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Point(torch.autograd.Function):
    """A place where :func:`trained` communicates: a function is called there, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], object]) -> Tensor:
        """Call the function, and return the input."""
        ctx.act = act
        act()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Call the function, and return the gradient."""
        ctx.act()
        return grad, None


def rest(ms: float) -> None:
    """Let the GPU of this rank rest."""
    if CUDA:
        torch.cuda._sleep(int(ms * CYCLES_PER_MS))


def add_points(model: Decoder, act: Callable[[], object]) -> None:
    """Call a function where tensor parallelism gathers and scatters, eight times in the step of a block."""
    apply: Any = Point.apply
    for block in model.blocks:
        for part in (block.attention, block.feed_forward):
            assert isinstance(part, nn.Module)
            part.register_forward_pre_hook(
                lambda module, args: (apply(args[0], act), *args[1:]), prepend=True
            )
            part.register_forward_hook(lambda module, args, output: apply(output, act))


def limit(problem: Problem) -> Step:
    """Forward and backward of a rank's part of the model, and the update of its shard."""
    model = problem.model()
    alone(model, problem.mesh["tp"].size())
    return limit_step(problem, model)


def paused_limit(problem: Problem) -> Step:
    """:func:`limit` with rests: half of the time in the blocks, a quarter before the update and one after it."""
    model = problem.model()
    alone(model, problem.mesh["tp"].size())
    ms = problem.pause_ms
    add_points(model, functools.partial(rest, ms / 2 / (8 * len(model.blocks))))
    outside = functools.partial(rest, ms / 4)
    return limit_step(problem, model, before_update=outside, after_update=outside)


def limit_step(
    problem: Problem,
    model: Decoder,
    before_update: Callable[[], object] = lambda: None,
    after_update: Callable[[], object] = lambda: None,
) -> Step:
    """Return the step of a rank's part of the model, with the update of its shard."""
    tokens, targets = (ids % model.output.out_features for ids in (problem.tokens, problem.targets))
    count = sum(param.numel() for param in model.parameters()) // problem.mesh["dp"].size()
    share = torch.zeros(count, device=device(), dtype=problem.dtype)
    share.grad = torch.zeros_like(share)
    optimizer = torch.optim.AdamW([share], lr=LR, fused=CUDA)

    def step() -> Tensor:
        loss = problem.backward(model, tokens, targets)
        before_update()
        optimizer.step()
        after_update()
        model.zero_grad()
        return loss

    return step


# ---------------------------------------------------------------- arms

STOCK: dict[str, Callable[[Problem], Step]] = {
    "limit": limit,
    "limit, pauses": paused_limit,
    "stock": trained,
    "stock, bucket view": lambda problem: trained(problem, gradient_as_bucket_view=True),
}
NONE = "ovpatch, no overlap"
BULK, AUTO = {"schedule": "bulk"}, {"schedule": "auto"}
FUSED, COPY = {"schedule": "fused"}, {"schedule": "copy"}
OFF: dict[str, dict[str, Any]] = {
    "ddp": {"overlap_grad_reduce": False},
    "dist_optimizer": {"overlap_param_gather": False},
    "tp_linear": {"schedule": "stock"},
}
ALL: dict[str, dict[str, Any]] = {"ddp": {}, "dist_optimizer": {}, "tp_linear": BULK}
# The features that are on, with their options.
OURS: dict[str, dict[str, dict[str, Any]]] = {
    NONE: OFF,
    "ovpatch, grad reduce": OFF | {"ddp": {}},
    "ovpatch, param gather": OFF | {"dist_optimizer": {}},
    "ovpatch, TP overlap": OFF | {"tp_linear": BULK},
    "ovpatch, TP overlap, auto": OFF | {"tp_linear": AUTO},
    "ovpatch, all": ALL,
    "ovpatch, all, auto": ALL | {"tp_linear": AUTO},
    "ovpatch, all, fused": ALL | {"tp_linear": FUSED},
    "ovpatch, all, copy": ALL | {"tp_linear": COPY},
    "ovpatch, ddp and tp_linear": {"ddp": {}, "tp_linear": BULK},
}
ARMS = [*STOCK, *OURS]


@contextlib.contextmanager
def built(
    name: str, problem: Problem
) -> Iterator[tuple[Step, Callable[[], dict[str, dict[str, Any]]]]]:
    """Build an arm's step with its features applied, and a function that returns the features' state."""
    if name in STOCK:
        yield STOCK[name](problem), dict
        return
    with ovpatch.applied(*OURS[name], options=OURS[name]) as before:
        yield trained(problem), lambda: since(before, OURS[name])


def since(before: ovpatch.Report, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the features' states with reasons, and their counts since a report."""
    chosen, found = autotuner.report_lines("tp_linear"), {}
    for name in names:
        now, then = ovpatch.report()[name], before[name].counters
        counted = {counter: count - then[counter] for counter, count in now.counters.items()}
        # The result lists the remaining remarks once, for all arms.
        remarks = [remark for remark in now.remarks if remark not in chosen]
        found[name] = {
            "state": now.state,
            "reason": now.reason,
            "counters": counted,
            "remarks": remarks,
        }
    return found


def measure(name: str, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Run one arm once."""
    problem = Problem(args, mesh)
    with built(name, problem) as (step, description):
        gpu = GpuState(device())
        found = clocked(step, args, lambda step, steps: gpu.watch(running, step, steps))
        # `running` runs one step more than it times.
        found["gpu"] = gather_states(gpu, args.steps + 1)
        if args.profile and name not in args.profiled:
            profile(step, args.profile / f"{name.replace(', ', '-').replace(' ', '_')}.json.gz")
            args.profiled.add(name)
        loss = step()
        value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
        features = description()
        del step, loss
        # Otherwise reverting would gather tensors that are no longer used.
        gc.collect()
    gc.collect()
    # After an error this would wait for ranks without an error.
    dist.barrier()
    # After the barrier, no peer copies from this arm's memory any longer.
    drop_values(Retention, mesh["dp"].get_group())
    if CUDA:
        torch.cuda.empty_cache()
    row = {"arm": name, **found, "loss": round(value, 4), "features": features}
    return row | speed(statistics.median(found["ms"]), args)


def gather_states(gpu: GpuState, steps: int) -> list[dict[str, float]]:
    """Return the medians of each rank's GPU and its joules of a step; empty without GPUs."""
    states: list[Any] = [None] * dist.get_world_size()
    own = gpu.medians()
    if own and gpu.joules is not None:
        own["joules"] = round(gpu.joules / steps, 1)
    dist.all_gather_object(states, own)
    return [state for state in states if state]


def profile(step: Step, path: Path) -> None:
    """Write the trace of three steps; all ranks step, rank 0 is traced."""
    if dist.get_rank():
        for _ in range(4):
            step()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profiler:
        for _ in range(4):
            step()
            profiler.step()
        if CUDA:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def speed(ms: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return TFLOP/s per GPU, and the share of its peak, None where the peak is unknown."""
    tflops = args.flops / ms / 1e9
    return {
        "tflops": round(tflops, 1),
        "mfu": round(tflops / args.peak_tflops, 3) if args.peak_tflops else None,
    }


def compared(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return a table of the arms, against stock and against no overlap."""
    arms = {name: merged(rows, name) for name in dict.fromkeys(row["arm"] for row in rows)}
    losses = {row["arm"]: row["loss"] for row in rows}
    lines = [
        f"\n{'arm':28}{'ms':>10}{'TFLOP/s':>9}{'MFU':>7}{'/ stock':>9}{'/ none':>8}{'GiB':>8}{'loss':>9}"
    ]
    for name, row in arms.items():
        ms, fast = row["median_ms"], speed(row["median_ms"], args)
        mfu = "" if fast["mfu"] is None else f"{fast['mfu']:.1%}"
        ratios = [
            f"{arms[peer]['median_ms'] / ms:.3f}" if peer in arms else ""
            for peer in ("stock", NONE)
        ]
        lines.append(
            f"{name:28}{ms:10.2f}{fast['tflops']:9.1f}{mfu:>7}{ratios[0]:>9}{ratios[1]:>8}"
            f"{row['peak_gib']:8.2f}{losses[name]:9.4f}"
        )
    return "\n".join([*lines, *remarks(rows)])


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each feature of an arm that is not on, or that has something to say."""
    lines = []
    for row in rows:
        for feature, how in row["features"].items():
            said = "; ".join(filter(None, [how["reason"], *how["remarks"]]))
            if said or how["state"] != "applied":
                lines.append(f"{row['arm']}: {feature} {how['state']}: {said}")
    return list(dict.fromkeys(lines))


# Sizes of a model that are split among the ranks that share it.
DIVIDED = ("heads", "groups", "hidden", "vocabulary", "context")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--size", choices=SIZES, default="8b")
    made.add_argument(
        "--tp", type=int, default=4, help="ranks that share a model; data parallelism uses the rest"
    )
    made.add_argument("--layers", type=int, help="blocks, if not as many as the size has")
    made.add_argument(
        "--context", type=int, help="tokens of a sequence, if not as many as the size has"
    )
    made.add_argument(
        "--batch", type=int, help="sequences in a step and replica, if not as many as the size has"
    )
    made.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of weights; fp32: autocast to bf16",
    )
    made.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    made.add_argument(
        "--pause-ms", type=float, default=34.0, help="rests of a step of the arm 'limit, pauses'"
    )
    made.add_argument("--profile", type=Path, help="folder for a trace of each arm")
    made.set_defaults(profiled=set())
    add_timing(made, rounds=2)
    return made


def objection(args: argparse.Namespace, world: int) -> str:
    """Return the reason against this cut of a model, or ""."""
    if args.tp < 1 or world % args.tp:
        return f"--tp {args.tp} does not divide {world} processes; start a multiple of it"
    uneven = [name for name in DIVIDED if getattr(shape_of(args), name) % args.tp]
    return (
        f"--tp {args.tp} is no divisor of the model's {', '.join(uneven)}; give one that does"
        if uneven
        else ""
    )


def describe(args: argparse.Namespace) -> None:
    """Add to the arguments what follows from them: the model, FLOPs per GPU and step, and a GPU's peak."""
    shape = shape_of(args)
    args.model, args.parameters = dataclasses.asdict(shape), parameters(shape)
    args.flops = flops_per_step(shape, shape.batch * shape.context) / args.tp
    args.peak_tflops = PEAK_TFLOPS.get(torch.cuda.get_device_name()) if CUDA else None


def main() -> None:
    """Run all arms and print tables on rank 0."""
    made = parser()
    args = made.parse_args()
    if wrong := objection(args, int(os.environ["WORLD_SIZE"])):
        made.error(wrong)
    start()
    describe(args)
    mesh = mesh_of(args)
    rows: list[dict[str, Any]] = []

    def measured(name: str) -> dict[str, Any]:
        rows.append(measure(name, args, mesh))
        return rows[-1]

    alternate("ablation", args.arms, measured, args)
    if dist.get_rank() == 0:
        print(compared(rows, args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

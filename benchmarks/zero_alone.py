"""One rank of many, alone: its memory, and the time of its work, without communication.

    python -m benchmarks.zero_alone --world 8 --size 3.8b --json benchmarks/results/zero_alone.jsonl

The arms of ``zero_step`` run on a process group of torch's backend ``fake``, whose collectives return immediately. One
rank allocates, copies, casts and updates as in a job of the given size. So the difference to the arm ``limit`` is an
arm's cost on device and host without the network. Sums of copy engines' arms are left out. Each arm runs in its own
process. NCCL's buffers, a few hundred MiB, are not included.

Power, and with it time, depends on the numbers in GEMMs: GEMMs of NaN are the fastest. So all arms compute with initial
weights in every step: the learning rate is zero, and received data are this rank's data. ovpatch's all-gathers get
these data until times are taken. FSDP2's all-gathers use other memory each time, so they always get these data, by
copies during FSDP2's compute.
Each arm reports its loss.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# This import registers the backend.
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks import zero_step
from benchmarks.runs import CUDA, alternate, clocked, running
from benchmarks.zero_step import OURS, PEERS, Problem, ddp, parser
from ovpatch.overlap.comm import host_barrier, step_flags
from ovpatch.overlap.comm.collectives import (
    AllGather,
    AllReduce,
    Collectives,
    ReduceScatter,
    Work,
    WorkGroup,
)
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.step_flags import StepFlags
from ovpatch_plugins.ddp import nccl_budget
from ovpatch_plugins.dist_optimizer import sharded_grads

_LONGEST_S = 600


def join(world: int) -> None:
    """Join a group as rank 0, without other ranks."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world)


@contextlib.contextmanager
def without_peers(warming: Callable[[], bool], *, copied: bool) -> Iterator[None]:
    """Skip host barriers, and compute collectives as if all ranks had this rank's data: averages are its own.

    Args:
        warming: Whether all-gathers are filled.
        copied: Whether copy engines reduce, which take half-precision gradients as they are.
    """

    def reduced(self: AllReduce, tensors: Sequence[Tensor]) -> Sequence[Work]:
        for votes in tensors:
            if not votes.is_floating_point():
                votes.mul_(dist.get_world_size())
        return [WorkGroup([])]

    def gathered(
        self: AllGather, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Work]:
        pairs = list(zip(outputs, inputs, strict=True))
        # The input may be a view of the output.
        if warming():
            _copy(
                [(to.view(dist.get_world_size(), -1), of.clone().view(1, -1)) for to, of in pairs]
            )
        own = [(_own(to), of.view(-1)) for to, of in pairs]
        _copy([(to, of) for to, of in own if to.data_ptr() != of.data_ptr()])
        return [WorkGroup([])]

    def scattered(
        self: object, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Work]:
        _copy([(part.view(-1), _own(full)) for part, full in zip(outputs, inputs, strict=True)])
        return [WorkGroup([])]

    come = mock.patch.multiple(HostBarrier, arrive=mock.DEFAULT, defer_wait=mock.DEFAULT)
    meet = mock.patch.object(HostBarrier, "wait", lambda self, flag=None: bool(flag))
    # Sums are copied to the host on another stream, which does not wait for a fake collective; and no rank has failed.
    side = mock.patch.object(step_flags, "_side_stream", torch.cuda.current_stream)
    quiet = mock.patch.object(StepFlags, "failed_steps", return_value=[])
    averages = mock.patch.object(nccl_budget, "averages", return_value=True)
    widely = mock.patch.object(Collectives, "reduce_scatter_fp32", scattered)
    copying = (
        mock.patch.multiple(sharded_grads, reduce_scatter_transport=lambda *_: copied or None),
        widely,
    )
    hosts = mock.patch.object(host_barrier, "is_needed", return_value=True)
    ways = ((AllReduce, reduced), (AllGather, gathered), (ReduceScatter, scattered))
    with contextlib.ExitStack() as patches:
        for patch in (come, meet, side, quiet, averages, hosts, *copying):
            patches.enter_context(patch)
        for made, way in ways:
            patches.enter_context(mock.patch.object(made, "__call__", way))
        yield


def _own(full: Tensor) -> Tensor:
    return full.view(dist.get_world_size(), -1)[dist.get_rank()]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)


@contextlib.contextmanager
def stock_alone() -> Iterator[None]:
    """Let the stock reducer reduce by a hook, as a fake work has no future, and FSDP2's sums be this rank's shard."""
    real = DistributedDataParallel.__init__

    @functools.wraps(real)
    def wrapped(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.register_comm_hook(None, noop_hook)

    def scattered(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        _copy([(output.view(-1), _own(input))])

    init = mock.patch.object(DistributedDataParallel, "__init__", wrapped)
    with init, mock.patch.object(dist, "reduce_scatter_tensor", scattered):
        yield


class Losses(Problem):
    """The problem, which remembers the last loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.last = torch.zeros(())

    def backwards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward; kept for the loss, since hooks would delay the release of memory."""
        self.last = super().backwards(*args, **kwargs)
        return self.last


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in this process, which is not fit for another one afterwards."""
    join(args.world)
    problem = Losses(args)
    ours, timing = args.arm in OURS, False

    def clock(step: Callable[[], object], steps: int) -> list[float]:
        nonlocal timing
        timing = True
        return running(step, steps)

    alone = (
        without_peers(lambda: not timing, copied="copy engines" in args.arm)
        if ours
        else stock_alone()
    )
    with alone, mock.patch.object(zero_step, "LR", 0.0):
        if ours:
            features, options, kwargs = OURS[args.arm]
            ovpatch.apply(*features, options=options)
            step = ddp(problem, **kwargs)
        else:
            step = PEERS[args.arm](problem)
        found = clocked(step, args, clock)
    loss = problem.last.item()
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}, so the times belong to other numbers")
    return {"arm": args.arm, **found, "loss": loss, "counters": counted() if ours else {}}


def counted() -> dict[str, int]:
    """Return the feature's counters, which show whether gradients were sharded."""
    counters = ovpatch.report()["dist_optimizer"].counters
    return {name: count for name, count in counters.items() if count}


def in_a_process(name: str) -> dict[str, Any]:
    """Run an arm in its own process.

    Raises:
        RuntimeError: It ended without a result.
    """
    command = [sys.executable, "-m", "benchmarks.zero_alone", *sys.argv[1:], "--arm", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no result within {_LONGEST_S} s") from error
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Run all arms and print a table."""
    made = parser()
    made.description = __doc__
    made.add_argument("--world", type=int, default=8, help="ranks there would be")
    # The parent passes this option to the process of an arm.
    made.add_argument("--arm", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.arm:
        print(json.dumps(run(args)), flush=True)
        # This skips the exit functions of all libraries.
        os._exit(0)
    join(args.world)
    alternate("zero_alone", args.arms, in_a_process, args, chooses=lambda name: False)


if __name__ == "__main__":
    main()

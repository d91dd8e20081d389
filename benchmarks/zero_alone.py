"""One rank of many, alone: what it needs of memory, and how long its own work takes, where nothing is communicated.

    python -m benchmarks.zero_alone --world 8 --size 3.8b --json benchmarks/results/zero_alone.jsonl

The arms are those of ``zero_step``, and the ranks that one of them believes in are not there: the process group is of
torch's backend ``fake``, whose collectives return at once and move nothing. So losses are wrong, and times are those of
no cluster, but what is allocated, copied, cast and updated is what each of so many ranks does. To the time of the arm
``limit`` an arm adds what it costs a device and a host apart from the network. Each arm has a process of its own, and
NCCL's own buffers, a few hundred MiB, are not in it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from benchmarks.runs import CUDA, alternate, clocked, running
from benchmarks.zero_step import OURS, PEERS, Problem, ddp, parser
from ovpatch.overlap.ballot import Ballots
from ovpatch.overlap.collectives import AllReduce
from ovpatch.overlap.gate import Gate
from ovpatch.overlap.works import Work

_LONGEST_S = 600


def join(world: int) -> None:
    """Be rank 0 of a group of which nobody else is there."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world)


@contextmanager
def nobody_there() -> Iterator[None]:
    """Let hosts meet nobody, and whatever ranks vote on be as if all had voted as this one."""
    real = AllReduce.__call__

    def unanimous(self: AllReduce, tensors: Sequence[Tensor]) -> Sequence[Work]:
        works = real(self, tensors)
        for votes in tensors:
            if not votes.is_floating_point():
                votes.mul_(dist.get_world_size())
        return works

    meet = mock.patch.object(Gate, "meet", lambda self, flag=None: bool(flag))
    # A copy on another stream waits for a sum, and no stream waits for a fake one: what it reads is nobody's ballot.
    quiet = mock.patch.multiple(Ballots, count=mock.DEFAULT, losses=mock.Mock(return_value=[]))
    with mock.patch.object(AllReduce, "__call__", unanimous), mock.patch.object(Gate, "come"), meet, quiet:
        yield


@contextmanager
def without_futures() -> Iterator[None]:
    """Let stock's reducer reduce by a hook, for a fake work has no future for it."""
    real = DistributedDataParallel.__init__

    @functools.wraps(real)
    def wrapped(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.register_comm_hook(None, noop_hook)

    with mock.patch.object(DistributedDataParallel, "__init__", wrapped):
        yield


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in this process, which is not fit for another one afterwards."""
    join(args.world)
    problem = Problem(args)
    with nobody_there():
        if args.arm in OURS:
            features, options, kwargs = OURS[args.arm]
            ovpatch.apply(*features, options=options)
            step = ddp(problem, **kwargs)
        else:
            with without_futures():
                step = PEERS[args.arm](problem)
        found = clocked(step, args, running)
    return {"arm": args.arm, **found, "counters": counted() if args.arm in OURS else {}}


def counted() -> dict[str, int]:
    """Return what the feature has counted: an arm that counts no parts of gradients was no such arm."""
    counters = ovpatch.report()["dist_optimizer"].counters
    return {name: count for name, count in counters.items() if count}


def in_a_process(name: str) -> dict[str, Any]:
    """Run an arm in a process of its own.

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
    made.add_argument("--arm", help=argparse.SUPPRESS)  # of one such process
    args = made.parse_args()
    if args.arm:
        print(json.dumps(run(args)), flush=True)
        os._exit(0)  # without asking anybody for anything
    join(args.world)
    alternate("zero_alone", args.arms, in_a_process, args, chooses=lambda name: False)


if __name__ == "__main__":
    main()

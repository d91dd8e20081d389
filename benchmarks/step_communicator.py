"""The cost of a second communicator over the same ranks: memory of the devices, and time, once.

    torchrun --nproc-per-node=2 -m benchmarks.step_communicator

Prints a line of JSON. ``dist_optimizer`` has one for what it issues where stock torch issues nothing
(ovpatch/overlap/comm/step_communicators.py).
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.runs import CUDA, device, start
from ovpatch.overlap.comm.step_communicators import step_communicator

MIB = 1024 * 1024


def used() -> float:
    """Return how many MiB of the device are taken, by whatever; 0 where there is no GPU."""
    if not CUDA:
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def taken(group: dist.ProcessGroup, world: int) -> dict[str, float]:
    """Return the time of a group's first collectives, which connect its ranks."""
    part = torch.zeros(64 * MIB // 4 // world, device=device())
    full = torch.zeros(part.numel() * world, device=device())
    number = torch.zeros(1, device=device())
    before, begin = used(), time.perf_counter()
    dist.all_reduce(number, group=group)
    after_number = used()
    dist.all_gather_into_tensor(full, part, group=group)
    after = used()
    seconds = time.perf_counter() - begin
    return {
        "all-reduce of a number, MiB": after_number - before,
        "all-gather, MiB": after - after_number,
        "s": seconds,
    }


def main() -> None:
    """Measure the default group first, then the second communicator."""
    start()
    group = dist.distributed_c10d._get_default_group()
    found: dict[str, Any] = {
        "ranks": group.size(),
        "torch": torch.__version__,
        "first": taken(group, group.size()),
    }
    begin = time.perf_counter()
    second = step_communicator(group, device())
    found["made, s"] = time.perf_counter() - begin
    found["second"] = taken(second, group.size())
    if group.rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

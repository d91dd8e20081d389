"""All-gathers and reduce-scatters concurrently with GEMMs: the copy engines against NCCL's own ways.

    torchrun --nproc-per-node 2 -m benchmarks.collective_race --json benchmarks/results/collective_race.jsonl

A step is some GEMMs, a collective, and the GEMMs that hide it; ``products alone`` is the limit. The arms:

* ``NCCL``: an ordinary communicator.
* ``NCCL, symmetric``: buffers registered as symmetric windows.
* ``NCCL, zero CTA``: the same with the policy ``NCCL_CTA_POLICY_ZERO``, by which NCCL copies with copy engines.
* ``copy engines``: those of ovpatch.

``alone_ms`` is the time of the collective without GEMMs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.runs import CUDA, add_timing, alternate, device, get_world, running, start, timed
from ovpatch.overlap.comm.collectives import AllGather, ReduceScatter, Work
from ovpatch.overlap.kernels.copy_collectives import Engine

_ROWS = _FEATURES = 4096 if CUDA else 64
WAYS = ("NCCL", "NCCL, symmetric", "NCCL, zero CTA", "copy engines")


class Race:
    """The tensors and GEMMs of all arms.

    Args:
        size: Bytes of a collective's full tensor.
        products: GEMMs concurrent with the collective; three more run before it.
        dtype: Of the collective's tensors.
    """

    def __init__(self, size: int, products: int, dtype: torch.dtype) -> None:
        self._numel = size // dtype.itemsize // dist.get_world_size() * dist.get_world_size()
        self._products, self._dtype = products, dtype
        self._x, self._weight, self._out = (
            torch.randn(_ROWS, _FEATURES, device=device(), dtype=torch.bfloat16) for _ in range(3)
        )
        self._pools: list[Any] = []

    def start_products(self, count: int) -> None:
        """Launch GEMMs."""
        for _ in range(count):
            torch.mm(self._x, self._weight, out=self._out)

    def make_step(self, collective: Callable[[], Sequence[Work]] | None) -> Callable[[], None]:
        """Return a step with a collective and its GEMMs, or with GEMMs alone."""

        def step() -> None:
            self.start_products(3)
            works = collective() if collective else []
            self.start_products(self._products)
            for work in works:
                work.wait()

        return step

    def make_collective(self, way: str, operation: str) -> Callable[[], Sequence[Work]]:
        """Return a function that starts a collective of one of :data:`WAYS`."""
        if way == "copy engines":
            engine = Engine(get_world(), device())
            full, shard = self._tensors(get_world(), registered=False)
            if operation == "all-gather":
                return lambda: engine.gather([full], [shard])
            return lambda: engine.scatter([shard], [full], average=False)
        group = _communicator(zero_cta=way.endswith("zero CTA"))
        full, shard = self._tensors(group, registered=way != "NCCL")
        if operation == "all-gather":
            all_gather = AllGather(group, device())
            return lambda: all_gather([full], [shard])
        reduce_scatter = ReduceScatter(group, device())
        return lambda: reduce_scatter([shard], [full])

    def _tensors(self, group: dist.ProcessGroup, *, registered: bool) -> tuple[Tensor, Tensor]:
        """Return the full tensor, and this rank's shard with its own memory."""

        def draw() -> tuple[Tensor, Tensor]:
            full = torch.randn(self._numel, device=device(), dtype=self._dtype)
            return full, full.chunk(group.size())[group.rank()].clone()

        if not registered:
            return draw()
        backend: Any = group._get_backend(device())
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            tensors = draw()
        backend.register_mem_pool(pool, symm=True)
        self._pools.append(pool)
        return tensors

    def release_pools(self) -> None:
        """Free registered memory while its communicators live; a pool that outlives them aborts the process."""
        gc.collect()
        self._pools.clear()


def _communicator(*, zero_cta: bool) -> dist.ProcessGroup:
    """Return a communicator of all ranks, connected."""
    if not CUDA:
        return get_world()
    # The stubs of torch do not declare the policies.
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    if zero_cta:
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(pg_options=options, device_id=device())
    dist.all_reduce(torch.zeros(1, device=device()), group=group)
    return group


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--operation", choices=["all-gather", "reduce-scatter"], default="all-gather")
    made.add_argument("--mib", type=int, default=256 if CUDA else 1, help="of the full tensor")
    made.add_argument("--products", type=int, default=16, help="beside the collective")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    made.add_argument(
        "--arms",
        nargs="*",
        default=["products alone", *WAYS] if CUDA else ["products alone", "NCCL"],
    )
    add_timing(made, rounds=3)
    return made


def main() -> None:
    """Measure all arms in turn."""
    args = parser().parse_args()
    start()
    race = Race(args.mib << 20, args.products, getattr(torch, args.dtype))
    collectives: dict[str, Callable[[], Sequence[Work]]] = {}

    def measure(arm: str) -> dict[str, Any]:
        if arm != "products alone" and arm not in collectives:
            collectives[arm] = race.make_collective(arm, args.operation)
        collective = collectives.get(arm)
        step = race.make_step(collective)
        timed(step, args.warmup)
        row: dict[str, Any] = {"arm": arm, "ms": running(step, args.steps), "peak_gib": 0.0}
        if collective:
            alone = timed(lambda: [work.wait() for work in collective()], args.steps)
            row["alone_ms"] = statistics.median(alone)
        return row

    alternate("collective_race", args.arms, measure, args)
    collectives.clear()
    race.release_pools()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

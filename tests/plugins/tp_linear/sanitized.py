"""Run the kernels of schedule ``fused``, each a few times on small shapes, for compute-sanitizer::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 torchrun --nproc-per-node 2 --no-python compute-sanitizer --tool memcheck \
        --report-api-errors no --error-exitcode 9 python -m tests.plugins.tp_linear.sanitized

Use ``racecheck`` and ``synccheck`` in the same way. Without torch's cache of memory, every tensor has bounds that
memcheck can check. Torch queries the driver whether hosts can share memory, and handles a no, which is not an error.
Ranks communicate over gloo, so that only our kernels and torch's run. Ranks may share a GPU, if
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1 and LOCAL_RANK is 0 for all of them. The exit status is 1 if a result is
wrong, and 9 if the tool finds a fault.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.symmetric_memory import Workspace
from ovpatch.overlap.tensor_parallel import triton_launch as launch
from ovpatch.overlap.tensor_parallel.triton_launch import Tiles

CUTS = (Tiles(), Tiles(columns=128, stages=2, split=True, pullers=3, width=64))
# Rows of a rank, features, and features of each GEMM.
SHAPES = (
    (130, 136, (264,)),
    (128, 64, (40, 8, 256)),
    (1, 8, (16, 24)),
)


class Numbers:
    """Integers for GEMMs whose sums are exact; every rank can draw the numbers of any rank."""

    def __init__(self, device: torch.device) -> None:
        self._seeds, self._device = itertools.count(1), device

    def __call__(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(next(self._seeds))
        return torch.randint(-1, 2, shape, generator=generator).bfloat16().to(self._device)


def gathered(
    space: Workspace, drawn: Numbers, m: int, k: int, features: tuple[int, ...], cut: Tiles
) -> bool:
    """Gather and multiply; if tiles are stored in halves, with biases and transposed weights."""
    xs = [drawn(m, k) for _ in range(space.world)]
    weights = [drawn(k, n).t() if cut.split else drawn(n, k) for n in features]
    biases = [drawn(n) if cut.split else None for n in features]
    found = launch.gather_linear(space, xs[space.rank], weights, biases, tiles=cut)
    assert found is not None
    outs, rows = found
    right = torch.equal(rows, torch.cat(xs))
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        wanted = torch.cat(xs).float() @ weight.float().t()
        right &= torch.equal(out, (wanted if bias is None else wanted + bias.float()).bfloat16())
    return right


def scattered(
    space: Workspace, drawn: Numbers, m: int, k: int, features: tuple[int, ...], cut: Tiles
) -> bool:
    """Multiply and sum; if tiles are stored in halves, rank 0 stores a GEMM that was computed before."""
    rows = space.world * m
    xs = [[drawn(rows, n) for n in features] for _ in range(space.world)]
    weights = [
        [drawn(k, n) if cut.split else drawn(n, k).t() for n in features]
        for _ in range(space.world)
    ]
    biases = [drawn(k) for _ in range(space.world)]
    terms = [
        sum(
            (x.float() @ w.float().t() for x, w in zip(*pair, strict=True)), bias.float()
        ).bfloat16()
        for *pair, bias in zip(xs, weights, biases, strict=True)
    ]
    if cut.split and space.rank == 0:
        out = launch.scatter(space, terms[0])
    else:
        out = launch.linear_scatter(
            space, xs[space.rank], weights[space.rank], biases[space.rank], tiles=cut
        )
    wanted = sum((term.float() for term in terms), torch.zeros(())).bfloat16()
    return out is not None and torch.equal(out, wanted[space.rank * m :][:m])


def wrong(space: Workspace) -> Iterator[str]:
    """Yield the names of wrong results; each launch runs twice, the second time as a prepared launch."""
    drawn = Numbers(space.device)
    for shape, cut, _ in itertools.product(SHAPES, CUTS, range(2)):
        for operator in (gathered, scattered):
            if not operator(space, drawn, *shape, cut):
                yield f"{operator.__name__}, {shape}, {cut}"


def main() -> int:
    """Run all cases on this rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    if objection := memory.unsupported_reason(group, device):
        sys.exit(f"the kernels cannot run here: {objection}")
    found = list(wrong(Workspace(group, device)))
    torch.cuda.synchronize()
    # A rank must not free memory that the kernel of a peer still signals into.
    dist.barrier()
    print(f"rank {dist.get_rank()}: " + ("; ".join(found) or "all is right"), flush=True)
    dist.destroy_process_group()
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

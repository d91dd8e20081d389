"""The interpreted kernels of schedule ``fused``, with all ranks in one process: each value reaches its place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels import workspace_kernels as kernels
from ovpatch.overlap.kernels.symmetric_memory import HEADER, Memory, Workspace
from ovpatch.overlap.tensor_parallel import triton_launch as launch
from ovpatch.overlap.tensor_parallel.triton_gemm import (
    gather_gemm_kernel,
    gemm_scatter_kernel,
    reduce_kernel,
    scatter_kernel,
    stage_kernel,
)
from ovpatch.overlap.tensor_parallel.triton_launch import Tiles
from tests.support.interpreter import interpreted
from tests.support.rarely import ALL_CASES

SMALL = Tiles(rows=16, columns=16, depth=16, group=2, pullers=2, width=32)
CUTS = (SMALL, Tiles(rows=32, columns=32, depth=32, group=1, split=True, pullers=3, width=16))


class Group:
    """The part of a process group that a workspace reads."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


def workspaces(world: int) -> list[Workspace]:
    """Return one workspace for each rank, over buffers full of values that no kernel may use."""
    buffers: dict[int, list[Tensor]] = {}

    def allocate(size: int, group: Any, device: torch.device, prepare: Any) -> Memory:
        made = buffers.setdefault(
            size, [torch.full((size,), 255, dtype=torch.uint8) for _ in range(world)]
        )
        prepare(made[group.rank()])
        return Memory(made[group.rank()], [buffer.data_ptr() for buffer in made])

    found = [Workspace(Group(rank, world), torch.device("cpu"), allocate) for rank in range(world)]
    for space in found:
        assert space.begin_operator(1 << 16, 256)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).half()  # sums are exact


def nothing(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float16)


def stage(workspace: Workspace, x: Tensor, gathered: Tensor, cut: Tiles) -> None:
    blocks = workspace.world * -(-len(x) // cut.rows)
    common = (workspace.peers, workspace.state, workspace.counts)
    stage_kernel[(3,)](
        x, gathered, *common, blocks, workspace.rank, x.numel(), workspace.half_bytes, workspace.world, 64
    )  # fmt: skip


def multiply(
    workspace: Workspace,
    gathered: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    cut: Tiles,
) -> list[Tensor]:
    three, (rows, k) = launch._pad_to_three, gathered.shape
    outs = [nothing(rows, len(weight)) for weight in weights]
    gather_gemm_kernel[(cut.pullers + 3,)](
        gathered, *three(weights), *three(biases), *three(outs), workspace.peers, workspace.state, workspace.counts,
        workspace.rank, rows // workspace.world, k, *three([len(weight) for weight in weights], 0),
        workspace.half_bytes, cut.pullers, len(weights), launch._is_transposed(weights[0]), workspace.world,
        cut.rows, cut.columns, cut.depth, cut.group, cut.split, cut.width,
    )  # fmt: skip
    return outs


def send(
    workspace: Workspace, xs: list[Tensor], weights: list[Tensor], bias: Tensor | None, cut: Tiles
) -> None:
    three, m = launch._pad_to_three, len(xs[0]) // workspace.world
    gemm_scatter_kernel[(4,)](
        *three(xs), *three(weights), bias, workspace.peers, workspace.state, workspace.rank, m, len(weights[0]),
        *three([x.shape[1] for x in xs], 0), workspace.half_bytes, len(xs), launch._is_transposed(weights[0]),
        workspace.world, cut.rows, cut.columns, cut.depth, cut.group, cut.split,
    )  # fmt: skip


def send_as_is(workspace: Workspace, x: Tensor) -> None:
    size = x.numel() // workspace.world
    scatter_kernel[(4,)](
        x, workspace.peers, workspace.state, workspace.rank, size, workspace.half_bytes, workspace.world, 64
    )  # fmt: skip


def add_up(workspace: Workspace, m: int, n: int) -> Tensor:
    out = nothing(m, n)
    reduce_kernel[(3,)](
        out, workspace.peers, workspace.state, workspace.rank, m * n, workspace.half_bytes, workspace.world, 64
    )  # fmt: skip
    return out


def turned(weights: list[Tensor], transposed: bool) -> list[Tensor]:
    return [weight.t().contiguous().t() for weight in weights] if transposed else weights


class Problem:
    """Rows and weights of all ranks, and the results that kernels must compute."""

    def __init__(
        self, world: int, m: int, k: int, features: tuple[int, ...], transposed: bool
    ) -> None:
        self.m, self.k = m, k
        self.xs = [drawn(m, k) for _ in range(world)]
        self.weights = [turned([drawn(n, k) for n in features], transposed) for _ in range(world)]
        self.biases = [[drawn(n) if transposed else None for n in features] for _ in range(world)]
        self.inputs = [[drawn(world * m, n) for n in features] for _ in range(world)]
        self.backs = [turned([drawn(k, n) for n in features], transposed) for _ in range(world)]
        self.gathered = torch.cat(self.xs)
        self.added = [drawn(k) if transposed else None for _ in range(world)]
        self.sum = sum(self.term(rank) for rank in range(world))
        self.buffers = [nothing(world * m, k) for _ in range(world)]

    def term(self, rank: int) -> Tensor:
        pairs, bias = zip(self.inputs[rank], self.backs[rank], strict=True), self.added[rank]
        return sum(
            (x.float() @ w.float().t() for x, w in pairs),
            torch.zeros(()) if bias is None else bias.float(),
        )


def is_gathered(problem: Problem, rank: int, outs: list[Tensor]) -> bool:
    right = torch.equal(problem.buffers[rank], problem.gathered)
    for out, weight, bias in zip(outs, problem.weights[rank], problem.biases[rank], strict=True):
        wanted = torch.nn.functional.linear(problem.gathered.float(), weight.float())
        right &= torch.equal(out, (wanted if bias is None else wanted + bias.float()).half())
    return right


def is_sum(problem: Problem, rank: int, out: Tensor) -> bool:
    # Terms are rounded.
    return bool(((out.float() - problem.sum[rank * problem.m :][: problem.m]).abs() < 1).all())


# Rows of a rank, input features, and output features.
Shape = tuple[int, int, tuple[int, ...]]
SHAPES: tuple[Shape, ...] = (
    (20, 40, (24,)),
    (16, 16, (8, 24, 40)),
    (1, 8, (16, 8)),
    (35, 24, (48,)),
    (17, 32, (24, 8)),
)


def wrong(world: int, shapes: tuple[Shape, ...]) -> list[str]:
    """Return the names of wrong results of operators in turn over the same two halves, with ranks in many orders."""
    found, spaces = [], workspaces(world)
    torch.manual_seed(world)
    orders = itertools.cycle(list(itertools.permutations(range(world)))[:: max(1, world - 2) ** 3])
    for i, ((m, k, features), cut) in enumerate(zip(shapes, itertools.cycle(CUTS), strict=False)):
        problem = Problem(world, m, k, features, transposed=i % 2 == 1)
        name = f"world {world}, {m} x {k} -> {features}, {cut}"
        for rank in next(orders):
            stage(spaces[rank], problem.xs[rank], problem.buffers[rank], cut)
        for rank in next(orders):
            outs = multiply(
                spaces[rank],
                problem.buffers[rank],
                problem.weights[rank],
                problem.biases[rank],
                cut,
            )
            if not is_gathered(problem, rank, outs):
                found.append(f"gathered on rank {rank}: {name}")
        for rank in next(orders):
            if rank == 0 and i % 3 == 0:
                send_as_is(spaces[rank], problem.term(rank).half())
            else:
                send(
                    spaces[rank],
                    problem.inputs[rank],
                    problem.backs[rank],
                    problem.added[rank],
                    cut,
                )
        for rank in next(orders):
            if not is_sum(problem, rank, add_up(spaces[rank], m, k)):
                found.append(f"summed on rank {rank}: {name}")
    states = {tuple(space.state.tolist()) for space in spaces}
    if states != {(1 + 2 * len(shapes), *[0] * 7)}:
        found.append(f"states {states}")
    return found


def ahead(world: int) -> list[str]:
    """Return the names of wrong results if one rank is an operator ahead of its peers, in the other half."""
    found, spaces = [], workspaces(world)
    first, second = (Problem(world, 20, 24, (16,), transposed=False) for _ in range(2))
    for space, x, buffer in zip(spaces, first.xs, first.buffers, strict=True):
        stage(space, x, buffer, SMALL)
    for rank in range(world):
        outs = multiply(
            spaces[rank], first.buffers[rank], first.weights[rank], first.biases[rank], SMALL
        )
        found += [] if is_gathered(first, rank, outs) else [f"first on rank {rank}"]
        # Later ranks still have to fetch the rows that this rank staged before.
        stage(spaces[rank], second.xs[rank], second.buffers[rank], SMALL)
    for rank in reversed(range(world)):
        outs = multiply(
            spaces[rank], second.buffers[rank], second.weights[rank], second.biases[rank], SMALL
        )
        found += [] if is_gathered(second, rank, outs) else [f"second on rank {rank}"]
        send(spaces[rank], second.inputs[rank], second.backs[rank], second.added[rank], SMALL)
    for rank in range(world):
        found += (
            [] if is_sum(second, rank, add_up(spaces[rank], 20, 24)) else [f"third on rank {rank}"]
        )
    return found


def every_case(shapes: Sequence[Shape]) -> list[str]:
    return [*wrong(2, shapes), *wrong(3, shapes[:3]), *wrong(8, ((17, 24, (24,)),)), *ahead(3)]


def test_every_number_goes_where_it_belongs():
    assert interpreted(every_case, SHAPES if ALL_CASES else SHAPES[1:3]) == []


def test_kernels_and_hosts_lay_out_memory_the_same():
    assert kernels.HEADER.value == HEADER
    assert kernels.RANKS.value >= memory.MOST_RANKS
    assert 8 * (kernels.DONE.value + kernels.RANKS.value) <= HEADER
    assert kernels.READY.value + kernels.RANKS.value <= kernels.DONE.value

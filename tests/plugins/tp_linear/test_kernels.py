"""The kernels of schedule ``fused``, interpreted, with all ranks in one process: which numbers go where, and when."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ovpatch.overlap.symmetric.memory import Memory
from ovpatch.overlap.symmetric.workspace import Workspace
from ovpatch_plugins.tp_linear.kernels import launch, tuning
from ovpatch_plugins.tp_linear.kernels.gather_gemm import _push, gather_gemm_kernel
from ovpatch_plugins.tp_linear.kernels.gemm_scatter import gemm_scatter_kernel, reduce_kernel, scatter_kernel
from ovpatch_plugins.tp_linear.kernels.tuning import Tiles
from tests.support.interpreter import interpreted

SMALL = Tiles(rows=16, columns=16, depth=16, group=2, pushers=2, width=32)
CUTS = (SMALL, Tiles(rows=32, columns=32, depth=32, group=1, split=True, pushers=3, width=16))


class Group:
    """What a workspace asks a process group."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


def workspaces(world: int) -> list[Workspace]:
    """One workspace a rank, over buffers that are full of what no kernel may use."""
    buffers: dict[int, list[Tensor]] = {}

    def allocate(size: int, group: Any, device: torch.device, prepare: Any) -> Memory:
        made = buffers.setdefault(size, [torch.full((size,), 255, dtype=torch.uint8) for _ in range(world)])
        prepare(made[group.rank()])
        return Memory(made[group.rank()], [buffer.data_ptr() for buffer in made])

    found = [Workspace(Group(rank, world), torch.device("cpu"), allocate) for rank in range(world)]
    for workspace in found:
        assert workspace.begin(1 << 16, 256)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).half()  # sums are exact


def nothing(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float16)


def push(workspace: Workspace, x: Tensor, cut: Tiles) -> None:
    """What the first programs of the kernel do, before any program waits for what they do on other ranks."""
    (m, k), sequence = x.shape, int(workspace.state[0])
    _push[(cut.pushers,)](
        x, workspace.peers, sequence, workspace.rank, m, k, workspace.half_bytes, workspace.world,
        cut.rows, cut.width, cut.pushers,
    )  # fmt: skip


def multiply(
    workspace: Workspace,
    x: Tensor,
    whole: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor | None],
    cut: Tiles,
) -> list[Tensor]:
    """What the other programs do."""
    three, (m, k) = launch._three, x.shape
    outs = [nothing(workspace.world * m, len(weight)) for weight in weights]
    gather_gemm_kernel[(3,)](
        x, whole, workspace.peers, workspace.state, *three(weights), *three(biases), *three(outs),
        workspace.rank, m, k, *three([len(weight) for weight in weights], 0), workspace.half_bytes,
        len(weights), bool(weights) and launch._is_transposed(weights[0]), workspace.world,
        cut.rows, cut.columns, cut.depth, cut.group, cut.split, 0, cut.width,
    )  # fmt: skip
    return outs


def send(workspace: Workspace, xs: list[Tensor], weights: list[Tensor], cut: Tiles) -> None:
    three, m = launch._three, len(xs[0]) // workspace.world
    gemm_scatter_kernel[(4,)](
        *three(xs), *three(weights), workspace.peers, workspace.state, workspace.rank, m, len(weights[0]),
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
    """Rows and weights of all ranks, and what is to come out."""

    def __init__(self, world: int, m: int, k: int, features: tuple[int, ...], transposed: bool) -> None:
        self.m, self.k = m, k
        self.xs = [drawn(m, k) for _ in range(world)]
        self.weights = [turned([drawn(n, k) for n in features], transposed) for _ in range(world)]
        self.biases = [[drawn(n) if transposed else None for n in features] for _ in range(world)]
        self.inputs = [[drawn(world * m, n) for n in features] for _ in range(world)]
        self.backs = [turned([drawn(k, n) for n in features], transposed) for _ in range(world)]
        self.whole = torch.cat(self.xs)
        every = zip(self.inputs, self.backs, strict=True)
        self.sum = sum(x.float() @ w.float().t() for xs, ws in every for x, w in zip(xs, ws, strict=True))
        self.wholes = [nothing(world * m, k) for _ in range(world)]


def is_gathered(problem: Problem, rank: int, outs: list[Tensor], kept: bool = True) -> bool:
    right = not kept or torch.equal(problem.wholes[rank], problem.whole)
    for out, weight, bias in zip(outs, problem.weights[rank], problem.biases[rank], strict=True):
        wanted = torch.nn.functional.linear(problem.whole.float(), weight.float())
        right &= torch.equal(out, (wanted if bias is None else wanted + bias.float()).half())
    return right


def gathered(problem: Problem, space: Workspace, cut: Tiles, way: int) -> bool:
    """Whether a rank gathers and multiplies right: with all rows kept, without, or nothing but rows."""
    rank = space.rank
    x, whole = problem.xs[rank], problem.wholes[rank]
    if way == 2:
        multiply(space, x, whole, [], [], cut)
        return torch.equal(whole, problem.whole)
    outs = multiply(space, x, None if way else whole, problem.weights[rank], problem.biases[rank], cut)
    return is_gathered(problem, rank, outs, kept=not way)


def is_sum(problem: Problem, rank: int, out: Tensor) -> bool:
    return bool(((out.float() - problem.sum[rank * problem.m :][: problem.m]).abs() < 1).all())  # terms are rounded


SHAPES = ((20, 40, (24,)), (16, 16, (8, 24, 40)), (1, 8, (16, 8)), (35, 24, (48,)), (17, 32, (24, 8)))


def wrong(world: int, cases: int) -> list[str]:
    """Names of what comes out wrong: operators in turn, over the same two halves, ranks in many orders."""
    found, spaces = [], workspaces(world)
    torch.manual_seed(world)
    orders = itertools.cycle(list(itertools.permutations(range(world)))[:: max(1, world - 2) ** 3])
    for i, ((m, k, features), cut) in enumerate(itertools.islice(zip(SHAPES, itertools.cycle(CUTS)), cases)):
        problem = Problem(world, m, k, features, transposed=i % 2 == 1)
        name = f"world {world}, {m} x {k} -> {features}, {cut}"
        for rank in next(orders):
            push(spaces[rank], problem.xs[rank], cut)
        for rank in next(orders):
            if not gathered(problem, spaces[rank], cut, (i + rank) % 3):
                found.append(f"gathered on rank {rank}: {name}")
        for rank in next(orders):
            if rank == 0 and i % 3 == 0:
                terms = zip(problem.inputs[rank], problem.backs[rank], strict=True)
                send_as_is(spaces[rank], sum(x.float() @ w.float().t() for x, w in terms).half())
            else:
                send(spaces[rank], problem.inputs[rank], problem.backs[rank], cut)
        for rank in next(orders):
            if not is_sum(problem, rank, add_up(spaces[rank], m, k)):
                found.append(f"summed on rank {rank}: {name}")
    states = {tuple(space.state.tolist()) for space in spaces}
    if states != {(1 + 2 * cases, *[0] * 7)}:
        found.append(f"states {states}")
    return found


def ahead(world: int) -> list[str]:
    """Names of what comes out wrong where one rank is an operator ahead of the others, in the other half."""
    found, spaces = [], workspaces(world)
    first, second = (Problem(world, 20, 24, (16,), transposed=False) for _ in range(2))
    for space, x in zip(spaces, first.xs, strict=True):
        push(space, x, SMALL)
    for rank in range(world):
        found += [] if gathered(first, spaces[rank], SMALL, 0) else [f"first on rank {rank}"]
        push(spaces[rank], second.xs[rank], SMALL)  # the ranks behind this one still need what it pushed before
    for rank in reversed(range(world)):
        found += [] if gathered(second, spaces[rank], SMALL, 0) else [f"second on rank {rank}"]
        send(spaces[rank], second.inputs[rank], second.backs[rank], SMALL)
    for rank in range(world):
        found += [] if is_sum(second, rank, add_up(spaces[rank], 20, 24)) else [f"third on rank {rank}"]
    return found


def every_case() -> list[str]:
    return [*wrong(2, 5), *wrong(3, 3), *wrong(8, 1), *ahead(3)]


def test_every_number_goes_where_it_belongs():
    assert interpreted(every_case) == []


def test_tiles_are_chosen_by_how_many_turns_they_take():
    assert tuning.tiles_of(1024, [4096], 8, 132) == tuning.WIDE
    assert tuning.tiles_of(512, [1536], 8, 132) == tuning.NARROW, "3 short turns instead of 2 long ones"
    for world, programs in ((2, 132), (8, 132), (8, 3)):
        cut = tuning.tiles_beside_pushers(1024, [512, 512], world, programs)
        assert 0 < cut.pushers < programs
    assert tuning.tiles_beside_pushers(1024, [], 2, 132).pushers > 0, "rows alone are pushed, too"

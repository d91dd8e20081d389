"""Schedules ``fused`` and ``copy`` on GPUs: their values, also with streams, graphs, growing buffers and late ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.tensor_parallel.schedules import fused
from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS
from tests.plugins.tp_linear import test_llama
from tests.plugins.tp_linear.arms import both, device

pytestmark = pytest.mark.gpu(2)

NCCL = {"backend": "nccl", "timeout": 180}
SHAPES = ((512, 1024, (2048,)), (300, 520, (264, 136, 512)), (1, 64, (8,) * 5), (77, 72, (12, 16)))


def draw_integers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random integers for small GEMMs whose sums are exact."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device=device()).to(dtype)


def column(x: Tensor, weights: list[Tensor], schedule: str) -> list[Tensor]:
    """Return the outputs and gradients of a gather for several linears."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *weights)]
    outs = all_gather_linear(leaves[0], leaves[1:], dist.group.WORLD, schedule=schedule)
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return [*outs, *(leaf.grad for leaf in leaves)]


def row(x: Tensor, weight: Tensor, schedule: str) -> list[Tensor]:
    """Return the output and gradients of a linear that is reduced."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
    out = linear_reduce_scatter(*leaves, dist.group.WORLD, schedule=schedule)
    out.backward(torch.ones_like(out))
    return [out, *(leaf.grad for leaf in leaves)]


def regrouped() -> list[Any]:
    """Return whether groups that are created and destroyed compute the right values."""
    rank, found = dist.get_rank(), []
    x, weight = draw_integers(64, 128, seed=rank), draw_integers(256, 128, seed=9)
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        used = COUNTERS.fused
        (out,) = all_gather_linear(x, [weight], group, schedule="fused")
        (stock,) = all_gather_linear(x, [weight], group, schedule="stock")
        found.append(torch.equal(out, stock) and COUNTERS.fused == used + 1)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    return found


def test_groups_come_and_go(ranks, gpus):
    for found in ranks(gpus)(regrouped, **NCCL):
        assert all(found), found


def pair(
    seed: int, m: int = 256, k: int = 512, n: int = 384
) -> tuple[Callable[[], Tensor], Tensor]:
    """Return a column and a row linear as one call without gradients, and their input, which may be overwritten."""
    rank = dist.get_rank()
    x, up = draw_integers(m, k, seed=seed + rank), draw_integers(n, k, seed=seed + 10)
    down = draw_integers(k, n, seed=seed + 20)

    def call(schedule: str = "fused") -> Tensor:
        with torch.no_grad():
            (h,) = all_gather_linear(x, [up], dist.group.WORLD, schedule=schedule)
            return linear_reduce_scatter(h.clamp(-4, 4), down, dist.group.WORLD, schedule=schedule)

    return call, x


def late(rounds: int, schedule: str) -> int:
    """Return the number of wrong values of calls on two streams; ranks and streams are late at random."""
    calls = [pair(seed)[0] for seed in (1, 2)]
    wanted = [call(schedule) for call in calls]
    for call, right in zip(calls, wanted, strict=True):
        assert torch.allclose(call("stock").float(), right.float(), 1e-2, 1.0)
    streams, chance = (
        [torch.cuda.Stream() for _ in calls],
        torch.Generator().manual_seed(dist.get_rank()),
    )
    counts = [torch.zeros((), dtype=torch.int64, device=device()) for _ in calls]
    torch.cuda.synchronize()
    for i in range(rounds):
        for call, stream, right, count in zip(calls, streams, wanted, counts, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(torch.randint(300_000, (), generator=chance)))
                count += (call(schedule) != right).sum()
        if i % 7 == 0:
            time.sleep(float(torch.rand((), generator=chance)) / 500)
    torch.cuda.synchronize()
    return int(sum(counts))


@pytest.mark.parametrize("schedule", ["fused", "copy"])
def test_late_ranks_and_streams_change_nothing(ranks, gpus, schedule):
    assert ranks(gpus)(late, 1000, schedule, **NCCL) == [0] * gpus


def replayed() -> list[bool]:
    """Return whether a graph of three operators, and eager calls between replays, compute the values of eager calls."""
    call, x = pair(1)
    small, _ = pair(5, m=96)
    wanted_small, found = small(), []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    up = draw_integers(384, 512, seed=3)
    with torch.cuda.graph(graph):
        out = call()
        with torch.no_grad():
            (third,) = all_gather_linear(x, [up], dist.group.WORLD, schedule="fused")
    for step in range(5):
        x.copy_(draw_integers(*x.shape, seed=50 + step + dist.get_rank()))
        graph.replay()
        kept, gathered = out.clone(), third.clone()
        found.append(torch.equal(kept, call()) and torch.equal(small(), wanted_small))
        with torch.no_grad():
            (eager,) = all_gather_linear(x, [up], dist.group.WORLD, schedule="fused")
        found.append(torch.equal(gathered, eager))
    # This call outgrows the workspace that the graph holds.
    big = pair(9, m=4096)[0]
    found.append(torch.equal(big(), big()))
    graph.replay()
    found.append(torch.equal(out, call()))
    return found


def test_graphs_and_eager_calls_alternate(ranks, gpus):
    for found in ranks(gpus)(replayed, **NCCL):
        assert all(found), found


@pytest.mark.parametrize(("schedule", "counter"), [("fused", "fused"), ("copy", "copied")])
def test_errors_of_blocks_are_no_larger_than_in_stock_pytorch(ranks, schedule, counter):
    exact = ranks(2)(test_llama.llama, dtype=torch.float64, tp=False, steps=1, **NCCL)
    options = {"schedule": schedule}
    for checkpointing in ("", "not reentrant"):
        case = {
            "dtype": torch.bfloat16,
            "steps": 1,
            "checkpointing": checkpointing,
            "gathered": True,
        }
        for single, result in zip(
            exact, ranks(2)(both, test_llama.llama, options=options, **case, **NCCL), strict=True
        ):
            assert result["counters"][counter] > 0
            truth, error = single[0]["grad"], {}
            for arm in ("stock", "patched"):
                grads = result[arm][0]["grad"].items()
                terms = [
                    (g.double() - truth[n]).square().sum() / truth[n].square().sum().clamp(1e-30)
                    for n, g in grads
                ]
                error[arm] = float(sum(terms))
            assert 0 < error["patched"] <= 1.1**2 * error["stock"], (checkpointing, error)


def numbers(dtype: torch.dtype, m: int, k: int, features: tuple[int, ...]) -> list[str]:
    """Return the names of results that differ from the schedule ``stock``."""
    world, rank, used, found = dist.get_world_size(), dist.get_rank(), COUNTERS.fused, []
    x = draw_integers(m, k, seed=rank, dtype=dtype)
    weights = [draw_integers(n, k, seed=7 + rank + i, dtype=dtype) for i, n in enumerate(features)]
    y = draw_integers(world * m, features[0], seed=rank, dtype=dtype)
    back = draw_integers(k, features[0], seed=3 + rank, dtype=dtype)
    pairs = {
        "column": zip(column(x, weights, "fused"), column(x, weights, "stock"), strict=True),
        "row": zip(row(y, back, "fused"), row(y, back, "stock"), strict=True),
    }
    for name, values in pairs.items():
        for which, (ours, stock) in enumerate(values):
            if not (ours.float() - stock.float()).norm() <= 1e-2 * stock.float().norm():
                found.append(f"{name} {which}")
    return (
        found
        if COUNTERS.fused > used
        else [*found, "no kernel was used", *fused.list_fused_objections()]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(ranks, gpus, shape):
    for found in ranks(gpus)(numbers, torch.bfloat16, *shape, **NCCL):
        assert not found


def test_numbers_in_float16(ranks):
    for found in ranks(2)(numbers, torch.float16, *SHAPES[0], **NCCL):
        assert not found

"""Schedule ``fused`` on two and three ranks: its kernels interpreted, over files that the processes share."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.tensor_parallel.schedules import fused
from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter, tp_linear_feature
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS
from tests.plugins.tp_linear import test_drifted_copies, test_llama, test_operators
from tests.plugins.tp_linear.arms import both, draw, mesh, seen
from tests.plugins.tp_linear.models import Llama, parallel_llama
from tests.support.interpreter import allocate, interpreted
from tests.support.rarely import ALL_CASES

FUSED = {"schedule": "fused"}


def allow() -> None:
    """Let this process use the kernels, in a type that the interpreter multiplies exactly enough."""
    fused.DTYPES = (torch.float32,)
    memory.unsupported_reason = lambda group, device: ""
    memory.allocate = allocate


def single(*shape: int, seed: int) -> Tensor:
    return draw(*shape, seed=seed)


def operators(most: int) -> list[str]:
    """Return the names of values and gradients that differ from the full GEMM."""
    allow()
    test_operators.drawn, test_operators.K, test_operators.N = single, 12, 8
    found = []
    for operator, cases in test_operators.CASES.items():
        for name, case in list(cases.items())[:most]:
            for regather in (False, True) if operator is test_operators.gathered else (None,):
                way = FUSED if regather is None else FUSED | {"regather": regather}
                for value, ours, theirs in operator(case, way):
                    if (ours is None) != (theirs is None):
                        found.append(f"{name}, {way}: {value} is {ours}, expected {theirs}")
                    elif ours is not None and not torch.allclose(ours, theirs, 1e-4, 1e-4):
                        found.append(
                            f"{name}, {way}: {value} differs by {(ours - theirs).abs().max()}"
                        )
    if not COUNTERS.fused:
        found.append("no kernel was used")
    return found


def delayed(rounds: int) -> list[str]:
    """Run operators whose sizes, and buffers, grow and shrink, on ranks that come late at random."""
    allow()
    memory._GRAIN, sizes = 64, set()
    chance, world, rank, found = (
        random.Random(dist.get_rank()),
        dist.get_world_size(),
        dist.get_rank(),
        [],
    )
    for i in range(rounds):
        m, k = 4 + 28 * (i % 3), 8 + 4 * (i % 5)
        time.sleep(chance.random() / 20)
        xs, weight = single(world * m, k, seed=i), single(8, k, seed=-i)
        (gathered,) = all_gather_linear(xs[rank * m :][:m], [weight], dist.group.WORLD, **FUSED)
        time.sleep(chance.random() / 20)
        scattered = linear_reduce_scatter(gathered, weight.t(), dist.group.WORLD, **FUSED)
        sizes.add(memory.get_workspace(dist.group.WORLD, xs.device).half_bytes)
        wanted = world * (xs @ weight.t() @ weight)[rank * m :][:m]
        if not torch.allclose(scattered, wanted, 1e-4, 1e-3):
            found.append(f"round {i}: {(scattered - wanted).abs().max()}")
    return found if len(sizes) > 3 else [*found, f"buffers have not grown: {sizes}"]


def watched() -> list[dict[str, Any]]:
    """Return gradients of blocks; one rank computes fewer GEMMs together with a gather than its peer."""
    model = Llama(layers=1, words=test_llama.WORDS)
    parallel_llama(model, mesh())
    if dist.get_rank() == 1:
        for name in "qkv":
            getattr(model.layers[0].attention, name).register_forward_pre_hook(
                lambda module, inputs: None
            )
    model(test_llama.tokens(1, 2, 12)).square().sum().backward()
    return [seen(model)]


def blocks() -> list[dict[str, Any]]:
    """Train blocks with a shared gather in stock PyTorch and patched, with checkpoints and without."""
    allow()
    runs = [
        both(test_llama.llama, options=FUSED, steps=1, dtype=torch.float32, **case)
        for case in CASES
    ]
    drifted = both(
        lambda: [test_drifted_copies.trained("blocks", "bias", torch.float32)], options=FUSED
    )
    return [both(watched, options=FUSED), drifted, *runs]


CASES: list[dict[str, Any]] = [
    {"checkpointing": "not reentrant", "frozen": "attention"},
    *([{}] if ALL_CASES else []),
]


def on_this_rank() -> tuple[list[str], list[dict[str, Any]], list[str]]:
    # The delayed operators run last, because they change the way in which buffers grow.
    return operators(99 if ALL_CASES else 1), blocks(), delayed(9)


@pytest.fixture(scope="module")
def on_two_ranks() -> Any:
    """Return the results of each kind by rank, from one job, because its start takes longer than most of them."""
    return list(zip(*interpreted(on_this_rank, world=2), strict=True))


def test_operators_alone(on_two_ranks):
    assert on_two_ranks[0] == ([], [])
    if ALL_CASES:
        assert interpreted(operators, 3, world=3) == [[]] * 3


def test_ranks_that_come_late(on_two_ranks):
    assert on_two_ranks[2] == ([], [])


def test_blocks(on_two_ranks):
    for results in on_two_ranks[1]:
        for result in results:
            stock, patched = result["stock"][0], result["patched"][0]
            assert stock["grad"].keys() == patched["grad"].keys()
            for name, grad in stock["grad"].items():  # float32, in another order
                ours = patched["grad"][name]
                assert (ours is None) is (grad is None)
                assert grad is None or torch.allclose(ours, grad, 1e-3, 1e-6), (name, ours - grad)
            assert result["counters"]["stock_calls"] == 0
            assert result["counters"]["fused"] > 0


def fall_back() -> tuple[bool, Any, list[str]]:
    """Return whether a model on the CPU computes as with ``bulk``, the counter, and the remarks of the report."""
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    weight = torch.ones(16, 8, dtype=torch.bfloat16)
    found = [
        all_gather_linear(x, [weight], dist.group.WORLD, schedule=name)[0]
        for name in ("fused", "bulk")
    ]
    remarks = list(tp_linear_feature.list_remarks())
    fused.drop_fused_support()
    return torch.equal(*found), COUNTERS.fused, remarks


def test_without_gpus_fused_falls_back_to_bulk_and_reports_it(ranks):
    for equal, count, remarks in ranks(2)(fall_back):
        assert equal
        assert count == 0
        wanted = "schedule fused computes as bulk does: tensors are on cpu, not on CUDA devices (rank 0, 1)"
        assert wanted in remarks

"""The operators alone, on plain tensors, compared with the full GEMM on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter
from tests.plugins.tp_linear.arms import SCHEDULES, draw

K, N = 10, 7  # input and output features
WAYS = [{"schedule": name} for name in SCHEDULES] + [{"schedule": "chunk", "chunks": 3}]


def drawn(*shape: int, seed: int) -> Tensor:
    return draw(*shape, seed=seed, dtype=torch.float64)


def mine(full: Tensor, dim: int) -> Tensor:
    return full.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def leaf(tensor: Tensor, wanted: bool = True) -> Tensor:
    return tensor.detach().clone().requires_grad_(wanted)


def shape_of(dim: int, sequence: int, features: int) -> list[int]:
    return [3] * dim + [sequence] + [2] * (1 - dim) + [features]


def gathered(
    case: dict[str, Any], way: dict[str, Any]
) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """Return pairs of a result of the operator and of the full GEMM, by name."""
    world = dist.get_world_size()
    dim, frozen, unused = case.get("dim", 0), case.get("frozen", ()), case.get("unused", ())
    x = leaf(drawn(*shape_of(dim, 4 * world, K), seed=1), "x" not in frozen)
    weights = [
        leaf(drawn(N * world, K, seed=10 + i), f"w{i}" not in frozen)
        for i in range(case.get("weights", 1))
    ]
    biases = [
        leaf(drawn(N * world, seed=20 + i)) if case.get("bias") else None
        for i in range(len(weights))
    ]
    scales = [drawn(*shape_of(dim, 4 * world, N * world), seed=30 + i) for i in range(len(weights))]

    own = leaf(mine(x, dim), x.requires_grad)
    own_weights = [leaf(mine(weight, 0), weight.requires_grad) for weight in weights]
    own_biases = [None if bias is None else leaf(mine(bias, 0)) for bias in biases]
    outs = all_gather_linear(
        own, own_weights, dist.group.WORLD, biases=own_biases, dim=case.get("given", dim), **way
    )
    full_outs = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    pairs: list[Any] = [
        (f"out{i}", out, mine(full, -1))
        for i, (out, full) in enumerate(zip(outs, full_outs, strict=True))
    ]
    used = [i for i in range(len(weights)) if i not in unused]
    sum((outs[i] * mine(scales[i], -1)).sum() for i in used).backward()
    sum((full_outs[i] * scales[i]).sum() for i in used).backward()
    pairs.append(("x", own.grad, None if x.grad is None else mine(x.grad, dim)))
    for kind, ours, theirs in (("w", own_weights, weights), ("b", own_biases, biases)):
        for i, (shard, full) in enumerate(zip(ours, theirs, strict=True)):
            if shard is not None and full is not None:
                pairs.append(
                    (f"{kind}{i}", shard.grad, None if full.grad is None else mine(full.grad, 0))
                )
    return pairs


def scattered(
    case: dict[str, Any], way: dict[str, Any]
) -> list[tuple[str, Tensor | None, Tensor | None]]:
    world = dist.get_world_size()
    dim, frozen = case.get("dim", 0), case.get("frozen", ())
    x = leaf(drawn(*shape_of(dim, 4 * world, K * world), seed=1), "x" not in frozen)
    weight = leaf(drawn(N, K * world, seed=2), "w0" not in frozen)
    bias = leaf(drawn(N, seed=3)) if case.get("bias") else None
    scale = drawn(*shape_of(dim, 4 * world, N), seed=4)

    own, own_weight = (
        leaf(mine(x, -1), x.requires_grad),
        leaf(mine(weight, -1), weight.requires_grad),
    )
    own_bias = None if bias is None else leaf(bias)
    out = linear_reduce_scatter(
        own, own_weight, dist.group.WORLD, bias=own_bias, dim=case.get("given", dim), **way
    )
    full_out = linear(x, weight, bias)
    (out * mine(scale, dim)).sum().backward()
    (full_out * scale).sum().backward()
    pairs: list[Any] = [("out", out, mine(full_out, dim))]
    for name, shard, full in (("x", own, x), ("w0", own_weight, weight)):
        pairs.append((name, shard.grad, None if full.grad is None else mine(full.grad, -1)))
    if own_bias is not None and bias is not None:
        pairs.append(("b0", own_bias.grad, bias.grad))
    return pairs


CASES: dict[Callable[..., Any], dict[str, dict[str, Any]]] = {
    gathered: {
        "one": {},
        "bias, along the second dimension": {"bias": True, "dim": 1},
        "three": {"weights": 3, "bias": True},
        "counted from the end": {"given": -2, "dim": 1, "weights": 2},
        "frozen weights": {"weights": 2, "frozen": ("w0", "w1")},
        "one frozen weight": {"weights": 2, "frozen": ("w0",)},
        "frozen input": {"weights": 2, "bias": True, "frozen": ("x",)},
        "an unused output": {"weights": 3, "bias": True, "unused": (1,)},
    },
    scattered: {
        "plain": {},
        "bias, along the second dimension": {"bias": True, "dim": 1},
        "counted from the end": {"given": -3, "bias": True},
        "frozen weight": {"bias": True, "frozen": ("w0",)},
        "frozen input": {"frozen": ("x",)},
    },
}


def wrong(operator: Callable[..., Any]) -> list[str]:
    """Return the names of wrong results, in all cases and ways."""
    found = []
    for name, case in CASES[operator].items():
        for way in WAYS:
            for value, ours, theirs in operator(case, way):
                if (ours is None) != (theirs is None):
                    found.append(f"{name}, {way}: {value} is {ours}, expected {theirs}")
                elif ours is not None and (
                    ours.shape != theirs.shape or not torch.allclose(ours, theirs, 1e-12, 1e-11)
                ):
                    found.append(f"{name}, {way}: {value} differs by {(ours - theirs).abs().max()}")
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("operator", CASES, ids=lambda operator: operator.__name__)
def test_values_and_gradients(ranks, world, operator):
    for found in ranks(world)(wrong, operator):
        assert not found


def messages() -> list[str]:
    x, weight = torch.ones(4, 2, K), torch.ones(N, K)
    group = dist.group.WORLD
    calls: list[Callable[[], Any]] = [
        lambda: all_gather_linear(x, [weight], group, dim=2),
        lambda: all_gather_linear(x, [weight], group, biases=[None, None]),
        lambda: all_gather_linear(x, [weight], group, schedule="rings"),
        lambda: linear_reduce_scatter(x, weight, group, dim=-4),
        lambda: linear_reduce_scatter(x, weight, group, chunks=0),
        lambda: linear_reduce_scatter(x[:3], weight, group),
    ]
    return [message(call) for call in calls]


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def test_mistakes_are_named(ranks):
    for dim, biases, schedule, minus, chunks, odd in ranks(2)(messages):
        assert "dim=2 is no sequence dimension of an input of shape (4, 2, 10)" in dim
        assert "1 weights and 2 biases" in biases
        assert "schedule='rings'" in schedule
        assert "dim=-4" in minus
        assert "chunks=0" in chunks
        assert "size 3, which does not divide by 2 ranks: pad the sequence" in odd


def written() -> list[tuple[Tensor, Tensor]]:
    """Return pairs of gradients: the output of an operator is written into, or copied before."""
    found = []
    for operator in (lambda x, w: all_gather_linear(x, [w], dist.group.WORLD)[0], _scatter):
        grads = []
        for copied in (False, True):
            x, weight = leaf(drawn(4, 2, K, seed=1)), leaf(drawn(N, K, seed=2))
            out = operator(x, weight)
            out = out.clone() if copied else out
            out.mul_(3).sin().sum().backward()
            grads.append((x.grad, weight.grad))
        found += zip(*grads, strict=True)
    return found


def _scatter(x: Tensor, weight: Tensor) -> Tensor:
    return linear_reduce_scatter(x, weight, dist.group.WORLD)


def test_an_output_may_be_written_into_as_the_output_of_a_linear(ranks):
    for pairs in ranks(2)(written):
        assert all(torch.equal(first, second) for first, second in pairs)

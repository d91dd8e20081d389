"""Small kernels, interpreted, all in one process, which costs seconds: they compute what torch's operations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ovpatch.overlap.data_parallel.fp32_accumulation import refresh_fp32
from ovpatch_plugins.dist_optimizer import triton_main_params
from ovpatch_plugins.pipe_experts import routing, triton_kernels
from ovpatch_plugins.pipe_experts.routing import Route, Splits, make_plan
from tests.support.interpreter import interpreted

CASES = [
    # Tokens, k, features, share of unused slots.
    (5, 1, 16, 0.0),
    # 21 is no multiple of a block of 8.
    (4, 2, 21, 0.3),
    (3, 3, 8, 0.5),
    (6, 2, 1, 0.2),
    # All slots are unused, so there are no rows.
    (2, 4, 5, 1.0),
    (0, 2, 5, 0.0),
]
DTYPES = [
    # The dtypes of rows, weights and tokens.
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float16, torch.float16),
]


def made(tokens: int, top_k: int, dropped: float) -> Route:
    slots = tokens * top_k
    order = torch.randperm(slots)[: round(slots * (1 - dropped))]
    return Route(order, slots, top_k, Splits([[len(order)]], [[[len(order)]]]), make_plan(1, 1))


def make_integers(*shape: int, dtype: torch.dtype) -> Tensor:
    # Sums of small integers are exact in any order.
    return torch.randint(-4, 5, shape).to(dtype)


def run(
    route: Route, rows: Tensor, weights: Tensor, grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return tokens, gradients of rows and of weights, also where only one is wanted, and sums without weights."""
    found = []
    for rows_need_grad, weights_need_grad in ((True, True), (True, False), (False, True)):
        given = [
            rows.detach().requires_grad_(rows_need_grad),
            weights.detach().requires_grad_(weights_need_grad),
        ]
        out = route.combine_rows(*given, dtype)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        found += [
            out.detach(),
            *torch.autograd.grad(out, wanted, grad.to(out.dtype).expand_as(out)),
        ]
    return [*found, route.sum_rows(rows, dtype)]


def put_together() -> list[str]:
    """Return which results of the kernels that put tokens together are not those of torch's operations."""
    triton_kernels._BLOCK, wrong = 8, []
    for tokens, top_k, features, dropped in CASES:
        for row_dtype, weight_dtype, dtype in DTYPES:
            route = made(tokens, top_k, dropped)
            # Not contiguous.
            rows = make_integers(features, len(route.order), dtype=row_dtype).t()
            weights = make_integers(tokens, 2 * top_k, dtype=weight_dtype)[:, ::2]
            args = route, rows, weights, make_integers(tokens, 1, dtype=dtype), dtype
            right = run(*args)
            by_kernel, routing._has_kernel = routing._has_kernel, lambda *tensors: True
            found = run(*args)
            routing._has_kernel = by_kernel
            for i, (actual, expected) in enumerate(zip(found, right, strict=True)):
                if actual.dtype != expected.dtype or not torch.equal(actual, expected):
                    wrong.append(
                        f"{(tokens, top_k, features, dropped)}, {dtype} of {row_dtype}, result {i}"
                    )
    return wrong


def in_fp32() -> list[list[float]]:
    """Add up sums that bf16 cannot represent, with unused slots whose memory belongs to other tensors."""
    route = made(3, 2, 0.0)
    route = Route(torch.tensor([1, 0, 3]), 6, 2, route.splits, route.plan)
    rows = torch.tensor([[1.0], [256.0], [torch.inf]]).bfloat16()
    weights = torch.tensor([[1, 1], [torch.nan, 0.5], [1, 1]])
    sums = triton_kernels.weighted_sum(
        rows, weights[:1].expand(3, 2).contiguous(), route.row_of_slot, 2, torch.float32
    )
    rounded = triton_kernels.weighted_sum(rows, None, route.row_of_slot, 2, torch.bfloat16)
    return [sums.flatten().tolist(), rounded.flatten().tolist()]


def numbers(n: int, dtype: torch.dtype) -> Tensor:
    """Return fp32 numbers less than half a unit above bf16 numbers, because the interpreter truncates."""
    low = torch.randint(0, 1 << 15, (n,), dtype=torch.int32)
    return (torch.randn(n).bfloat16().view(torch.int16).int() << 16 | low).view(torch.float32)


def following_roundings() -> list[str]:
    """Return the tensors whose numbers differ from the numbers of :func:`refresh_fp32`."""
    triton_main_params._BLOCK, wrong = 8, []
    special = torch.tensor([-0.0, torch.nan, 1.0, torch.inf, 3e38, 0.0, -0.0])
    becomes = torch.tensor([-0.0, torch.nan, torch.nan, torch.inf, 1.0, -0.0, 0.0])
    for dtype in (torch.float16, torch.bfloat16):
        # The interpreter compares the bits of bf16.
        if dtype is torch.bfloat16:
            special, becomes = special[:-2], becomes[:-2]
        wides = [special.clone(), *[numbers(n, dtype) for n in (1, 8, 0, 21, 24)]]
        rounded = [becomes.to(dtype), *[wide.to(dtype) for wide in wides[1:]]]
        rounded[4][5::7] = 7.0
        rounded[5].zero_()
        right = [
            refresh_fp32(wide.clone(), half) for wide, half in zip(wides, rounded, strict=True)
        ]
        before = [wide.clone() for wide in wides]
        table = torch.tensor(
            [
                (wide.data_ptr(), half.data_ptr(), len(wide))
                for wide, half in zip(wides, rounded, strict=True)
            ]
        )
        triton_main_params.launch_refresh(table, dtype, 24)
        for i, (wide, expected) in enumerate(zip(wides, right, strict=True)):
            if not are_same(wide, expected):
                wrong.append(f"tensor {i} of {dtype}")
        changed = [not are_same(wide, old) for wide, old in zip(wides, before, strict=True)]
        wrong += (
            [] if changed == [True, False, False, False, True, True] else [f"changes {changed}"]
        )
    return wrong


def are_same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether numbers are the same, including the signs of zeros."""
    return torch.allclose(actual, expected, 0, 0, equal_nan=True) and torch.equal(
        actual.signbit(), expected.signbit()
    )


def computed() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "put together": put_together(),
        "in fp32": in_fp32(),
        "following": following_roundings(),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = interpreted(computed)
    return result


def test_tokens_are_put_together_as_torch_does(found):
    assert not found["put together"]
    assert found["in fp32"] == [[257.0, float("inf"), 0.0], [256.0, float("inf"), 0.0]]


def test_numbers_follow_their_roundings(found):
    assert not found["following"]

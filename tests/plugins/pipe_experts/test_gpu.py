"""The feature on GPUs over NCCL: cases of the other files, and faults of streams and low precision."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.pipe_experts.experts import swiglu
from ovpatch_plugins.pipe_experts.layer import expert_parallel_ffn
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from tests.plugins.pipe_experts import test_layer, test_order
from tests.plugins.pipe_experts.models import Case, check, device, differentiated, one_by_one

pytestmark = pytest.mark.gpu(2)

NCCL = {"backend": "nccl", "timeout": 120}


@pytest.mark.parametrize("how", test_layer.HOWS)
def test_any_layer_can_be_cut(ranks, how):
    check(
        ranks(2),
        {name: test_layer.cut(case, how) for name, case in test_layer.CASES.items()},
        **NCCL,
    )


@pytest.mark.parametrize("module", ["stacked", "numbered"])
def test_frozen_parts(ranks, module):
    case = Case(module=module, tokens=(5, 0), config=MoEConfig("experts"))
    cases = {
        what: dataclasses.replace(case, frozen=names) for what, names in test_layer.FROZEN.items()
    }
    check(ranks(2), cases, **NCCL)


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function whose new tensors are on the GPU."""
    with torch.device(device()):
        return function(*args)


def test_each_part_hides_communication(ranks):
    part, back = test_order.PART, test_order.PART_BACK + test_order.GRADS
    for forward, backward in ranks(2)(on_gpu, test_order.run, MoEConfig("experts"), **NCCL):
        assert forward == ["launch", "launch", "shared", *part, *part, "wait", "wait"]
        assert backward == ["launch back"] * 2 + back * 2 + [
            "shared back",
            "wait back",
            "wait back",
        ]


@pytest.mark.parametrize("what", ["no backward", "a backward"])
def test_no_state_outlives_a_step(ranks, what):
    assert ranks(2)(on_gpu, test_order.list_alive, what, **NCCL) == [[False, False]] * 2


def wide(dtype: torch.dtype, how: MoEConfig | None, delay: float = 0.0) -> dict[str, Tensor]:
    """Compute a layer wide enough for torch's grouped kernel; without ``how``, compute all experts sequentially.

    With ``delay``, ranks and streams are late at random.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    experts, hidden, ffn, tokens = 4 * world, 64, 96, 200
    up, down = (
        (torch.randn(experts, *shape, generator=generator) * shape[1] ** -0.5)
        .to(dtype)
        .to(device())
        for shape in ((2 * ffn, hidden), (hidden, ffn))
    )
    own = slice(4 * rank, 4 * rank + 4)
    up, down = (up, down) if how is None else (up[own].clone(), down[own].clone())
    up.requires_grad_()
    down.requires_grad_()
    generator.manual_seed(1 + rank)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).to(device()).requires_grad_()
    index = torch.rand(tokens, experts, generator=generator).topk(2).indices.to(device())
    top = torch.rand(tokens, 2, generator=generator).to(dtype).to(device())
    if delay:
        time.sleep(delay * torch.rand(()).item())
        torch.cuda._sleep(int(1e6 * torch.rand(()).item()))
    if how is None:
        out = one_by_one(x, index, top, up, down, swiglu)
    else:
        out = expert_parallel_ffn(x, index, top, (up, down), swiglu, dist.group.WORLD, how)
    if delay:
        torch.cuda._sleep(int(1e6 * torch.rand(()).item()))
    found = differentiated(out, x, up, down, own if how is None else None)
    return {name: value.double().cpu() for name, value in found.items()}


def test_the_error_of_bf16_is_hardly_larger_than_that_of_sequential_experts(ranks):
    truth, one_by_one = (
        ranks(2)(wide, dtype, None, **NCCL) for dtype in (torch.float64, torch.bfloat16)
    )
    for how in (
        MoEConfig("none"),
        MoEConfig("experts", 2),
        MoEConfig("experts", 4),
        MoEConfig("tokens", 3),
    ):
        for right, peer, ours in zip(
            truth, one_by_one, ranks(2)(wide, torch.bfloat16, how, **NCCL), strict=True
        ):
            for name, value in right.items():
                error, allowed = (
                    (found[name] - value).norm() / value.norm() for found in (ours, peer)
                )
                assert error <= 1.25 * allowed + 1e-4, (how, name)


def repeated(config: MoEConfig, times: int) -> bool:
    """Return whether a layer computes the same bits every time, with any delays of ranks."""
    first = wide(torch.bfloat16, config)
    torch.manual_seed(dist.get_rank())
    return all(
        all(
            torch.equal(first[name], value)
            for name, value in wide(torch.bfloat16, config, 0.002).items()
        )
        for _ in range(times)
    )


@pytest.mark.parametrize("how", ["experts", "2 chunks", "experts, 2 communicators"])
def test_delays_change_nothing(ranks, how):
    assert ranks(2)(repeated, test_layer.HOWS[how], 200, **NCCL) == [True, True]

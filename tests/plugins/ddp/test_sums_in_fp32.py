"""Gradients in bf16 or fp16 that are summed in fp32: the same values as in a script with its own main gradients."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from ovpatch.overlap.data_parallel import fp32_accumulation
from tests.plugins.ddp.arms import Record, data, device
from tests.support.equality import compare

MICRO, STEPS = 6, 3
IN_FP32 = {"grad_accumulate_in_fp32": True, "grad_reduce_in_fp32": True}
LOW_PRECISION_DTYPES = [torch.bfloat16, torch.float16]


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 13), nn.Linear(13, 3)).to(
        device(), dtype
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def touch(how: str, model: nn.Module) -> None:
    """Change gradients between two microbatches as a script."""
    with torch.no_grad():
        if how == "scaled":
            for p in model.parameters():
                p.grad.mul_(0.75)
        elif how == "zeroed":
            next(model.parameters()).grad.zero_()
        elif how == "dropped":
            next(model.parameters()).grad = None
        elif how == "replaced":
            first = next(model.parameters())
            first.grad = torch.ones_like(first)


def by_hand(dtype: torch.dtype, how: str, reduced: bool) -> list[Record]:
    """Sum in fp32 over microbatches and ranks; ``p.grad`` is the rounded sum, and changes of it replace the sum."""
    model = net(dtype)
    named = dict(model.named_parameters())
    records: list[Record] = []
    for step in range(STEPS):
        sums: dict[str, Tensor | None] = dict.fromkeys(named)
        for micro in range(MICRO):
            for p in named.values():
                p.grad = None
            model(data(step, 5, 6, micro=micro).to(dtype)).square().mean().backward()
            for name, p in named.items():
                before = sums[name]
                sums[name] = p.grad.float() if before is None else before + p.grad.float()
                p.grad = sums[name].to(dtype)
            if micro == 2:
                kept = gradients(model)
                touch(how, model)
                for name, p in named.items():
                    if p.grad is None:
                        sums[name] = None
                    else:
                        sums[name] = torch.where(p.grad == kept[name], sums[name], p.grad.float())
            if micro < MICRO - 1:
                records.append({name: p.grad for name, p in named.items()})
        for name, p in named.items():
            total = (sums[name] if reduced else sums[name].to(dtype)) / dist.get_world_size()
            dist.all_reduce(total)
            p.grad = total.to(dtype)
        records.append(gradients(model))
        stepped(model)
    return records


def stepped(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-0.05)


def by_the_feature(dtype: torch.dtype, how: str, set_to_none: bool, views: bool) -> list[Record]:
    model = net(dtype)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    records: list[Record] = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=set_to_none)
        for micro in range(MICRO):
            last = micro == MICRO - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                wrapped(data(step, 5, 6, micro=micro).to(dtype)).square().mean().backward()
            if micro == 2:
                touch(how, model)
            records.append(
                {
                    name: None if p.grad is None else p.grad.clone()
                    for name, p in model.named_parameters()
                }
            )
        stepped(model)
    return records


def arms(
    dtype: torch.dtype,
    how: str,
    *,
    set_to_none: bool = True,
    views: bool = False,
    reduced: bool = True,
) -> dict[str, Any]:
    expected = by_hand(dtype, how, reduced)
    with ovpatch.applied("ddp", options={"ddp": IN_FP32 | {"grad_reduce_in_fp32": reduced}}):
        ours = by_the_feature(dtype, how, set_to_none, views)
    stock = by_the_feature(dtype, how, set_to_none, views)
    return {"expected": expected, "ours": ours, "stock": stock}


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES, ids=str)
def test_sums_equal_main_gradients_kept_by_hand(ranks, dtype, reduced):
    for result in ranks(2)(arms, dtype, "", reduced=reduced):
        compare(result["expected"], result["ours"]).assert_bitwise()
        # Stock PyTorch rounds each sum.
        with pytest.raises(AssertionError):
            compare(result["expected"], result["stock"]).assert_bitwise()


@pytest.mark.parametrize("how", ["scaled", "zeroed", "dropped", "replaced"])
def test_changes_of_gradients_by_the_script_are_kept(ranks, how):
    for result in ranks(2)(arms, torch.bfloat16, how):
        compare(result["expected"], result["ours"]).assert_bitwise()


@pytest.mark.parametrize("views", [True, False])
def test_gradients_that_stay_and_bucket_views(ranks, views):
    for result in ranks(2)(arms, torch.bfloat16, "", set_to_none=False, views=views):
        compare(result["expected"], result["ours"]).assert_bitwise()


# --- any use of gradients, in numbers that need no rounding and so equal stock PyTorch ---


class Twos(nn.Module):
    """A model whose backward adds 2 on rank 0 and 4 on rank 1 to every element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16, device=device()))

    def forward(self) -> Tensor:
        return (self.weight * (2 + 2 * dist.get_rank())).sum()


def local_backward(wrapped: DDP) -> None:
    with wrapped.no_sync():
        wrapped().backward()


def zeroed_by_data(wrapped: DDP, weight: Tensor) -> None:
    local_backward(wrapped)
    weight.grad.data.zero_()


def swapped_by_data(wrapped: DDP, weight: Tensor) -> None:
    local_backward(wrapped)
    weight.grad.data = torch.ones_like(weight)


def clamped_by_data(wrapped: DDP, weight: Tensor) -> None:
    local_backward(wrapped)
    weight.grad.data.clamp_(-3, 3)


def reduced_by_hand(wrapped: DDP, weight: Tensor) -> None:
    local_backward(wrapped)
    dist.all_reduce(weight.grad)


def around_the_wrapper(wrapped: DDP, weight: Tensor) -> None:
    wrapped.module().backward()
    dist.all_reduce(weight.grad)
    weight.grad.data[:2].zero_()


def reduced_and_never_zeroed(wrapped: DDP, weight: Tensor) -> None:
    wrapped().backward()


def reduced_at_last(wrapped: DDP, weight: Tensor) -> None:
    local_backward(wrapped)
    local_backward(wrapped)
    wrapped().backward()


def in_inference_mode(wrapped: DDP, weight: Tensor) -> None:
    loss = wrapped.module()
    with torch.inference_mode():
        loss.backward()


def with_a_hook(wrapped: DDP, weight: Tensor) -> None:
    def clamp(param: Tensor) -> None:
        param.grad.data.clamp_(-5, 5)

    handle = weight.register_post_accumulate_grad_hook(clamp)
    local_backward(wrapped)
    handle.remove()


def unscaled_by_torch(wrapped: DDP, weight: Tensor) -> None:
    local_backward(wrapped)
    found, half = torch.zeros(1, device=device()), torch.full((1,), 0.5, device=device())
    torch._amp_foreach_non_finite_check_and_unscale_([weight.grad], found, half)


SCENES = {f.__name__: f for f in (
    zeroed_by_data, swapped_by_data, clamped_by_data, reduced_by_hand, around_the_wrapper, reduced_and_never_zeroed,
    reduced_at_last, in_inference_mode, with_a_hook, unscaled_by_torch,
)}  # fmt: skip


def played(scene: str) -> list[Any]:
    wrapped = DDP(Twos())
    weight = wrapped.module.weight
    seen = []
    for _ in range(4):
        SCENES[scene](wrapped, weight)
        seen.append(weight.grad.detach().clone())
        if scene.startswith("reduced_a"):
            assert not fp32_accumulation.sums, "sums of reduced gradients must be freed"
    return seen


def both_ways() -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    stock, ours = {scene: played(scene) for scene in SCENES}, {}
    with ovpatch.applied("ddp", options={"ddp": IN_FP32}):
        for scene in SCENES:
            ours[scene] = played(scene)
            gc.collect()
            deadline = time.monotonic() + 60
            # A thread of gloo may still hold a tensor that the script has reduced.
            while fp32_accumulation.sums and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not fp32_accumulation.sums, scene
    return stock, ours


def test_writes_of_the_script_are_kept_in_any_way_of_writing(ranks):
    for stock, ours in ranks(2)(both_ways):
        compare(stock, ours).assert_bitwise()


def reverted() -> tuple[int, int]:
    with ovpatch.applied("ddp", options={"ddp": IN_FP32}):
        wrapped = DDP(Twos())
        local_backward(wrapped)
        local_backward(wrapped)
        before = len(fp32_accumulation.sums)
    return before, len(fp32_accumulation.sums)


def test_revert_in_the_middle_leaves_no_sums(ranks):
    assert ranks(2)(reverted) == [(1, 0), (1, 0)]

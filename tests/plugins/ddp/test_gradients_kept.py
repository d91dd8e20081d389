"""Gradients and outputs that a user keeps have the values that they have with stock DDP."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from ovpatch.overlap.data_parallel import grad_bucket
from tests.plugins.ddp.arms import (
    Record,
    both,
    data,
    device,
    is_patched,
    reduced_in_place,
    seen,
    table,
)
from tests.plugins.ddp.checks import check, check_cases

WORLDS = [2, 3]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3)
    )


def backward(wrapped: nn.Module, step: int) -> None:
    wrapped(data(step, 4, 6)).square().mean().backward()


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def test_a_loop_reduced_in_place_changes_no_constant_that_a_module_may_import():
    assert reduced_in_place(lambda: dict(vars(grad_bucket)))() == vars(grad_bucket)


@reduced_in_place
def loop_keeps_last_gradients(how: str) -> list[Record]:
    """Keep the gradients of each step over the following steps, without a copy."""
    model = net().to(device())
    wrapped = DDP(model)
    kept, records = [], []
    for step in range(4):
        wrapped.zero_grad()
        backward(wrapped, step)
        grads = [p.grad for p in model.parameters()]
        take = {"tensor": lambda g: g, "alias": lambda g: g.detach(), "flat": lambda g: g.view(-1)}[
            how
        ]
        kept.append([take(g) for g in (grads if step % 2 else grads[1:2])])
        del grads
        records.append({"kept": [copies(k) for k in kept]})
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_a_kept_gradient_is_not_overwritten_by_later_steps(ranks, world):
    check_cases(ranks(world), loop_keeps_last_gradients, table(how=["tensor", "alias", "flat"]))


@reduced_in_place
def loop_own_gradient_tensors(flat: bool) -> list[Record]:
    """Allocate gradients as a script, as slices of one flat tensor or separately, and read them in that memory."""
    model = net().to(device())
    wrapped = DDP(model)
    params = list(model.parameters())
    sizes = [p.numel() for p in params]
    pool = torch.zeros(sum(sizes), device=device())
    mine = (
        list(pool.split(sizes)) if flat else [torch.zeros(size, device=device()) for size in sizes]
    )
    for param, grad in zip(params, mine, strict=True):
        param.grad = grad.view_as(param) if flat else grad.view_as(param).detach()
    held = None if flat else [p.grad for p in params]
    records = []
    for step in range(3):
        backward(wrapped, step)
        records.append({"mine": copies(mine), "held": copies(held or []), **seen(model)})
        wrapped.zero_grad(set_to_none=False)
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_that_the_user_allocated_are_filled_in_place(ranks, world):
    check_cases(ranks(world), loop_own_gradient_tensors, table(flat=[True, False]))


def loop_mixed_zeroing() -> list[Record]:
    model = net().to(device())
    wrapped = DDP(model)
    held, records = None, []
    for step in range(5):
        backward(wrapped, step)
        held = held or [p.grad for p in model.parameters()]
        records.append({"held": copies(held), **seen(model)})
        for i, p in enumerate(model.parameters()):
            if (step + i) % 2:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_some_gradients_set_to_none_and_others_zeroed(ranks, world):
    check(ranks(world)(both, loop_mixed_zeroing))


@reduced_in_place
def loop_user_hooks() -> list[Record]:
    """Read and change local gradients in hooks, before the reduction."""
    model = net().to(device())
    wrapped = DDP(model)
    saw: list[Any] = []
    first, second = model[0].weight, model[2].weight
    first.register_hook(lambda g: saw.append(g.clone()) or g * 2)

    def triple(param: torch.Tensor) -> None:
        saw.append(param.grad.clone())
        param.grad.mul_(3)

    second.register_post_accumulate_grad_hook(triple)
    records = []
    for step in range(3):
        backward(wrapped, step)
        records.append({"saw": list(saw), **seen(model)})
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_user_hooks_see_and_change_local_gradients(ranks, world):
    check(ranks(world)(both, loop_user_hooks))


def loop_create_graph() -> list[Record]:
    """Train with ``create_graph``, on which stock PyTorch raises ("a leaf Variable that …"), so its arm has none."""
    create_graph = is_patched()
    model = net().to(device())
    wrapped = DDP(model)
    records = []
    for step in range(2):
        wrapped(data(step, 4, 6)).square().mean().backward(create_graph=create_graph)
        records.append(seen(model))
        for p in model.parameters():
            p.grad = None
    return records


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("world", WORLDS)
def test_create_graph_gives_the_same_gradients(ranks, world):
    check(ranks(world)(both, loop_create_graph))


def loop_autograd_grad(find_unused: bool, of: str) -> list[Record]:
    """Compute derivatives that add to no gradient of a parameter, before a backward and instead of one."""
    model = net().to(device())
    wrapped = DDP(model, find_unused_parameters=find_unused)
    records = []
    for step in range(4):
        x = data(step, 4, 6).requires_grad_()
        out = wrapped(x)
        wanted = [x] if of == "input" else list(model.parameters())
        grads = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        # Step 1 has no backward.
        if step != 1:
            penalty = sum(g.square().sum() for g in grads) if of == "input" else 0.0
            (out.square().mean() + penalty).backward()
        records.append({"grads": copies(list(grads)), **seen(model)})
        wrapped.zero_grad()
    return records


def test_autograd_grad_in_between(ranks):
    check_cases(
        ranks(2), loop_autograd_grad, table(find_unused=[True, False], of=["input", "parameters"])
    )


def saved_output() -> bytes:
    with ovpatch.applied("ddp"), warnings.catch_warnings():
        warnings.simplefilter("error")
        out = DDP(net())(data(0, 4, 6))
        buffer = io.BytesIO()
        torch.save(out, buffer)
        assert out._backward_hooks is None
        return buffer.getvalue()


def test_outputs_pickle_as_before(ranks):
    assert all(b"ovpatch" not in text for text in ranks(2)(saved_output))


class Odd(nn.Module):
    """Parameters of unusual shapes, strides and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.void = nn.Parameter(torch.zeros(0, 3))
        self.channels_last = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.gapped = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.wide = nn.Linear(7, 2, dtype=torch.float64)
        self.low = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            self.channels_last(x).mean() * self.scalar
            + self.void.sum()
            + self.gapped.square().sum()
        )
        return (
            y
            + self.wide(self.transposed.sum(1).double()[:7]).sum()
            + self.low.float().square().sum()
        )


def loop_odd(as_view: bool) -> list[Record]:
    model = Odd().to(device())
    wrapped = DDP(model, gradient_as_bucket_view=as_view)
    records = []
    for step in range(3):
        wrapped(data(step, 2, 3, 6, 6)).backward()
        strides = {n: p.grad.stride() for n, p in model.named_parameters()}
        records.append({"strides": strides, **seen(model)})
        wrapped.zero_grad(set_to_none=step == 1)
    return records


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("as_view", [True, False])
def test_odd_shapes_strides_and_dtypes(ranks, world, as_view):
    check(ranks(world)(both, loop_odd, as_view), bitwise=not as_view)

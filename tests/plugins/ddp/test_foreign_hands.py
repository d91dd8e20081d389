"""Hooks that change gradients of other parameters in the middle of a backward act as in stock PyTorch."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from tests.plugins.ddp.arms import Record, data, record_steps, reduced_in_place, seen, table
from tests.plugins.ddp.checks import check_cases, some

WORLDS = [2, 3]
CAPS = [0.0001, 25]


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def scales(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(3.0)


def drops(model: nn.Module) -> None:
    for param in list(model.parameters())[::2]:
        param.grad = None


def replaces(model: nn.Module) -> None:
    for param in list(model.parameters())[::2]:
        param.grad = torch.full_like(param, 5.0)


DEEDS: dict[str, Callable[[nn.Module], None]] = {
    "zeroes": nn.Module.zero_grad,
    "zeroes in place": functools.partial(nn.Module.zero_grad, set_to_none=False),
    "scales": scales,
    "drops": drops,
    "replaces": replaces,
}


@reduced_in_place
def loop(
    deed: str, where: str, cap: float, accumulate: bool, ddp: dict[str, Any] | None = None
) -> list[Record]:
    """Change all gradients in a backward hook of the second block, before some gradients are computed."""
    model = net()
    wrapped = DDP(model, bucket_cap_mb=cap, **(ddp or {}))
    block = model[1]

    def hook(module: nn.Module, *_: Any) -> None:
        if module is block:
            DEEDS[deed](model)

    if where == "global":
        handle = nn.modules.module.register_module_full_backward_hook(hook)
    elif where == "wrapper":
        handle = wrapped.register_full_backward_hook(lambda *_: DEEDS[deed](model))
    else:
        handle = getattr(block, where)(hook)
    records = []
    for step in range(4):
        if step == 3:
            handle.remove()
        loss = wrapped(data(step, 4, 6)).square().mean()
        loss.backward()
        records.append(seen(model, loss))
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
        if not accumulate:
            wrapped.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_a_module_backward_hook_that_changes_all_gradients(ranks, world):
    where = ["register_full_backward_hook", "register_full_backward_pre_hook"]
    cases = table(deed=DEEDS, where=where, cap=CAPS, accumulate=[False])
    # Hooks on all modules, or on the wrapper, are called like hooks on a module.
    cases |= table(deed=DEEDS, where=["global", "wrapper"], cap=CAPS[:1], accumulate=[False])
    check_cases(ranks(world), loop, cases, backwards=4)


def test_with_gradients_that_accumulate(ranks):
    once = {"where": ["register_full_backward_hook"], "cap": CAPS, "accumulate": [True]}
    cases = table(deed=DEEDS, ddp=[{}, {"find_unused_parameters": True}], **once)
    # Stock PyTorch raises if the first backward of a static graph loses a gradient.
    static = table(deed=DEEDS.keys() - {"zeroes", "drops"}, ddp=[{"static_graph": True}], **once)
    # A third of the cases still has each deed in several ways.
    check_cases(ranks(2), loop, some({**cases, **static}), backwards=4)


PLACES = ["a block", "around a block", "in a module without children", "after others were deleted"]


@reduced_in_place
def loop_hook_during_training(cap: float, place: str) -> list[Record]:
    """Register a hook after the first steps, on a block that existed at the wrap, or on a new module."""
    model = net().append(nn.Sequential())
    wrapped = DDP(model, bucket_cap_mb=cap)
    records = record_steps(model, (wrapped(data(step, 4, 6)).square().mean() for step in range(2)))
    hooked = nn.Identity()
    if place == "a block":
        hooked = model[2]
    elif place == "around a block":
        model[2] = nn.Sequential(model[2], hooked)
    elif place == "in a module without children":
        model[-1].append(hooked)
    elif place == "after others were deleted":
        # This gives the model another table of its children.
        del model[-1]
        model.append(hooked)
    hooked.register_full_backward_hook(lambda *_: scales(model))
    return records + record_steps(
        model, (wrapped(data(step, 4, 6)).square().mean() for step in (2, 3))
    )


def test_a_hook_registered_later(ranks):
    check_cases(ranks(2), loop_hook_during_training, table(cap=CAPS, place=PLACES), backwards=4)


def loop_hook_between(hook: str, deed: str, cap: float) -> list[Record]:
    """Register a hook on the first weight, whose gradient comes last, from each forward to the end of its backward."""
    model = net()
    wrapped = DDP(model, bucket_cap_mb=cap)
    first = next(model.parameters())
    records = []
    for step in range(4):
        loss = wrapped(data(step, 4, 6)).square().mean()
        met: list[list[torch.Tensor | None]] = []

        def read(*_: Any, met: list[list[torch.Tensor | None]] = met) -> None:
            met.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            DEEDS.get(deed, lambda model: None)(model)

        handle = getattr(first, hook)(read)
        loss.backward()
        handle.remove()
        records.append(seen(model, loss, met=met))
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_a_hook_registered_between_forward_and_backward(ranks, world):
    hooks = ["register_hook", "register_post_accumulate_grad_hook"]
    cases = table(hook=hooks, deed=["reads", "scales"], cap=CAPS)
    for result in check_cases(ranks(world), loop_hook_between, cases, backwards=4):
        assert all(
            len(record["met"]) == 1 for case in result.values() for record in case["patched"]
        )


def loop_shared(caps: tuple[float, float], together: bool) -> list[Record]:
    """Train two wrappers whose models share parameters, in turn or together."""
    torch.manual_seed(0)
    trunk = nn.Linear(6, 6)
    first, second = nn.Sequential(trunk, nn.Linear(6, 3)), nn.Sequential(nn.Linear(6, 6), trunk)
    wrappers = [DDP(first, bucket_cap_mb=caps[0]), DDP(second, bucket_cap_mb=caps[1])]
    records = []
    for step in range(4):
        losses = []
        for m, wrapped in enumerate(wrappers):
            losses.append(wrapped(data(step, 4, 6, micro=m)).square().mean())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        records.append({"first": seen(first), "second": seen(second)})
        for wrapped in wrappers:
            wrapped.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_two_wrappers_that_share_a_layer(ranks, world):
    cases = table(caps=itertools.product(CAPS, CAPS), together=[True, False])
    check_cases(ranks(world), loop_shared, cases, backwards=8, bitwise=False)


def delayed(model: nn.Sequential, cap: float) -> DDP:
    """Wrap a model whose last bias is reduced by a hook of DistributedDataParallel; it gets the stock reducer."""
    bias = [(name, param) for name, param in model.named_parameters() if name == "1.bias"]
    return DDP(
        model,
        # torch 2.11 takes no fraction with the following arguments.
        bucket_cap_mb=math.ceil(cap),
        delay_all_reduce_named_params=bias,
        param_to_hook_all_reduce=model[1].weight,
    )


def with_comm_hook(model: nn.Sequential, cap: float) -> DDP:
    """Wrap a model, and make it fall back to the stock reducer."""
    wrapped = DDP(model, bucket_cap_mb=cap)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    return wrapped


STOCK: dict[str, Callable[[nn.Sequential, float], DDP]] = {
    "delayed": delayed,
    "with comm hook": with_comm_hook,
}


def loop_shared_with_stock(
    which: str, stock_is_first: bool, caps: tuple[float, float]
) -> list[Record]:
    """Train two wrappers whose models share parameters. One of them has the stock reducer."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    ours, theirs = (nn.Sequential(trunk, nn.Linear(6, 3)) for _ in range(2))
    wrappers = [(lambda: STOCK[which](theirs, caps[0])), (lambda: DDP(ours, bucket_cap_mb=caps[1]))]
    wrapped = [wrap() for wrap in (wrappers if stock_is_first else reversed(wrappers))]
    records = []
    for step in range(4):
        sum(
            model(data(step, 4, 6, micro=m)).square().mean() for m, model in enumerate(wrapped)
        ).backward()
        # Record only the shared part of the second model: torch does not wait for the reduction of the delayed bias.
        records.append({"ours": seen(ours), "theirs": seen(theirs[0])})
        for model in wrapped:
            model.zero_grad()
    return records


@pytest.mark.parametrize("world", WORLDS)
def test_a_wrapper_with_the_stock_reducer_that_shares_layers(ranks, world):
    cases = table(which=STOCK, stock_is_first=[True, False], caps=[(0.0001, 25), (25, 0.0001)])
    check_cases(
        ranks(world), loop_shared_with_stock, cases, backwards=4, stock_models=1, bitwise=False
    )


class SharedMemory(nn.Module):
    """Two weights for whose gradients autograd uses one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(40, 60)), nn.Parameter(torch.randn(60, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a.view(-1) + self.b.view(-1)) * x


@reduced_in_place
def loop_shared_memory(cap: float) -> list[Record]:
    model = SharedMemory()
    wrapped = DDP(model, bucket_cap_mb=cap)
    return record_steps(model, (wrapped(data(step, 2400)).square().sum() for step in range(5)))


@pytest.mark.parametrize("world", WORLDS)
def test_two_weights_whose_gradients_share_memory(ranks, world):
    check_cases(ranks(world), loop_shared_memory, table(cap=CAPS), backwards=5)


# --- hooks on the AccumulateGrad nodes on which the reducer has its hooks ---


def hooked(where: str, layer: int) -> list[Record]:
    """Train with a hook on a node that doubles a gradient, registered before or after the wrapper is made.

    The gradient of layer 0 comes last, when its bucket is packed; other gradients wait for it.
    """
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    weight = net[layer].weight
    node: Any = get_gradient_edge(weight).node

    def double(*_: Any) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2)

    if where == "before":
        node.register_hook(double)
    wrapped = DDP(net)
    if where == "after":
        node.register_hook(double)
    losses = (wrapped(data(step, 4, 8)).square().mean() for step in range(3))
    return record_steps(net, losses, torch.optim.SGD(net.parameters(), 0.1))


def test_hooks_on_nodes_act_as_in_stock_pytorch(ranks):
    check_cases(ranks(2), hooked, table(where=["before", "after"], layer=[0, 1]), backwards=3)


def wrapped_again() -> list[bool]:
    found = []
    with ovpatch.applied("ddp"):
        net = nn.Linear(8, 8)
        # These references make the nodes outlive the wrapper.
        nodes = [get_gradient_edge(param).node for param in net.parameters()]
        for _ in range(2):
            wrapped = DDP(net)
            wrapped(torch.ones(2, 8)).sum().backward()
            found.append(wrapped.reducer.grad_reducer.hooks.find_user_hooks())
            del wrapped
            gc.collect()
        assert nodes
    return found


def test_hooks_of_an_earlier_wrapper_are_removed_with_it(ranks):
    assert ranks(2)(wrapped_again) == [[False, False]] * 2

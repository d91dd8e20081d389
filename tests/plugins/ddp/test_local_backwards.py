"""Backwards that are nobody's step: what stays local under stock stays local."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record, both, data, seen
from tests.plugins.ddp.checks import check
from tests.plugins.ddp.refusal import Refusal


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def loop_bypass(find_unused: bool) -> list[Record]:
    """The module itself, without the wrapper, between two steps."""
    model = net()
    wrapped = DDP(model, find_unused_parameters=find_unused)
    records = []
    for step in range(3):
        wrapped(data(step, 4, 6)).square().mean().backward()
        wrapped.module(data(step, 4, 6, micro=1)).square().mean().backward()
        records.append(seen(model))
        if step == 1:
            wrapped.zero_grad()
        wrapped.module(data(step, 4, 6, micro=2)).sum().backward()
        records.append(seen(model))
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("find_unused", [True, False])
def test_a_forward_that_bypasses_the_wrapper_stays_local(ranks, world, find_unused):
    results = ranks(world)(both, loop_bypass, find_unused)
    check(results, backwards=3)
    first, second = (result["patched"][1]["grad"]["0.weight"] for result in results[:2])
    assert not torch.equal(first, second), "local gradients differ by rank"


def loop_grad_after_backward(of: str) -> list[Record]:
    """Derivatives through the graph of a step that has been reduced."""
    model = net()
    wrapped = DDP(model)
    records = []
    for step in range(3):
        x = data(step, 4, 6).requires_grad_()
        loss = wrapped(x).square().mean()
        loss.backward(retain_graph=True)
        wanted = {"input": [x], "parameters": list(model.parameters()), "one": [model[2].weight]}[of]
        grads = torch.autograd.grad(loss, wanted)
        records.append({"grads": list(grads), "x": x.grad.clone(), **seen(model)})
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("of", ["input", "parameters", "one"])
def test_autograd_grad_after_the_backward_triggers_nothing(ranks, of):
    check(ranks(2)(both, loop_grad_after_backward, of), backwards=3)


def loop_grad_raises(to_input: bool) -> list[Record]:
    """A derivative that fails half-way leaves nothing behind that would reduce the next backward."""
    model = net()
    wrapped = DDP(model)
    records = []
    for step in range(3):
        x = data(step, 4, 6).requires_grad_()
        loss = wrapped(Refusal.apply(x)).square().mean()
        loss.backward(retain_graph=True)
        Refusal.armed = True
        with pytest.raises(ValueError, match="refused"):
            torch.autograd.grad(loss, [x] if to_input else [x, *model.parameters()])
        Refusal.armed = False
        with wrapped.no_sync():
            wrapped(data(step, 4, 6, micro=1)).square().mean().backward()
        records.append(seen(model))
        wrapped.module(data(step, 4, 6, micro=2)).square().mean().backward()
        records.append(seen(model))
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("to_input", [True, False])
def test_after_an_autograd_grad_that_raised_a_no_sync_backward_stays_local(ranks, to_input):
    results = ranks(2)(both, loop_grad_raises, to_input)
    check(results, backwards=3)
    first, second = (result["patched"][0]["grad"]["0.weight"] for result in results)
    assert not torch.equal(first, second)


def loop_backward_of_inputs() -> list[Record]:
    """``backward(inputs=[x])`` after the step adds to no parameter."""
    model = net()
    wrapped = DDP(model)
    records = []
    for step in range(3):
        x = data(step, 4, 6).requires_grad_()
        loss = wrapped(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(inputs=[x])
        records.append({"x": x.grad.clone(), **seen(model)})
        wrapped.zero_grad()
    return records


def test_a_backward_to_the_inputs_alone_triggers_nothing(ranks):
    check(ranks(2)(both, loop_backward_of_inputs), backwards=3)


def loop_no_sync_twice() -> list[Record]:
    """A forward under no_sync never was a step, so a second backward through it is not a late one."""
    model = net()
    wrapped = DDP(model)
    records = []
    for step in range(3):
        with wrapped.no_sync():
            loss = wrapped(data(step, 4, 6)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        records.append(seen(model))
        wrapped(data(step, 4, 6, micro=1)).square().mean().backward()
        records.append(seen(model))
        wrapped.zero_grad()
    return records


def test_two_backwards_of_a_no_sync_forward_stay_local(ranks):
    check(ranks(2)(both, loop_no_sync_twice), backwards=3)


def loop_no_sync_beside() -> list[Record]:
    """A forward under no_sync while a synchronised one waits for its backward, which comes first."""
    model = net()
    wrapped = DDP(model)
    records = []
    for step in range(3):
        first = wrapped(data(step, 4, 6)).square().mean()
        with wrapped.no_sync():
            second = wrapped(data(step, 4, 6, micro=1)).square().mean()
        first.backward()
        records.append(seen(model))
        second.backward()
        records.append(seen(model))
        wrapped.zero_grad()
    return records


def test_a_no_sync_forward_behind_a_synchronised_one_stays_local(ranks):
    results = ranks(2)(both, loop_no_sync_beside)
    check(results, backwards=3)
    first, second = (result["patched"][1]["grad"]["0.weight"] for result in results)
    assert not torch.equal(first, second)

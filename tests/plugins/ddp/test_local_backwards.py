"""Backwards that belong to no step: gradients that stay local in stock PyTorch stay local."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record, data, seen, table
from tests.plugins.ddp.checks import check_cases
from tests.plugins.ddp.refusal import Refusal


def loss_of(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    return model(data(step, 4, 6, micro=micro)).square().mean()


def bypass(wrapped: DDP, step: int) -> Iterator[Record]:
    """Run the module without the wrapper between two steps."""
    loss_of(wrapped, step).backward()
    loss_of(wrapped.module, step, 1).backward()
    yield seen(wrapped.module)
    if step == 1:
        wrapped.zero_grad()
    wrapped.module(data(step, 4, 6, micro=2)).sum().backward()
    yield seen(wrapped.module)


def grad_after_backward(wrapped: DDP, step: int, of: str) -> Iterator[Record]:
    """Compute derivatives through the graph of a step that was reduced."""
    model, x = wrapped.module, data(step, 4, 6).requires_grad_()
    loss = wrapped(x).square().mean()
    loss.backward(retain_graph=True)
    wanted = {"input": [x], "parameters": list(model.parameters()), "one": [model[2].weight]}[of]
    grads = torch.autograd.grad(loss, wanted)
    yield {"grads": list(grads), "x": x.grad.clone(), **seen(model)}
    wrapped.zero_grad()


def grad_raises(wrapped: DDP, step: int, to_input: bool) -> Iterator[Record]:
    """Fail in a derivative, which must leave no state that would reduce the next backward."""
    x = data(step, 4, 6).requires_grad_()
    loss = wrapped(Refusal.apply(x)).square().mean()
    loss.backward(retain_graph=True)
    Refusal.armed = True
    with pytest.raises(ValueError, match="refused"):
        torch.autograd.grad(loss, [x] if to_input else [x, *wrapped.module.parameters()])
    Refusal.armed = False
    with wrapped.no_sync():
        loss_of(wrapped, step, 1).backward()
    yield seen(wrapped.module)
    loss_of(wrapped.module, step, 2).backward()
    yield seen(wrapped.module)
    wrapped.zero_grad()


def backward_of_inputs(wrapped: DDP, step: int) -> Iterator[Record]:
    """Call ``backward(inputs=[x])`` after the step, which adds to no parameter."""
    x = data(step, 4, 6).requires_grad_()
    loss = wrapped(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(inputs=[x])
    yield {"x": x.grad.clone(), **seen(wrapped.module)}
    wrapped.zero_grad()


def no_sync_twice(wrapped: DDP, step: int) -> Iterator[Record]:
    """Run two backwards through a forward under no_sync, which belong to no step."""
    with wrapped.no_sync():
        loss = loss_of(wrapped, step)
    loss.backward(retain_graph=True)
    loss.backward()
    yield seen(wrapped.module)
    loss_of(wrapped, step, 1).backward()
    yield seen(wrapped.module)
    wrapped.zero_grad()


def no_sync_between(wrapped: DDP, step: int) -> Iterator[Record]:
    """Run a forward under no_sync between a synchronized forward and its backward, which comes first."""
    first = loss_of(wrapped, step)
    with wrapped.no_sync():
        second = loss_of(wrapped, step, 1)
    first.backward()
    yield seen(wrapped.module)
    second.backward()
    yield seen(wrapped.module)
    wrapped.zero_grad()


def loop(
    do: Callable[..., Iterator[Record]], find_unused: bool = False, **kwargs: Any
) -> list[Record]:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    wrapped = DDP(model, find_unused_parameters=find_unused)
    return [record for step in range(3) for record in do(wrapped, step, **kwargs)]


@pytest.mark.parametrize("world", [2, 3])
def test_a_forward_that_bypasses_the_wrapper_stays_local(ranks, world):
    check_local(
        check_cases(ranks(world), loop, table(do=[bypass], find_unused=[True, False]), backwards=3),
        1,
    )


def test_derivatives_after_the_backward_trigger_nothing(ranks):
    cases = table(do=[grad_after_backward], of=["input", "parameters", "one"]) | table(
        do=[backward_of_inputs]
    )
    check_cases(ranks(2), loop, cases, backwards=3)


def test_after_an_autograd_grad_that_raised_a_no_sync_backward_stays_local(ranks):
    check_local(
        check_cases(ranks(2), loop, table(do=[grad_raises], to_input=[True, False]), backwards=3), 0
    )


def test_backwards_of_forwards_under_no_sync_stay_local(ranks):
    results = check_cases(ranks(2), loop, table(do=[no_sync_twice, no_sync_between]), backwards=3)
    check_local(
        [{name: case for name, case in result.items() if "between" in name} for result in results],
        1,
    )


def check_local(results: list[dict[str, Any]], record: int) -> None:
    """Demand that gradients differ by rank in a record of each case."""
    for name, case in results[0].items():
        first, second = (
            arms["patched"][record]["grad"]["0.weight"] for arms in (case, results[1][name])
        )
        assert not torch.equal(first, second), name


class Stem(nn.Module):
    """A model that uses its first layer or leaves it out. The gradient of the first layer comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, uses_first: bool) -> torch.Tensor:
        return self.last(self.first(x) if uses_first else x)


def used_under_no_sync(ddp: dict[str, Any]) -> list[Record]:
    """Use a layer in a microbatch under no_sync, and leave it out in the one that is reduced."""
    model = Stem()
    wrapped = DDP(model, find_unused_parameters=True, **ddp)
    records = []
    for step in range(3):
        with wrapped.no_sync():
            wrapped(data(step, 4, 6), True).square().mean().backward()
        wrapped(data(step, 4, 6, micro=1), False).square().mean().backward()
        records.append(seen(model))
        wrapped.zero_grad()
    return records


def test_a_layer_that_only_no_sync_has_used_is_averaged(ranks):
    check_cases(
        ranks(2), used_under_no_sync, table(ddp=[{}, {"bucket_cap_mb": 0.0001}]), backwards=3
    )

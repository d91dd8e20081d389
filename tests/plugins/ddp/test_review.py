"""Programs with which a reviewer broke the reducer."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ovpatch
from tests.plugins.ddp.arms import (
    Record,
    both,
    data,
    is_patched,
    record_steps,
    reduced_in_place,
    seen,
    stock_and_patched,
    table,
)
from tests.plugins.ddp.checks import check, check_cases
from tests.plugins.ddp.test_failures import Bomb, Mined
from tests.support.equality import compare

# In MiB. Every gradient of these models gets its own bucket.
TINY = 0.0001


def wide() -> nn.Sequential:
    """Return a model with gradients large enough to become views of their buckets."""
    return nn.Sequential(
        nn.Linear(6, 190), nn.Linear(190, 190), nn.Linear(190, 190), nn.Linear(190, 3)
    )


def loop_checkpointed_wrapper(reentrant: bool) -> list[Record]:
    """Checkpoint the wrapper itself, so that its forward runs again inside the backward."""
    model, head = wide(), nn.Linear(3, 2)
    wrapped = DDP(model, bucket_cap_mb=TINY)
    inputs = (data(step, 4, 6).requires_grad_() for step in range(3))
    return record_steps(
        model,
        (head(checkpoint(wrapped, x, use_reentrant=reentrant)).square().mean() for x in inputs),
    )


def test_a_forward_recomputed_in_its_own_backward_is_no_interruption(ranks):
    for result in check_cases(ranks(2), loop_checkpointed_wrapper, table(reentrant=[True, False])):
        assert all(case["counters"]["recovered"] == 0 for case in result.values())


class Outer(nn.Module):
    """A wrapper inside a wrapper. Both reduce the inner parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = DDP(wide(), bucket_cap_mb=TINY), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@reduced_in_place
def loop_shared_parameters(nested: bool) -> list[Record]:
    model = Outer() if nested else wide()
    # The wrapper with small buckets reduces early, and the wrapper with large buckets reads the gradients late.
    wrappers = [DDP(model)] if nested else [DDP(model, bucket_cap_mb=TINY), DDP(model)]
    losses = (
        sum(w(data(step, 4, 6, micro=m)).square().mean() for m, w in enumerate(wrappers))
        for step in range(4)
    )
    return record_steps(model, losses)


@pytest.mark.parametrize("nested", [True, False])
def test_two_wrappers_that_share_parameters(ranks, nested):
    check(ranks(2)(both, loop_shared_parameters, nested))


@reduced_in_place
def loop_dropped_in_backward() -> list[Record]:
    """Drop or replace gradients in a hook of the first layer, after their reduction in the same backward."""
    model = wide()
    wrapped = DDP(model, bucket_cap_mb=TINY)
    active = []

    def drop(_: torch.Tensor) -> None:
        if active:
            model[2].weight.grad = None if active[-1] else torch.full_like(model[2].weight, 7.0)

    model[0].weight.register_post_accumulate_grad_hook(drop)
    records = []
    for step in range(4):
        active += [step % 2 == 0] if step else []
        records += record_steps(model, [wrapped(data(step, 4, 6)).square().mean()])
    return records


def test_a_gradient_dropped_after_its_reduction_comes_back(ranks):
    check(ranks(2)(both, loop_dropped_in_backward))


@reduced_in_place
def loop_used_elsewhere(how: str) -> list[Record]:
    """Allocate gradients as a script, and read them by other ways than Python references to the tensor."""
    model = wide()
    wrapped = DDP(model)
    arrays: list[Any] = []
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        if how == "numpy":
            arrays.append(torch.zeros_like(param).detach().numpy())
            param.grad = torch.from_numpy(arrays[-1])
        elif how == "dlpack":
            arrays.append(torch.from_dlpack(param.grad))
        elif how == "storage":
            arrays.append(param.grad.untyped_storage())
        elif how == "shared":
            param.grad.share_memory_()
        elif how == "weakref":
            arrays.append(weakref.ref(param.grad))
        elif how == "attribute":
            param.grad.tag = 5
        elif how == "strides" and param.dim() == 2:
            param.grad = torch.empty_strided(param.shape, (1, param.shape[0])).zero_()
    records = []
    for step in range(3):
        wrapped(data(step, 4, 6)).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        look = {
            "numpy": lambda grads=grads: [torch.from_numpy(a.copy()) for a in arrays],
            "dlpack": lambda grads=grads: [a.clone() for a in arrays],
            "storage": lambda grads=grads: [
                a.data_ptr() == g.data_ptr() for a, g in zip(arrays, grads, strict=True)
            ],
            "shared": lambda grads=grads: [g.is_shared() for g in grads],
            "weakref": lambda grads=grads: [a() is g for a, g in zip(arrays, grads, strict=True)],
            "attribute": lambda grads=grads: [getattr(g, "tag", None) for g in grads],
            "strides": lambda grads=grads: [g.stride() for g in grads],
        }[how]()
        records.append({"look": look, **seen(model)})
        wrapped.zero_grad(set_to_none=False)
    return records


def test_a_gradient_that_is_used_elsewhere_keeps_its_memory(ranks):
    how = ["numpy", "dlpack", "storage", "shared", "weakref", "attribute", "strides"]
    check_cases(ranks(2), loop_used_elsewhere, table(how=how))


def accumulate(wrapped: DDP, step: int) -> Record:
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped(data(step, 4, 8)).square().mean().backward()
    wrapped(data(step, 4, 8, micro=1)).square().mean().backward()
    return seen(wrapped.module)


def fails_then_accumulates(depths: list[int]) -> list[Record]:
    """Accumulate after a backward that fails. Stock PyTorch could not continue, so its arm skips this backward."""
    wrapped = DDP(Mined(), bucket_cap_mb=TINY)
    records = [accumulate(wrapped, 0), accumulate(wrapped, 1)]
    if is_patched():
        Bomb.armed = True
        with pytest.raises(RuntimeError, match="not really"):
            wrapped(data(90, 4, 8), depths[dist.get_rank()]).square().mean().backward()
        Bomb.armed = False
    return [*records, accumulate(wrapped, 2), accumulate(wrapped, 3)]


def test_a_failed_step_may_be_followed_by_one_without_synchronisation(ranks):
    check_cases(ranks(2), fails_then_accumulates, table(depths=[[1, 1], [0, 3]]))


def interrupted_while_waiting() -> list[Record]:
    """Raise Ctrl-C in the callback of the engine, after some or all collectives of the step, in the patched arm."""
    from ovpatch.overlap.data_parallel.grad_bucket import GradBucket

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    wrapped = DDP(Mined(), bucket_cap_mb=TINY, find_unused_parameters=True)
    records = [accumulate(wrapped, 0)]
    for place in ("unpack", "pack") if is_patched() else ():
        loss = wrapped(data(90, 4, 8)).square().mean()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradBucket, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
    return [*records, accumulate(wrapped, 1), accumulate(wrapped, 2)]


def test_an_interrupt_in_the_callback_can_be_recovered_from(ranks):
    check(ranks(2)(both, interrupted_while_waiting))


def loop_wrap_during_backward() -> list[Record]:
    """Wrap a second model, on its own group, while another thread is in a backward."""
    model, group = Mined(), dist.new_group()
    wrapped = DDP(model, bucket_cap_mb=TINY)
    records = []
    for step in range(3):
        loss = wrapped(data(step, 4, 8)).square().mean()
        inside, go = threading.Event(), threading.Event()

        def hold(
            _: torch.Tensor, inside: threading.Event = inside, go: threading.Event = go
        ) -> None:
            inside.set()
            go.wait(60)

        hook = model.layers[1].weight.register_hook(hold)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        assert inside.wait(60)
        DDP(nn.Linear(2, 2), process_group=group)
        go.set()
        thread.join(60)
        hook.remove()
        records.append(seen(model))
        wrapped.zero_grad()
    return records


def test_a_model_wrapped_while_another_thread_is_in_a_backward(ranks):
    check(ranks(2)(both, loop_wrap_during_backward))


def loop_wrap_during_the_end(group_is_new: bool) -> list[Record]:
    """Wrap a second model, on its own group, while another thread waits at the end of a backward."""
    model, group, own = Mined(), dist.new_group(), dist.new_group()
    wrapped = DDP(model, bucket_cap_mb=TINY, process_group=own)
    records = []

    def train(step: int, inside: threading.Event, go: threading.Event) -> None:
        loss = wrapped(data(step, 4, 8)).square().mean()
        reducer = wrapped.reducer
        if not isinstance(reducer, dist.Reducer):
            sync = reducer.grad_reducer.sync
            start_remaining = sync.start_remaining

            def held(*args: Any) -> None:
                inside.set()
                go.wait(60)
                start_remaining(*args)

            sync.start_remaining = held
        loss.backward()
        inside.set()

    for step in range(3):
        inside, go = threading.Event(), threading.Event()
        thread = threading.Thread(target=train, args=(step, inside, go))
        thread.start()
        assert inside.wait(60)
        # The timer ends a deadlock in which the wrap waits for the other thread.
        threading.Timer(0.5, go.set).start()
        second = DDP(nn.Linear(2, 2), process_group=dist.new_group() if group_is_new else group)
        second(data(step, 3, 2)).sum().backward()
        go.set()
        thread.join(60)
        records += [seen(model), seen(second.module)]
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("group_is_new", [True, False])
def test_a_model_wrapped_while_another_thread_ends_a_backward(ranks, group_is_new):
    results = ranks(2)(both, loop_wrap_during_the_end, group_is_new, timeout=60)
    check(results)
    assert [result["counters"]["recovered"] for result in results] == [0, 0]


def frozen_then_cast() -> list[Record]:
    torch.manual_seed(0)
    with ovpatch.applied("ddp"):
        model = wide()
        wrapped = DDP(model, find_unused_parameters=True)
        records = []
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(False)
                model.double()
            if step == 4:
                model[0].requires_grad_(True)
            wrapped.zero_grad()
            wrapped(data(step, 4, 6).to(model[0].weight.dtype)).square().mean().backward()
            records.append(seen(model))
        return records


def test_a_partly_frozen_model_may_be_cast_and_thawed(ranks):
    """Compare ranks with each other, because the stock reducer loses its hooks at the cast and never reduces again."""
    first, second = ranks(2)(frozen_then_cast)
    compare([r["grad"] for r in first], [r["grad"] for r in second]).assert_bitwise()
    assert first[3]["grad"]["0.weight"] is None
    assert first[5]["grad"]["0.weight"].abs().sum() > 0


def static_graph_misused(late: bool) -> str:
    wrapped = DDP(wide(), static_graph=not late)
    try:
        for step in range(3):
            if late and step == 2:
                wrapped._set_static_graph()
            with wrapped.no_sync() if not late and step == 0 else contextlib.nullcontext():
                wrapped(data(step, 4, 6)).square().mean().backward()
    except RuntimeError as error:
        return f"{step}: {error}"
    return "no error"


@pytest.mark.parametrize("late", [True, False])
def test_a_late_or_unsynchronized_static_graph_raises_as_in_stock_pytorch(ranks, late):
    for stock, patched in ranks(2)(stock_and_patched, static_graph_misused, late):
        assert patched[0] == stock[0] == ("2" if late else "0")
        assert (
            "before training loop" in patched
            if late
            else "Run the first backward outside of no_sync()" in patched
        )

"""Hooks of the user never see a slice, exceptions do not leave one, and what was not reduced stays local."""

from __future__ import annotations

import contextlib
import gc
import re
import time
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ovpatch
from ovpatch.overlap.tensors.pending_param import is_pending
from ovpatch_plugins.dist_optimizer.optimizer_attach import find_sharded
from tests.plugins.ddp.arms import Record, counted, data, device
from tests.plugins.dist_optimizer.checks import SMALL, all_cases, check_all, ddp, params, train_step
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, Signed, net
from tests.support.errors import error_of


def sight(opt: Optimizer) -> list[Any]:
    """Return shapes and sums of all that a hook can see."""
    ones = [p for group in opt.param_groups for p in group["params"]]
    shapes = [(p.shape, None if p.grad is None else p.grad.shape) for p in ones]
    assert all(grad is None or whole == grad for whole, grad in shapes)
    states = [
        {n: tuple(v.shape) for n, v in opt.state[p].items() if torch.is_tensor(v)}
        for p in ones
        if p in opt.state
    ]
    return [[tuple(whole) for whole, _ in shapes], states]


def hooked(look: bool) -> list[Record]:
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    seen: list[Any] = []

    def hook(optimizer: Optimizer, *_: Any) -> None:
        seen.append(sight(optimizer))
        if look:
            seen.append([p.detach().sum() for p in model.parameters()])
            seen.append([p.grad.sum() for p in model.parameters()])

    handles = [
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
        opt.register_step_pre_hook(hook),
        opt.register_step_post_hook(hook),
    ]
    opt.register_state_dict_pre_hook(lambda o: seen.append(sight(o)))
    opt.register_state_dict_post_hook(
        lambda o, s: seen.append(
            [[tuple(v.shape) for v in one.values()] for one in s["state"].values()]
        )
    )
    records = []
    for step in range(8):
        train_step(model, opt, step)
        records.append({"seen": list(seen), "param": params(model)})
        seen.clear()
    opt.state_dict()
    for handle in handles:
        handle.remove()
    return [*records, {"seen": seen}]


def test_hooks_see_whole_tensors(ranks):
    check_all(ranks(2)(all_cases, hooked, {"look": {"look": True}}), by_parts=False)
    check_all(ranks(2)(all_cases, hooked, {"glance": {"look": False}}))


def raising(where: str) -> list[Record]:
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    bad = [False]

    def bomb(*_: Any) -> None:
        if bad[0]:
            raise ValueError("not really")

    def closure() -> torch.Tensor:
        bomb()
        return torch.tensor(0.0)

    if where == "pre-hook":
        opt.register_step_pre_hook(bomb)
    if where == "post-hook":
        opt.register_step_post_hook(bomb)
    if where == "backward":
        model.module[2].weight.register_hook(bomb)
    records = []
    for step in range(10):
        bad[0] = step in (4, 7)
        kept = opt.param_groups[0]["betas"]
        if bad[0] and where == "step":
            opt.param_groups[0]["betas"] = None
        with contextlib.suppress(ValueError, TypeError):
            opt.zero_grad()
            model(data(step, 5, 6)).square().mean().backward()
            opt.step(closure) if where == "closure" else opt.step()
        opt.param_groups[0]["betas"] = kept
        records.append({"seen": sight(opt), "param": params(model)})
    return records


@pytest.mark.parametrize("where", ["pre-hook", "post-hook", "step", "closure"])
def test_after_a_step_that_raises_everything_is_whole(ranks, where):
    check_all(ranks(2)(all_cases, raising, {where: {"where": where}}))


def interrupted() -> list[Record]:
    """A step ends by Ctrl-C when it has updated. No gradient depends on parameters, of which other shards are late."""
    model = ddp(torch.nn.Linear(6, 3).to(device()))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    update = torch._foreach_add_

    def interrupt(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        raise KeyboardInterrupt

    records = []
    for step in range(8):
        opt.zero_grad()
        model(data(step, 5, 6)).sum().backward()
        if step == 4:
            with (
                mock.patch.object(torch, "_foreach_add_", interrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                opt.step()
        else:
            opt.step()
            records.append({"param": params(model)})
    return records


def test_a_step_that_is_interrupted_keeps_its_update(ranks):
    check_all(ranks(2)(all_cases, interrupted, {"": {}}))


def mined(model: torch.nn.Module) -> list[bool]:
    """Have the backward fail for as long as the list that is returned says so."""
    bad = [False]

    def bomb(_grad: torch.Tensor) -> None:
        if bad[0]:
            raise ValueError("not really")

    model.module[2].weight.register_hook(bomb)
    return bad


def failing_backward(steps: list[tuple[int, bool]]) -> list[Record]:
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    bad = mined(model)
    records = []
    for seed, fails in steps:
        bad[0] = fails
        opt.zero_grad()
        try:
            model(data(seed, 5, 6)).square().mean().backward()
        except ValueError:
            continue
        opt.step()
        records.append(params(model))
    return records


def failing_arms() -> dict[str, Any]:
    """Stock cannot go on after a failed backward, so its arm leaves those steps out."""
    good = [(seed, False) for seed in range(9)]
    torch.manual_seed(0)
    stock = failing_backward(good)
    steps = [(90, True), *good[:4], (91, True), *good[4:7], (92, True), (93, True), *good[7:]]
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        found = counted(failing_backward, steps)
        dist.barrier()
    return {"": {"stock": stock, **found}}


def test_training_goes_on_after_a_backward_that_failed_on_all_ranks(ranks):
    check_all(ranks(2)(failing_arms), steps=9)


def failing_alone() -> tuple[str, int]:
    """Rank 1 loses the backward of its fifth step; the gradients of which the other one has parts lack its share."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model = ddp(net())
        opt = OPTIMIZERS["adamw"](model.parameters())
        bad = mined(model)
        step, text = 0, ""
        for step in range(6):
            bad[0] = step == 4 and dist.get_rank() == 1
            opt.zero_grad()
            loss = model(data(step, 5, 6)).square().mean()
            try:
                loss.backward()
            except (ValueError, RuntimeError) as error:
                text = str(error)
                break
            opt.step()
        if dist.get_rank() == 1:
            model(data(9, 5, 6))  # completes what its peer waits for
        dist.barrier()
        return text, step


def test_a_rank_whose_peer_lost_a_backward_hears_of_it(ranks):
    (heard, step), (own, _) = ranks(2)(failing_alone)
    assert own == "not really"
    assert "ended the backward of step 4 on another rank" in heard, heard
    assert step == 4


def local_steps(style: str) -> list[Record]:
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    records = []
    for step in range(12):
        opt.zero_grad()
        local = {"all": True, "begins": step > 4, "ends": step < 5, "average": step % 3 != 0}[style]
        with model.no_sync() if local else contextlib.nullcontext():
            model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        if style in ("all", "begins") and step % 4 == 3:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p /= dist.get_world_size()
        records.append(params(model))
    return [
        *records,
        {"steps": [float(state["step"]) for state in opt.state_dict()["state"].values()]},
    ]


@pytest.mark.parametrize("style", ["all", "begins", "ends", "average"])
def test_steps_on_local_gradients_are_stocks(ranks, style):
    steps = 0 if style in ("all", "ends") else 1
    check_all(
        ranks(2)(all_cases, local_steps, {style: {"style": style}}),
        steps=steps,
        stock=1,
        by_parts=None,
    )


def local_before_another(beside: bool) -> list[Record]:
    """An optimizer steps on local gradients once; another one over the same parameters leaves ranks as they are."""
    model = ddp(net())
    opts = [OPTIMIZERS[kind](model.parameters()) for kind in ("adamw", "sgd")] if beside else []
    opt = opts[0] if beside else OPTIMIZERS["adamw"](model.parameters())
    records = []
    for step in range(9):
        with model.no_sync() if step == 3 else contextlib.nullcontext():
            model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step >= 3:
            opt = (
                opts[step % 2]
                if beside
                else OPTIMIZERS["sgd"](model.parameters())
                if step == 3
                else opt
            )
        elif beside:
            opts[1].step()
        records.append(params(model))
    return records


@pytest.mark.parametrize("beside", [False, True])
def test_after_a_step_on_local_gradients_all_optimizers_are_stock(ranks, beside):
    results = ranks(2)(all_cases, local_before_another, {"": {"beside": beside}})
    check_all(results, steps=3, stock=2, by_parts=None)
    first, second = (next(iter(result[""]["patched"][-1].values())) for result in results)
    assert not torch.equal(first, second), "each has stepped by its own data"


class Partial(nn.Module):
    """Leaves a layer out from a forward on, which DistributedDataParallel does not expect."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.count = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.used(x) if self.count > 4 else self.spare(self.used(x))


def unfinished() -> list[Any]:
    model = ddp(Partial())
    opt = OPTIMIZERS["sgd"](model.parameters())
    records: list[Any] = []
    for step in range(5):
        opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(model))
    return [*records, error_of(model, data(5, 5, 6)).partition("\n")[0]]


def test_a_step_after_a_backward_that_was_not_reduced_is_stocks(ranks):
    check_all(ranks(2)(all_cases, unfinished, {"": {}}), steps=4, stock=1, by_parts=None)


TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)  # gloo has several ways to say it


def stopping(before: str) -> tuple[str, float]:
    """Rank 1 stops in its fifth step, before its backward or before its step; return what the other one gets."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        group = dist.new_group(timeout=timedelta(seconds=3))
        model = DistributedDataParallel(net(), process_group=group)
        opt = OPTIMIZERS["adamw"](model.parameters())
        begin, text = time.monotonic(), ""
        try:
            for step in range(6):
                stops = step == 4 and dist.get_rank() == 1
                loss = model(data(step, 5, 6)).square().mean()
                opt.zero_grad()
                begin = time.monotonic()
                if stops and before == "backward":
                    break
                loss.backward()
                if stops:
                    break
                opt.step()
        except RuntimeError as error:
            text = str(error)
        waited = time.monotonic() - begin
        if dist.get_rank() == 1:
            time.sleep(4)
        dist.barrier()
        del model, opt  # they are not in step, so nobody can make their state whole
    return text, waited


@pytest.mark.parametrize("before", ["backward", "step"])
def test_the_others_raise_when_a_rank_stops(ranks, before):
    (text, waited), (nothing, _) = ranks(2)(stopping, before)
    assert TIMED_OUT.search(text), text
    assert 2 < waited < 40
    assert not nothing


def lost() -> tuple[list[str], bool, bool]:
    """Parameters of rank 0 never arrive; return what it is told when it reads, and whether that ends with the model."""
    said = []
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model = DistributedDataParallel(
            net(), process_group=dist.new_group(timeout=timedelta(seconds=3))
        )
        opt = OPTIMIZERS["adamw"](model.parameters())
        for step in range(2):
            model(data(step, 5, 6)).square().mean().backward()
            if step == 0 or dist.get_rank() == 0:
                opt.step()
            else:
                # Rank 1 is lost in its step, after ranks have voted.
                sharded = find_sharded(opt)
                assert sharded is not None
                sharded._find_step_params(opt)
                assert not sharded._agree_on_step(opt)
        if dist.get_rank() == 0:
            said = [error_of(model.module[0].weight.sum) for _ in range(2)]
        weight = weakref.ref(model.module[0].weight)
        while_it_lives = is_pending(model.module[0].weight)
        del model, opt
        dist.barrier()
    gc.collect()
    return said, while_it_lives, weight() is not None


def test_parameters_that_never_arrive_are_an_error_for_their_readers_only(ranks):
    (said, while_it_lives, afterwards), _ = ranks(2)(lost)
    assert len(said) == 2
    assert all(TIMED_OUT.search(text) for text in said), said
    assert while_it_lives
    assert not afterwards


def dropped(ending: str) -> tuple[bool, bool, bool]:
    """Drop model and optimizer right after a step; return whether parameters were pending, then, and are alive."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model, other = ddp(net()), ddp(net())
        opt, others = (
            OPTIMIZERS["adamw"](model.parameters()),
            OPTIMIZERS["adamw"](other.parameters()),
        )
        for step in range(3):
            model(data(step, 5, 6)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        weight = weakref.ref(model.module[0].weight)
        was_pending = is_pending(model.module[0].weight)
        if ending == "none, as all have been read":
            model(data(0, 5, 6))
        del model, opt
        gc.collect()
        at_once = weight() is not None
        if ending == "step":
            other(data(0, 5, 6)).square().mean().backward()
            others.step()
        elif ending == "destroy":
            dist.destroy_process_group(dist.new_group())
        gc.collect()
        return was_pending, at_once, weight() is not None


@pytest.mark.parametrize("ending", ["step", "destroy", "none, as all have been read"])
def test_parameters_whose_optimizer_is_gone_are_freed_once_they_have_arrived(ranks, ending):
    for was_pending, at_once, afterwards in ranks(2)(dropped, ending):
        assert was_pending
        assert at_once is not ending.startswith("none")  # or this would test nothing
        assert not afterwards


SIGNED = f"{Signed.__module__}.{Signed.__qualname__}"


def differently() -> str:
    """Options that decide what ranks communicate differ; the wrap says so, where a step would hang."""
    options = {"dist_optimizer": SMALL | {"element_wise": SIGNED if dist.get_rank() else ""}}
    with (
        ovpatch.applied("ddp", "dist_optimizer", options=options),
        pytest.raises(RuntimeError) as raised,
    ):
        DistributedDataParallel(net())
    return str(raised.value)


def test_options_that_differ_between_ranks_are_named(ranks):
    for text in ranks(2)(differently):
        assert f'dist_optimizer.element_wise is "" on rank 0 but "{SIGNED}" on rank 1' in text


def scaled_in_backward() -> list[Record]:
    """A hook in the middle of each backward scales the gradients that have come before it."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())

    def scale(*_: Any) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(3)

    model.module[0].register_full_backward_pre_hook(scale)
    records = []
    for step in range(5):
        train_step(model, opt, step)
        records.append(params(model))
    return records


def test_a_hook_that_changes_other_gradients_in_backward_has_stocks_effect(ranks):
    check_all(ranks(2)(all_cases, scaled_in_backward, {"scaled": {}}), steps=5)

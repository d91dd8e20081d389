"""Hooks of the user see full tensors, exceptions leave full tensors, and gradients that were not reduced stay local."""

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
from tests.support import patience
from tests.support.errors import error_of


def sight(opt: Optimizer) -> list[Any]:
    """Return the shapes of all tensors that a hook can read."""
    parameters = [p for group in opt.param_groups for p in group["params"]]
    shapes = [(p.shape, None if p.grad is None else p.grad.shape) for p in parameters]
    assert all(grad is None or shape == grad for shape, grad in shapes)
    states = [
        {n: tuple(v.shape) for n, v in opt.state[p].items() if torch.is_tensor(v)}
        for p in parameters
        if p in opt.state
    ]
    return [[tuple(shape) for shape, _ in shapes], states]


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
            [[tuple(v.shape) for v in state.values()] for state in s["state"].values()]
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


def test_hooks_see_full_tensors(ranks):
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
def test_after_a_step_that_raises_all_tensors_are_full(ranks, where):
    check_all(ranks(2)(all_cases, raising, {where: {"where": where}}))


def interrupted() -> list[Record]:
    """Interrupt a step with Ctrl-C after its update. No gradient depends on parameters whose other shards are late."""
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
    """Make the backward fail while the returned list contains True."""
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
    """Run both arms. Stock PyTorch cannot continue after a failed backward, so its arm leaves those steps out."""
    good = [(seed, False) for seed in range(9)]
    torch.manual_seed(0)
    stock = failing_backward(good)
    steps = [(90, True), *good[:4], (91, True), *good[4:7], (92, True), (93, True), *good[7:]]
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        found = counted(failing_backward, steps)
        dist.barrier()
    return {"": {"stock": stock, **found}}


def test_training_continues_after_a_backward_that_failed_on_all_ranks(ranks):
    check_all(ranks(2)(failing_arms), steps=9)


def failing_alone() -> tuple[str, int]:
    """Let the backward of step 4 fail on rank 1, so the shards of rank 0 lack its contribution; return the errors."""
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
            # A new forward completes the collectives that the peer waits for.
            model(data(9, 5, 6))
        dist.barrier()
        return text, step


def test_a_rank_whose_peer_lost_a_backward_raises(ranks):
    (received, step), (own, _) = ranks(2)(failing_alone)
    assert own == "not really"
    assert "ended the backward of step 4 on another rank" in received, received
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
def test_steps_on_local_gradients_fall_back(ranks, style):
    steps = 0 if style in ("all", "ends") else 1
    check_all(
        ranks(2)(all_cases, local_steps, {style: {"style": style}}),
        steps=steps,
        stock=1,
        by_parts=None,
    )


def local_before_another(is_second_from_start: bool) -> list[Record]:
    """Step once on local gradients, then step a second optimizer over the same parameters, which ranks disagree on."""
    model = ddp(net())
    opts = (
        [OPTIMIZERS[kind](model.parameters()) for kind in ("adamw", "sgd")]
        if is_second_from_start
        else []
    )
    opt = opts[0] if is_second_from_start else OPTIMIZERS["adamw"](model.parameters())
    records = []
    for step in range(9):
        with model.no_sync() if step == 3 else contextlib.nullcontext():
            model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step >= 3:
            opt = (
                opts[step % 2]
                if is_second_from_start
                else OPTIMIZERS["sgd"](model.parameters())
                if step == 3
                else opt
            )
        elif is_second_from_start:
            opts[1].step()
        records.append(params(model))
    return records


@pytest.mark.parametrize("is_second_from_start", [False, True])
def test_after_a_step_on_local_gradients_all_optimizers_fall_back(ranks, is_second_from_start):
    cases = {"": {"is_second_from_start": is_second_from_start}}
    results = ranks(2)(all_cases, local_before_another, cases)
    check_all(results, steps=3, stock=2, by_parts=None)
    first, second = (next(iter(result[""]["patched"][-1].values())) for result in results)
    assert not torch.equal(first, second), "each has stepped by its own data"


class Partial(nn.Module):
    """A model that leaves a layer out after four forwards, which DistributedDataParallel does not expect."""

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


def test_a_step_after_a_backward_that_was_not_reduced_falls_back(ranks):
    check_all(ranks(2)(all_cases, unfinished, {"": {}}), steps=4, stock=1, by_parts=None)


# gloo has several messages for a timeout.
TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)


def stopping(before: str, limit: float) -> str:
    """Stop rank 1 in step 4, before its backward or before its step; return the error of rank 0."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        group = dist.new_group(timeout=timedelta(seconds=limit))
        model = DistributedDataParallel(net(), process_group=group)
        opt = OPTIMIZERS["adamw"](model.parameters())
        text = ""
        try:
            for step in range(6):
                stops = step == 4 and dist.get_rank() == 1
                loss = model(data(step, 5, 6)).square().mean()
                opt.zero_grad()
                if stops and before == "backward":
                    break
                loss.backward()
                if stops:
                    break
                opt.step()
        except RuntimeError as error:
            text = str(error)
        if dist.get_rank() == 1:
            time.sleep(limit + 1)
        dist.barrier()
        # The ranks have taken different numbers of steps, so no rank can gather the state.
        del model, opt
    return text


@pytest.mark.parametrize("before", ["backward", "step"])
def test_peers_raise_when_a_rank_stops(ranks, before):
    text, nothing = ranks(2)(stopping, before, patience.lengthen(3))
    assert TIMED_OUT.search(text), text
    assert not nothing


def lost(limit: float) -> tuple[list[str], bool, bool]:
    """Let the gather of rank 0 never complete; return its errors on reads, and whether the parameter stays pending.

    The last value is whether the parameter is alive after the script has dropped the model.
    """
    errors = []
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model = DistributedDataParallel(
            net(), process_group=dist.new_group(timeout=timedelta(seconds=limit))
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
            errors = [error_of(model.module[0].weight.sum) for _ in range(2)]
        weight = weakref.ref(model.module[0].weight)
        while_it_lives = is_pending(model.module[0].weight)
        del model, opt
        dist.barrier()
    gc.collect()
    return errors, while_it_lives, weight() is not None


def test_parameters_that_never_arrive_are_an_error_for_their_readers_only(ranks):
    (errors, while_it_lives, afterwards), _ = ranks(2)(lost, patience.lengthen(3))
    assert len(errors) == 2
    assert all(TIMED_OUT.search(text) for text in errors), errors
    assert while_it_lives
    assert not afterwards


def dropped(ending: str) -> tuple[bool, bool, bool]:
    """Drop model and optimizer right after a step; return whether a parameter was pending, then lived on, and lives."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model, second = ddp(net()), ddp(net())
        opt = OPTIMIZERS["adamw"](model.parameters())
        second_opt = OPTIMIZERS["adamw"](second.parameters())
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
            second(data(0, 5, 6)).square().mean().backward()
            second_opt.step()
        elif ending == "destroy":
            group = dist.new_group()
            # A rank that destroys the group early would close the connection that its peer still sets up.
            dist.barrier(group)
            dist.destroy_process_group(group)
        gc.collect()
        return was_pending, at_once, weight() is not None


@pytest.mark.parametrize("ending", ["step", "destroy", "none, as all have been read"])
def test_parameters_of_a_freed_optimizer_are_freed_once_they_have_arrived(ranks, ending):
    for was_pending, at_once, afterwards in ranks(2)(dropped, ending):
        assert was_pending
        # Otherwise the case would test nothing.
        assert at_once is not ending.startswith("none")
        assert not afterwards


SIGNED = f"{Signed.__module__}.{Signed.__qualname__}"


def differently() -> str:
    """Wrap a model with options that decide the communication and differ between ranks; return the error.

    Without this error a step would hang.
    """
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
    """Scale the gradients that have been computed so far, in a hook in the middle of each backward."""
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


def test_a_hook_that_changes_other_gradients_in_backward_acts_as_in_stock_pytorch(ranks):
    check_all(ranks(2)(all_cases, scaled_in_backward, {"scaled": {}}), steps=5)

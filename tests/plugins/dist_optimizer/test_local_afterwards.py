"""Local training on each rank after the wrapper was freed."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer.checks import all_cases, both, ddp, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.support.rarely import ALL_CASES


def deleted(set_to_none: bool, alone: bool, again: bool) -> list[Any]:
    """Step on all ranks, then step the module without its wrapper, on all ranks or one, and maybe wrap it again."""
    module = net()
    model: nn.Module | None = ddp(module)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(8):
        if step == 4:
            model = None
            gc.collect()
        if step == 6 and again:
            model = ddp(module)
        opt.zero_grad(set_to_none=set_to_none)
        if model is not None or not alone or dist.get_rank() == 0:
            (model or module)(data(step, 5, 6)).square().mean().backward()
            if step % 2:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            opt.step()
        records.append(params(module))
    return records


def check_near(results: list[dict[str, Any]], *steps: int) -> None:
    """Demand the values of stock PyTorch except for the order of sums, and one of ``steps`` as the number of steps."""
    for result in results:
        torch.testing.assert_close(result["patched"], result["stock"], rtol=1e-5, atol=1e-6)
        assert result["counters"]["steps"] in steps


@pytest.mark.parametrize(("set_to_none", "world"), [(True, 2), (False, 2), (True, 3)])
def test_without_the_wrapper_each_rank_continues_alone(ranks, world, set_to_none):
    for alone, again in ((False, False), (True, False), (False, True)):
        results = ranks(world)(both, deleted, set_to_none, alone, again)
        check_near(results, 4)
        first, second = (result["patched"][5]["0.weight"] for result in results[:2])
        assert not torch.equal(first, second), "each rank trains with its own data"


def thawed_after_another_wrap() -> list[Any]:
    """Wrap the module again while a parameter is frozen, and thaw it: its gradients are local then."""
    module = net()
    model: nn.Module | None = ddp(module)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    weight = next(module.parameters())
    records = []
    for step in range(7):
        opt.zero_grad()
        if step == 3:
            weight.requires_grad_(False)
            model = None
            gc.collect()
            model = ddp(module)
        weight.requires_grad_(step not in (3, 4))
        assert model is not None
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(module))
    return records


def test_a_parameter_that_was_frozen_while_the_wrapper_was_freed_gets_local_gradients(ranks):
    results = ranks(2)(both, thawed_after_another_wrap)
    check_near(results, 5)
    first, second = (result["patched"][5]["0.weight"] for result in results)
    assert not torch.equal(first, second), "the second wrapper does not reduce it"


class Quantized(nn.Module):
    """A linear layer after a matrix that the script may quantize, which then takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(5))
        self.linear = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_trained = self.matrix.is_floating_point() and not self.matrix.is_inference()
        return self.linear(x @ self.matrix if is_trained else x)


def change_frozen(matrix: nn.Parameter, how: str) -> None:
    """Make of a frozen parameter one that torch's methods refuse hooks for."""
    matrix.requires_grad_(False)
    if how == "quantized":
        matrix.data = matrix.data.to(torch.int8)
    elif "of inference mode" in how:
        with torch.inference_mode():
            matrix.data = matrix.data.double() if "fp64" in how else matrix.data.clone()
    else:
        matrix.copy_(nn.Parameter(2 * torch.eye(5)))


def changed_before_the_wrapper_is_freed(how: str) -> list[Any]:
    """Change a frozen parameter, drop the wrapper, and train the remaining parameters on each rank alone."""
    torch.manual_seed(1)
    module = Quantized()
    model: nn.Module | None = ddp(module)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(5):
        opt.zero_grad()
        if step == 3:
            change_frozen(module.matrix, how)
            model = None
            gc.collect()
            module.matrix.detach_()
        (model or module)(data(step, 5, 5)).square().mean().backward()
        opt.step()
        records.append(params(module))
    return records


def check_cases_near(results: list[dict[str, dict[str, Any]]], steps: int) -> None:
    for name in results[0]:
        check_near([result[name] for result in results], steps)


def test_a_parameter_that_cannot_have_gradients_hides_no_local_ones(ranks):
    cases = {how: {"how": how} for how in ("quantized", "of inference mode", "not a leaf")}
    check_cases_near(ranks(2)(all_cases, changed_before_the_wrapper_is_freed, cases), 3)


def free_inside(place: str, free: Callable[[], object]) -> None:
    """Call a function where a wrapper may be freed, as by the collector of garbage."""
    if place == "grad":
        torch.func.grad(lambda x: (free(), x.sum())[1])(torch.ones(2))
    elif place == "vmap":
        torch.vmap(lambda x: (free(), x)[1])(torch.ones(2, 2))
    elif place == "a backward":
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: free())
        x.sum().backward()
    elif place == "a thread":
        thread = threading.Thread(target=free)
        thread.start()
        thread.join()
    else:
        with torch.inference_mode() if place == "inference mode" else torch.no_grad():
            free()


def freed(place: str, is_frozen: bool) -> list[Any]:
    """Free the wrapper somewhere, maybe while a parameter is frozen, and continue alone."""
    module = net()
    models = [ddp(module)]
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    weight = next(module.parameters())
    records = []

    def free() -> None:
        models.clear()
        gc.collect()

    for step in range(6):
        opt.zero_grad()
        if step == 3:
            weight.requires_grad_(not is_frozen)
            free_inside(place, free)
            assert weight.requires_grad is not is_frozen
            weight.requires_grad_(True)
        (models[0] if models else module)(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(module))
    return records


PLACES = ("grad", "vmap", "a backward", "a thread", "inference mode", "no_grad")


def test_a_wrapper_may_be_freed_anywhere(ranks):
    cases = {
        f"{place}, {is_frozen}": {"place": place, "is_frozen": is_frozen}
        for i, place in enumerate(PLACES)
        for is_frozen in ((True, False) if ALL_CASES or i < 2 else (True,))
    }
    check_cases_near(ranks(2)(all_cases, freed, cases), 3)


def local_on_one(who: int, when: int, how: str) -> list[Any]:
    """Add local gradients to the averaged gradients on one rank; then all ranks unscale, clip and step."""
    module = net()
    model = ddp(module)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    records = []
    for step in range(6):
        opt.zero_grad()
        scaler.scale(model(data(step, 5, 6)).square().mean()).backward()
        if step == when and dist.get_rank() == who:
            around = module if "around" in how else model
            with model.no_sync():
                scaler.scale(around(data(step + 50, 5, 6)).square().mean()).backward()
        if "unscaled" in how:
            scaler.unscale_(opt)
        if "clipped" in how:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        if "by hand" in how:
            gradients = [param.grad for param in module.parameters() if param.grad is not None]
            nn.utils.clip_grads_with_norm_(
                module.parameters(), 0.1, nn.utils.get_total_norm(gradients)
            )
        scaler.step(opt)
        scaler.update()
        records.append(params(module))
    return records


HOWS = ["around", "no_sync", "around, clipped", "no_sync, unscaled, clipped", "around, by hand"]


@pytest.mark.parametrize(
    ("how", "world"), [*((how, 2) for how in HOWS), ("no_sync, unscaled, clipped", 3)]
)
def test_one_rank_alone_may_add_local_gradients(ranks, world, how):
    for who, when in ((0, 3), (1, 1)):
        check_near(ranks(world)(both, local_on_one, who, when, how, timeout=30), when)


def alone_at_the_end() -> list[Any]:
    """Train rank 1 alone without calling the wrapper, while its peers take no further step."""
    module = net()
    model = ddp(module)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    for step in range(6):
        if step < 3 or dist.get_rank() == 1:
            opt.zero_grad()
            (model if step < 3 else module)(data(step, 5, 6)).square().mean().backward()
            opt.step()
    dist.barrier()
    return [params(module)]


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_alone_may_continue_without_calling_the_wrapper(ranks, world):
    check_near(ranks(world)(both, alone_at_the_end), 3)


def deleted_before_the_step(gone: list[int], local: list[int]) -> list[Any]:
    """Drop the wrapper on ranks ``gone`` after a backward, add local gradients on ranks ``local``; then all step."""
    module = net()
    wrapper: nn.Module | None = ddp(module)
    forward = wrapper
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(6):
        opt.zero_grad()
        forward(data(step, 5, 6)).square().mean().backward()
        if step == 3:
            forward = module
            if dist.get_rank() in gone:
                wrapper = None
                gc.collect()
            if dist.get_rank() in local:
                module(data(step + 50, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(module))
    dist.barrier()
    del wrapper
    return records


def all_deleted_before_the_step() -> list[dict[str, Any]]:
    everyone = list(range(dist.get_world_size()))
    cases = [(everyone, [0]), (everyone, everyone), ([0], []), ([1], [1]), ([0], [1])]
    wanted = cases if dist.get_world_size() == 2 or ALL_CASES else cases[::2]
    return [both(deleted_before_the_step, *case) for case in wanted]


@pytest.mark.parametrize("world", [2, 3])
def test_the_wrapper_may_be_freed_between_backward_and_step(ranks, world):
    for results in ranks(world)(all_deleted_before_the_step):
        check_near(results, 3, 4)


def loaded_after_the_group() -> list[Any]:
    """Load state after the process group was destroyed that was saved before, and train each rank alone."""
    group = dist.new_group()
    module = net()
    model = ddp(module, process_group=group)
    opt = torch.optim.AdamW(module.parameters(), 1e-2)
    records = []
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(opt.state_dict())
            dist.destroy_process_group(group)
            opt.load_state_dict(saved)
        opt.zero_grad()
        (model if step < 3 else module)(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(module))
    dist.barrier()
    return records


def test_state_may_be_loaded_after_the_process_group_was_destroyed(ranks):
    check_near(ranks(2)(both, loaded_after_the_group), 3)

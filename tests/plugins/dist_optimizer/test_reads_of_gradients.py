"""Gradients as user code reads and writes them between backward and step: full and reduced, on any rank alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, on, params, some
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support.rarely import RARELY


def first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def adaptive_clipping(model: nn.Module) -> None:
    for p in model.parameters():
        limit = p.detach().norm().clamp_(min=1e-3) * 0.01
        norm = p.grad.detach().norm()
        p.grad.detach().copy_(
            torch.where(norm > limit, p.grad * (limit / norm.clamp(min=1e-6)), p.grad)
        )


def on_rank_0(read: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return lambda model: read(model) if dist.get_rank() == 0 else None


def printed(grad: torch.Tensor) -> torch.Tensor:
    """Return the values in the text of a gradient, which has all digits so that the last bits are compared."""
    torch.set_printoptions(precision=9, threshold=grad.numel())
    try:
        found: torch.Tensor = eval(repr(grad), {"tensor": torch.tensor})
    finally:
        torch.set_printoptions(profile="default")
    return found


READS: dict[str, Callable[[nn.Module], Any]] = {
    "clone": lambda m: [g.clone() for g in grads(m)],
    "norms": lambda m: torch.stack([g.norm() for g in grads(m)]).norm(),
    "norms of data": lambda m: sum(g.data.norm(2).item() ** 2 for g in grads(m)) ** 0.5,
    "data, then detach": lambda m: [first(m).grad.data.clone(), first(m).grad.detach().clone()],
    "foreach norm": lambda m: torch._foreach_norm(grads(m)),
    "one by numpy": lambda m: torch.from_numpy(first(m).grad.numpy().copy()),
    "dlpack": lambda m: torch.from_dlpack(first(m).grad).clone(),
    "tolist": lambda m: first(m).grad.tolist(),
    "item": lambda m: first(m).grad[2, 3].item(),
    "repr": lambda m: printed(first(m).grad),
    "flat": lambda m: torch.cat([g.view(-1) for g in grads(m)]),
    "flattened by C++": lambda m: torch._utils._flatten_dense_tensors(grads(m)).clone(),
    "as vector": lambda m: nn.utils.parameters_to_vector(grads(m)),
    "deepcopy": lambda m: copy.deepcopy(first(m).grad),
    "pickle": lambda m: pickle.loads(pickle.dumps(first(m).grad)),
    "deepcopy of the model": lambda m: copy.deepcopy(first(m.module)).detach(),
    "out": lambda m: torch.mul(first(m).grad, 2.0, out=torch.empty_like(first(m))).detach(),
    "strides": lambda m: [(g.stride(), g.is_contiguous(), g.storage_offset()) for g in grads(m)],
    "rank 0 logs": on_rank_0(lambda m: {n: p.grad.abs().mean() for n, p in m.named_parameters()}),
    "rank 0 logs one": on_rank_0(lambda m: first(m).grad.abs().max()),
}

# Norms are computed from the norms of shards, so they are rounded differently.
NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "total norm": lambda m: get_total_norm(grads(m)),
    "infinite order": lambda m: get_total_norm(grads(m), float("inf")),
    "of order 3, of some": lambda m: get_total_norm(grads(m)[:2], 3.0, foreach=False),
    "rank 0 logs a norm": on_rank_0(lambda m: get_total_norm(grads(m))),
    "rank 0 logs, all clip": lambda m: (
        on_rank_0(lambda m: get_total_norm(grads(m)))(m),
        clip_grad_norm_(m.parameters(), 0.1),
    ),
    "rank 1 reads, all clip": lambda m: (
        first(m).grad.sum() if dist.get_rank() == 1 else 0,
        clip_grad_norm_(m.parameters(), 0.1),
        first(m).grad.sum() if dist.get_rank() == 0 else 0,
    ),
    "clipped by a norm of the script": lambda m: clip_grads_with_norm_(
        m.parameters(), 0.1, get_total_norm(grads(m))
    ),
    "clipped one by one": lambda m: [clip_grad_norm_(p, 0.02) for p in m.parameters()],
    "clipped twice": lambda m: [
        clip_grad_norm_(m.parameters(), 0.1),
        clip_grad_norm_(m.parameters(), 0.05),
    ],
    "clipped by infinity": lambda m: clip_grad_norm_(m.parameters(), float("inf")),
}

WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "clip by value": lambda m: clip_grad_value_(m.parameters(), 0.01),
    "clip by value, no foreach": lambda m: clip_grad_value_(m.parameters(), 0.01, foreach=False),
    "adaptive clipping": adaptive_clipping,
    "scaled in place": lambda m: [g.mul_(0.5) for g in grads(m)],
    "scaled by foreach": lambda m: torch._foreach_mul_(grads(m), 0.5),
    "one element": lambda m: first(m).grad[0].zero_(),
    "by index": lambda m: first(m).grad.__setitem__(0, 1.0),
    "through a view": lambda m: first(m).grad.view(-1)[3:].mul_(2.0),
    "through data": lambda m: first(m).grad.data.add_(0.01),
    "through detach": lambda m: first(m).grad.detach().add_(0.01),
    "replaced": lambda m: setattr(first(m), "grad", first(m).grad * 3.0),
    "replaced data": lambda m: setattr(first(m).grad, "data", torch.ones_like(first(m))),
    "dropped": lambda m: setattr(first(m), "grad", None),
    "zeroed": lambda m: first(m).grad.zero_(),
    "filled": lambda m: first(m).grad.fill_(0.1),
    "copied into": lambda m: first(m).grad.copy_(torch.ones_like(first(m))),
    "nan to num": lambda m: [torch.nan_to_num_(g) for g in grads(m)],
    "as out": lambda m: torch.add(first(m).detach(), 1.0, out=first(m).grad),
    "by numpy": lambda m: first(m).grad.numpy().fill(0.25),
    "zero_grad": lambda m: m.zero_grad(set_to_none=False),
    "summed by hand": lambda m: [dist.all_reduce(g) for g in grads(m)],
    "set to another's": lambda m: setattr(first(m), "grad", next(iter(m.parameters())).grad),
}


# The third step has sharded gradients, two steps read them, and then gradients stay full.
STEPS = 6


def train(
    use: str, optimizer: str = "adamw", since: int = 3, until: int = 6, set_to_none: bool = True
) -> list[Record]:
    model = ddp(net())
    opt = OPTIMIZERS[optimizer](model.parameters())
    records = []
    for step in range(STEPS):
        opt.zero_grad(set_to_none=set_to_none)
        model(data(step, 5, 6)).square().mean().backward()
        found = (READS | WRITES | NORMS)[use](model) if since <= step < until else None
        opt.step()
        records.append({"found": found if use not in WRITES else None, "param": params(model)})
    return records


def cases(uses: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {use: {"use": use} for use in uses}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_every_reader_sees_the_full_reduced_gradient(ranks, world):
    check_all(ranks(world)(all_cases, train, on(world, cases(READS))))


@pytest.mark.parametrize("world", [2, 3])
def test_norms_are_norms_of_full_gradients(ranks, world):
    check_all(ranks(world)(all_cases, train, on(world, cases(NORMS))), bitwise=False)


@pytest.mark.parametrize("world", [2, 3])
def test_writes_into_gradients_are_kept(ranks, world):
    check_all(ranks(world)(all_cases, train, on(world, cases(WRITES))))


def test_writes_with_gradients_that_stay(ranks):
    uses = {use: {"use": use, "set_to_none": False, "optimizer": "sgd"} for use in WRITES}
    check_all(ranks(2)(all_cases, train, some(uses)))


def test_one_read_early_or_late_is_right(ranks):
    uses = {
        f"{since}": {"use": "clone", "since": since, "until": since + 1} for since in range(STEPS)
    }
    results = ranks(2)(all_cases, train, uses)
    check_all(results)


def held(how: str) -> list[Record]:
    """Keep references to gradients over steps, or place gradients in memory of the script."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    kept: list[Any] = []
    if how == "flat buffer":
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        offset = 0
        for p in model.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        kept = [flat]
    elif how == "own tensors":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        kept = [p.grad for p in model.parameters()]
    records = []
    for step in range(9):
        opt.zero_grad(set_to_none=how == "last step's")
        model(data(step, 5, 6)).square().mean().backward()
        found = None
        if how == "since the first":
            kept = kept or grads(model)
            found = [g.clone() for g in kept] if step % 4 == 3 else None
            assert all(a is b for a, b in zip(kept, grads(model), strict=True))
        elif how == "views":
            kept = kept or [g.view(-1) for g in grads(model)]
            found = [g.clone() for g in kept]
        elif how == "last step's":
            found, kept = [g.clone() for g in kept], grads(model)
        elif how in ("flat buffer", "own tensors"):
            found = [g.clone() for g in kept] if step > 4 else None
        opt.step()
        records.append({"found": found, "param": params(model)})
    return records


HELD = {
    "since the first": True,
    "own tensors": True,
    "last step's": True,
    "views": False,
    "flat buffer": False,
}


@pytest.mark.parametrize("how", HELD)
def test_references_to_gradients_stay_valid(ranks, how):
    check_all(ranks(2)(all_cases, held, {how: {"how": how}}), by_parts=HELD[how])


def moved(clip: bool) -> list[Record]:
    """Give gradients to other parameters, with another layout or in another model."""
    first = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    first[1].weight = nn.Parameter(first[1].weight.detach().t())
    layers, models = list(first), [ddp(first), ddp(nn.Linear(6, 6))]
    layers.append(models[1].module)
    opt = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    records = []
    for step in range(8):
        opt.zero_grad()
        models[1](models[0](data(step, 5, 6))).square().mean().backward()
        # Before step 4, and later again, gradients are lazy.
        if step in (4, 7):
            given = [layer.weight.grad for layer in layers]
            for layer, grad in zip(layers, [*given[1:], given[0]], strict=True):
                layer.weight.grad = grad
        if clip:
            nn.utils.clip_grad_norm_(first.parameters(), 1e6)
        opt.step()
        records.append([params(model) for model in models])
    return records


def test_a_gradient_of_another_parameter(ranks):
    check_all(
        ranks(2)(all_cases, moved, {f"clip: {clip}": {"clip": clip} for clip in (False, True)}),
        steps=8,
    )


def wrapped_again(stock: bool) -> list[Record]:
    """Let the backward of a second wrapper add to lazy gradients, by the patched reducer or the stock reducer."""
    module = net()
    model = ddp(module)
    opt = OPTIMIZERS["sgd"](model.parameters())
    records = []
    for step in range(7):
        if step == 4:
            model = ddp(module)
            if stock:
                model.register_comm_hook(None, default_hooks.allreduce_hook)
        if step < 4:
            opt.zero_grad()
        model(data(step, 5, 6)).square().mean().backward()
        opt.step()
        records.append(params(model))
    return [*records, {"grad": [p.grad.clone() for p in module.parameters()]}]


@pytest.mark.parametrize("stock", [False, True])
def test_gradients_stay_when_their_model_is_wrapped_again(ranks, stock):
    check_all(ranks(2)(all_cases, wrapped_again, {"": {"stock": stock}}), steps=4)


def shared_with_another_process() -> list[Record]:
    """Train with gradients in shared memory, where another process must find the averages."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    seen = {}
    for name, p in model.named_parameters():
        p.grad = torch.zeros_like(p).share_memory_()
        # Another process would map the memory in the same way.
        storage = torch.UntypedStorage._new_shared_fd_cpu(
            *p.grad.untyped_storage()._share_fd_cpu_()
        )
        seen[name] = torch.empty(0).set_(storage, 0, p.shape)
    records = []
    for step in range(7):
        opt.zero_grad(set_to_none=False)
        model(data(step, 5, 6)).square().mean().backward()
        records.append({"grad": {name: grad.clone() for name, grad in seen.items()}})
        opt.step()
    return [*records, params(model)]


def test_gradients_in_shared_memory(ranks):
    check_all(ranks(2)(all_cases, shared_with_another_process, {"": {}}), steps=7, by_parts=None)

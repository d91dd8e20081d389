"""What is kept for backward, and so what may be written into before it: no more, and no less, than under stock."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from ovpatch.insight.equality import Verdict, compare
from tests.plugins.tp_linear.arms import SCHEDULES, Record, both, draw, mesh, seen
from tests.plugins.tp_linear.models import WIDTH

CUT, WHOLE = Shard(0), Replicate()
GATHER = PrepareModuleInput(input_layouts=(CUT,), desired_input_layouts=(WHOLE,))
PLANS: Final[dict[str, dict[str, Any]]] = {
    "gather": {"a": ColwiseParallel(input_layouts=CUT)},
    "replicated": {"a": ColwiseParallel()},
    "scatter": {"a": RowwiseParallel(output_layouts=CUT)},
    "reduce": {"a": RowwiseParallel()},
    "shared gather": {"": GATHER, "a": ColwiseParallel(), "b": ColwiseParallel()},
}
FROZEN = ["", "a", "ab"]


class Linears(nn.Module):
    """One linear or two that read the same."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        if count > 1:
            self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x) if hasattr(self, "b") else self.a(x)


def made(plan: str, frozen: str) -> nn.Module:
    torch.manual_seed(0)
    model = parallelize_module(Linears(2 if "b" in PLANS[plan] else 1).double(), mesh(), PLANS[plan])
    for name, param in model.named_parameters():
        param.requires_grad_(name[0] not in frozen)
    return model


def given(plan: str, needs: bool) -> tuple[Tensor, Tensor]:
    """Return a leaf, and the input that is made of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    same = plan == "replicated"
    width = WIDTH // world if plan in ("scatter", "reduce") else WIDTH
    leaf = draw(2 * world, width, seed=0 if same else rank, dtype=torch.float64).requires_grad_(needs)
    return leaf, leaf * 2


def kept(plan: str, frozen: str, needs: bool) -> Record:
    """Return how many bytes a forward keeps for backward, parameters aside, and what backward makes of them."""
    model = made(plan, frozen)
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = (here.wait() if isinstance(here, AsyncCollectiveTensor) else here).untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    leaf, x = given(plan, needs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    for param in model.parameters():
        storages.pop(param.to_local().untyped_storage().data_ptr(), None)
    size = sum(storage.nbytes() for storage in storages.values())
    if y.requires_grad:
        y.square().sum().backward()
    return {"bytes": size, "results": {"y": y.detach(), "x": leaf.grad, **seen(model)}}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("plan", PLANS)
def test_no_more_is_kept_than_under_stock(ranks, plan, frozen):
    for needs in (True, False):
        for schedule in SCHEDULES:
            for result in ranks(2)(both, kept, plan, frozen, needs, options={"schedule": schedule}):
                stock, ours = result["stock"], result["patched"]
                compare(stock["results"], ours["results"], floor=1e-10).assert_equal()
                assert ours["bytes"] <= stock["bytes"], (needs, schedule)
                assert result["counters"]["calls"] > 0


def written(plan: str, frozen: str, needs: bool, into: str) -> Any:
    """Return the gradients, or that the write was noticed, where something is written into before backward."""
    model = made(plan, frozen)
    leaf, x = given(plan, needs)
    y = model(x)
    with torch.no_grad():
        if into == "input":
            x.mul_(2)
        elif into == "weight":
            model.a.weight.mul_(2)
    try:
        if y.requires_grad:
            y.square().sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "noticed"
    return {"x": leaf.grad, "grads": seen(model)["grad"]}


@pytest.mark.parametrize("into", ["input", "weight"])
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_not_kept_may_be_written_into(ranks, plan, into):
    for frozen in FROZEN:
        for needs in (True, False):
            right = ranks(2)(written, plan, frozen, needs, "nothing")
            for clean, result in zip(right, ranks(2)(both, written, plan, frozen, needs, into), strict=True):
                stock, ours = result["stock"], result["patched"]
                if stock != "noticed" and compare(clean, stock, floor=1e-10).verdict is Verdict.DIFFERENT:
                    stock = "noticed"  # it is not, where a DTensor is made of a local tensor: its gradients are wrong
                if isinstance(stock, str) or isinstance(ours, str):
                    assert stock == ours, (frozen, needs)
                else:
                    compare(stock, ours, floor=1e-10).assert_equal()

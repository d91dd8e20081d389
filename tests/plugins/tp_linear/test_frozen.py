"""Backward keeps no more tensors, and no fewer, than in stock PyTorch, so a script may write into the same tensors."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ovpatch.insight.equality import Verdict
from tests.plugins.ddp.arms import table
from tests.plugins.ddp.checks import check_all
from tests.plugins.tp_linear.arms import SCHEDULES, Record, all_both, draw, mesh, seen
from tests.plugins.tp_linear.models import WIDTH
from tests.support.equality import compare

CUT, REPLICATED = Shard(0), Replicate()
GATHER = PrepareModuleInput(input_layouts=(CUT,), desired_input_layouts=(REPLICATED,))
PLANS: Final[dict[str, dict[str, Any]]] = {
    "gather": {"a": ColwiseParallel(input_layouts=CUT)},
    "replicated": {"a": ColwiseParallel()},
    "scatter": {"a": RowwiseParallel(output_layouts=CUT)},
    "reduce": {"a": RowwiseParallel()},
    "shared gather": {"": GATHER, "a": ColwiseParallel(), "b": ColwiseParallel()},
}
FROZEN = ["", "a", "ab"]


class Linears(nn.Module):
    """A model of one linear, or of two linears that read the same input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        if count > 1:
            self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x) if hasattr(self, "b") else self.a(x)


def made(plan: str, frozen: str) -> nn.Module:
    torch.manual_seed(0)
    model = parallelize_module(
        Linears(2 if "b" in PLANS[plan] else 1).double(), mesh(), PLANS[plan]
    )
    for name, param in model.named_parameters():
        param.requires_grad_(name[0] not in frozen)
    return model


def given(plan: str, needs: bool) -> tuple[Tensor, Tensor]:
    """Return a leaf, and the input computed from it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    same = plan == "replicated"
    width = WIDTH // world if plan in ("scatter", "reduce") else WIDTH
    leaf = draw(2 * world, width, seed=0 if same else rank, dtype=torch.float64).requires_grad_(
        needs
    )
    return leaf, leaf * 2


def kept(plan: str, frozen: str, needs: bool) -> Record:
    """Return the bytes that a forward keeps for backward, without parameters, and the results of the backward."""
    model = made(plan, frozen)
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = (
            here.wait() if isinstance(here, AsyncCollectiveTensor) else here
        ).untyped_storage()
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


def check_kept(results: list[Record]) -> None:
    for result in results:
        stock, ours = result["stock"], result["patched"]
        compare(stock["results"], ours["results"], floor=1e-10).assert_equal()
        assert ours["bytes"] <= stock["bytes"]
        assert result["counters"]["calls"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_more_memory_is_kept_than_in_stock_pytorch(ranks, schedule):
    cases = table(plan=PLANS, frozen=FROZEN, needs=[True, False])
    check_all(
        ranks(2)(all_both, kept, cases, options={"schedule": schedule}, timeout=120),
        check=check_kept,
    )


def written(plan: str, frozen: str, needs: bool, into: str) -> Any:
    """Return the gradients after a write between forward and backward, or that autograd has detected the write."""
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
        return "detected"
    return {"x": leaf.grad, "grads": seen(model)["grad"]}


@pytest.mark.parametrize("plan", PLANS)
def test_tensors_that_are_not_kept_may_be_written_into(ranks, plan):
    cases = table(
        plan=[plan], frozen=FROZEN, needs=[True, False], into=["nothing", "input", "weight"]
    )
    for result in ranks(2)(all_both, written, cases, timeout=120):
        for name, case in cases.items():
            clean = result[name.replace(f"into {case['into']}", "into nothing")]["stock"]
            stock, ours = result[name]["stock"], result[name]["patched"]
            if (
                stock != "detected"
                and compare(clean, stock, floor=1e-10).verdict is Verdict.DIFFERENT
            ):
                # Torch does not detect the write if a DTensor is made of a local tensor: its gradients are wrong.
                stock = "detected"
            if isinstance(stock, str) or isinstance(ours, str):
                assert stock == ours, name
            else:
                compare(stock, ours, floor=1e-10).assert_equal()

"""Uses of linears that few scripts have, and whose errors these scripts would detect late."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.flop_counter import FlopCounterMode

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_values
from tests.plugins.ddp.arms import table
from tests.plugins.tp_linear.arms import (
    SCHEDULES,
    Record,
    both,
    check_same,
    copy_full,
    draw,
    layout,
    mesh,
)
from tests.plugins.tp_linear.models import MLP, WIDTH
from tests.plugins.tp_linear.test_contract import PLAN, made

DOUBLE = torch.float64


def rows(count: int = 3) -> Tensor:
    return draw(count, WIDTH, seed=dist.get_rank(), dtype=DOUBLE).requires_grad_()


def grads(model: nn.Module) -> dict[str, Any]:
    return {name: copy_full(param.grad) for name, param in model.named_parameters()}


def linear(style: Any, **kwargs: Any) -> nn.Linear:
    torch.manual_seed(0)
    return parallelize_module(
        nn.Linear(WIDTH, WIDTH, dtype=kwargs.pop("dtype", DOUBLE), **kwargs), mesh(), style
    )


# ---------------------------------------------------------------- inputs


def uneven() -> Record:
    """Run five rows on two ranks: the parts of a DTensor may differ in size."""
    group, x = mesh(), draw(5, WIDTH, seed=1, dtype=DOUBLE)
    up, down = (
        linear(ColwiseParallel(input_layouts=Shard(0))),
        linear(RowwiseParallel(output_layouts=Shard(0), use_local_output=False)),
    )
    between = up(down(torch.chunk(x, 2, -1)[dist.get_rank()].contiguous()))
    torch.manual_seed(0)
    gathered = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=DOUBLE))
    prepare = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    parallelize_module(gathered, group, {"": prepare, "0": ColwiseParallel()})
    prepared = gathered(torch.distributed.tensor.distribute_tensor(x, group, (Shard(0),)))
    (between.square().sum() + prepared.square().sum()).backward()
    return {
        "y": [copy_full(between), copy_full(prepared)],
        "grads": [grads(up), grads(down), grads(gathered)],
    }


def vectors() -> Record:
    """Run inputs without a sequence."""
    up, down = linear(ColwiseParallel()), linear(RowwiseParallel())
    x = draw(WIDTH, seed=1, dtype=DOUBLE).requires_grad_()
    y = down(up(x))
    y.square().sum().backward()
    return {"y": copy_full(y), "x": x.grad, "grads": [grads(up), grads(down)]}


def complex_numbers() -> Record:
    style = ColwiseParallel(input_layouts=Shard(0))
    model = linear(style, dtype=torch.complex128)
    x = torch.complex(rows().detach(), rows().detach().flip(0)).requires_grad_()
    model(x).abs().square().sum().backward()
    return {"x": x.grad, "grads": grads(model)}


def in_flight() -> Record:
    """Run a linear whose input is the output of a functional collective that may still be in flight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(48, WIDTH), nn.Linear(WIDTH, WIDTH)).to(DOUBLE)
    plan = {
        "0": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
        ),
        "1": ColwiseParallel(input_layouts=Shard(0)),
    }
    parallelize_module(model, mesh(), plan)
    y = model(torch.arange(24).view(12, 2))
    y.square().sum().backward()
    return {"y": copy_full(y), "grads": grads(model), "type": type(y).__name__}


def added_to_itself() -> Any:
    model, x = made(), rows()
    y = x * 1
    y += model(y)
    try:
        y.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return {"x": x.grad, "grads": grads(model)}


# ---------------------------------------------------------------- backward


def partly(way: str) -> Record:
    """Compute a backward for the input alone, after an earlier microbatch has left gradients."""
    model, x = made(), rows()
    model(rows()).square().sum().backward()
    loss = model(x).square().sum()
    if way == "inputs":
        loss.backward(inputs=[x])
    elif way == "grad":
        x.grad = torch.autograd.grad(loss, [x])[0]
    else:
        found = torch.autograd.grad(loss, [model.up.weight, x])
        return {"found": [copy_full(grad) for grad in found], "grads": grads(model)}
    return {"x": x.grad, "grads": grads(model)}


def backward_on_one_rank() -> Record:
    model = linear(ColwiseParallel(input_layouts=Shard(0)))
    y = model(rows().detach())
    if dist.get_rank() == 0:
        y.square().sum().backward()
    dist.barrier()
    return {"grad": None if model.weight.grad is None else model.weight.grad.to_local()}


def weights_on_one_rank(style: Any) -> Record:
    """Read the gradient of a weight on one rank, although the input needs one, too."""
    model, x = linear(style), rows(4)
    y = model(x)
    alone = None
    if dist.get_rank() == 0:
        (alone,) = torch.autograd.grad(y.square().sum(), [model.weight], retain_graph=True)
    dist.barrier()
    (y * 2).sum().backward()
    return {
        "alone": None if alone is None else alone.to_local(),
        "x": x.grad,
        "grads": grads(model),
    }


# ---------------------------------------------------------------- watchers


def counted() -> Record:
    """Count operations on one rank."""
    torch.manual_seed(0)
    model, x = made(), rows()
    prepare = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    gathered = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=DOUBLE))
    parallelize_module(gathered, mesh(), {"": prepare, "0": ColwiseParallel()})
    hook = (
        gathered[0].register_full_backward_hook(lambda *args: None)
        if dist.get_rank() == 0
        else None
    )
    (gathered(x).square().sum()).backward()
    flops = 0
    if dist.get_rank() == 0:
        with FlopCounterMode(display=False) as counter:
            model(x).square().sum().backward()
            gathered(x).square().sum().backward()
        flops = counter.get_total_flops()
    else:
        model(x).square().sum().backward()
        gathered(x).square().sum().backward()
    return {
        "x": x.grad,
        "grads": [grads(model), grads(gathered)],
        "counted": flops > 0,
        "hook": hook is not None,
    }


# ---------------------------------------------------------------- functions and hooks


def replaced_forward() -> Record:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    parallelize_module(model, mesh(), ColwiseParallel(input_layouts=Shard(0)))
    y = model(rows())
    return {"y": copy_full(y), "signature": str(inspect.signature(type(model).forward))}


def ordered() -> list[list[str]]:
    """Register hooks before and after the hooks of the style, some before apply() and some after it."""
    model, found = MLP().double(), []

    def note(name: str) -> Any:
        return lambda module, args: found.append(f"{name} {layout(args[0])[:16]}")

    model.up.register_forward_pre_hook(note("before"))
    parallelize_module(model, mesh(), PLAN)
    model.up.register_forward_pre_hook(note("first"), prepend=True)
    model.up.register_forward_pre_hook(note("after"))
    with ovpatch.applied("tp_linear"):
        model(rows())
        while_on, found[:] = list(found), []
        model.up.register_forward_pre_hook(note("later"))
    model(rows())
    return [while_on, list(found)]


def test_hooks_keep_their_order(ranks):
    for while_on, after in ranks(2)(ordered):
        assert [line.split(" torch")[0] for line in while_on] == ["first", "before", "after"]
        assert [line.split(" torch")[0] for line in after] == [
            "first",
            "before",
            "after",
            "later",
        ]


def seen_by_hooks() -> list[str]:
    model, found = MLP().double(), []
    parallelize_module(model, mesh(), PLAN)
    for prepend in (True, False):
        model.up.register_forward_pre_hook(
            lambda m, args: found.append(type(args[0]).__name__), prepend=prepend
        )
    with ovpatch.applied("tp_linear"):
        pass
    model(rows())
    return found


def test_hooks_see_the_inputs_of_torch_after_revert(ranks):
    for found in ranks(2)(seen_by_hooks):
        assert found == ["Tensor", "DTensor"]


def late() -> dict[str, Any]:
    """Apply to a model that has a hook with an empty cell, and a linear that FSDP2 has changed."""
    model, both_ways = made(), mesh(1, dist.get_world_size(), names=("dp", "tp"))
    sharded = parallelize_module(MLP().double(), both_ways["tp"], PLAN)
    handle = None

    def once(module: Any, args: Any) -> None:
        handle.remove()  # noqa: F821  # deleted below: the cell is empty

    handle = model.register_forward_pre_hook(once)
    handle.remove()
    model.register_forward_pre_hook(once)
    del handle
    fully_shard(sharded.up, mesh=both_ways["dp"])
    with ovpatch.applied("tp_linear"):
        (report,) = (
            feature for feature in ovpatch.report().features if feature.name == "tp_linear"
        )
    return {"state": report.state, "remarks": " ".join(report.remarks)}


def test_late_apply_with_foreign_hooks_and_classes(ranks):
    for result in ranks(2)(late):
        assert result["state"] == "applied"
        assert "is now a FSDPLinear: move the line ovpatch.apply()" in result["remarks"]


def kept_after_revert() -> list[int]:
    from ovpatch.overlap.tensor_parallel import tp_group

    group, cpu = dist.new_group(), torch.device("cpu")
    name = group.group_name
    with ovpatch.applied("tp_linear"):
        made()(rows()).sum().backward()
        resolved = {tp_group.resolve_tp_group(name, cpu) for _ in range(2)}
        assert resolved == {tp_group.get_tp_group(group, cpu)}
        resolved.clear()
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match=name):
            tp_group.resolve_tp_group(name, cpu)
        live = [owner for owner, _ in group_values(tp_group.TPGroup) if owner is not group]
        tp_group.get_tp_group(dist.new_group(), cpu)
        held = [owner for owner, _ in group_values(tp_group.TPGroup) if owner is group]
    gc.collect()
    return [len(live), len(held), len(group_values(tp_group.TPGroup))]


def test_destroyed_process_groups_are_released(ranks):
    for live, held, after in ranks(2)(kept_after_revert):
        assert live > 0
        assert held == after == 0


# ---------------------------------------------------------------- changed tensors and groups


class Sum(nn.Module):
    """``h += down(gelu(up(h)))`` on DTensors, as SequenceParallel returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        h += self.down(nn.functional.gelu(self.up(h)))
        return h


def added_in_place(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "sum":
        up = ColwiseParallel(input_layouts=Shard(0))
        down = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        model = parallelize_module(
            Sum().to(DOUBLE),
            mesh(),
            {"norm": SequenceParallel(sequence_dim=0), "up": up, "down": down},
        )
        y = model(rows())
    else:
        style, placement = {
            "replicated": (ColwiseParallel(), Replicate()),
            "features": (RowwiseParallel(), Shard(1)),
        }[kind]
        model = linear(style)
        x = torch.distributed.tensor.distribute_tensor(
            draw(4, WIDTH, dtype=DOUBLE), mesh(), (placement,)
        )
        h = x.requires_grad_() * 2
        y = model(h)
        with torch.no_grad():
            h.mul_(2)
    try:
        copy_full(y)
        (y.to_local() if isinstance(y, DTensor) else y).square().sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return grads(model)


@pytest.mark.parametrize("kind", ["replicated", "features"])
def test_dtensors_that_are_written_into(ranks, kind):
    for result in ranks(2)(both, added_in_place, kind):
        assert result["stock"] is result["patched"] is True


def other_biases() -> list[Any]:
    """Compute with biases whose layout differs from the layout of the style."""
    found: list[Any] = []
    for style, placement in ((ColwiseParallel(), Replicate()), (RowwiseParallel(), Shard(0))):
        model = linear(style, bias=False)
        bias = torch.distributed.tensor.distribute_tensor(
            draw(WIDTH, dtype=DOUBLE), mesh(), (placement,)
        )
        model.bias = nn.Parameter(bias)
        x = draw(4, WIDTH, dtype=DOUBLE).chunk(2 if placement.is_shard() else 1, -1)
        found.append(copy_full(model(x[dist.get_rank() % len(x)].contiguous())))
    return found


def groups_made_again() -> list[bool]:
    """Destroy the process groups and make them again; the model stays."""
    found = []
    with ovpatch.applied("tp_linear"):
        model, x = linear(ColwiseParallel(input_layouts=Shard(0))), rows()
        first = model(x).detach()
        store = dist.distributed_c10d._get_default_store()
        world, rank = dist.get_world_size(), dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("again", store), world_size=world, rank=rank
        )
        found.append(torch.equal(model(x), first))
        calls = [
            call
            for plan in model._ovpatch_parallel._plans_by_dims.values()
            for call in plan.calls.values()
        ]
        found += [call.ranks.group is dist.group.WORLD for call in calls]
    return found


def test_groups_that_are_made_again(ranks):
    for found in ranks(2)(groups_made_again):
        assert found == [True, True]


# ---------------------------------------------------------------- all of these compared with stock PyTorch

SAME = {
    uneven: {},
    vectors: {"calls": 2},
    complex_numbers: {"calls": 0},
    in_flight: {"calls": 1},
    added_to_itself: {},
    replaced_forward: {"linears": 0},
    other_biases: {"stock_calls": 2},
}


def test_results_are_the_results_of_torch(ranks):
    check_same(ranks(2), SAME)


@pytest.mark.parametrize("on", [False, True])
def test_options_do_not_change_results(ranks, on):
    ways = table(way=["inputs", "grad", "grad of a weight"])
    check_same(ranks(2), {partly: (ways, {})}, options={"gradient_accumulation_fusion": on})
    check_same(ranks(2), {counted: {"calls": 4}}, options={"shared_gather": on})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backwards_on_one_rank_alone_and_dtensors_that_are_added_to(ranks, schedule):
    styles = {
        "gathered": {"style": ColwiseParallel(input_layouts=Shard(0))},
        "replicated": {"style": ColwiseParallel()},
    }
    cases = {
        backward_on_one_rank: {},
        weights_on_one_rank: (styles, {}),
        added_in_place: (table(kind=["sum"]), {}),
    }
    check_same(ranks(2), cases, options={"schedule": schedule})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensors_that_are_gathered_again_must_not_change(ranks, schedule):
    for result in ranks(2)(both, errors, options={"schedule": schedule, "regather": True}):
        error, changed = result["patched"]
        assert "modified by an inplace operation" in error
        assert changed is True


def errors() -> list[Any]:
    return [added_to_itself(), added_in_place("sum")]

"""Models in ``parallelize_module`` train in stock PyTorch, patched, and in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.plugins.ddp.arms import seeded
from tests.plugins.ddp.checks import check_all
from tests.plugins.tp_linear.arms import SCHEDULES, Record, all_both, copy_full, device, draw, mesh
from tests.plugins.tp_linear.models import MLP, WIDTH
from tests.plugins.tp_linear.training import equal, trained

LENGTH = 24  # divides by 2, 3 and 4


def mlp(
    layouts: tuple[Any, Any],
    shape: tuple[int, ...],
    *,
    bias: bool = True,
    steps: int = 2,
    tp: bool = True,
    gathered: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[Record]:
    """Train an MLP with the given layouts of its input and output; the loss is the sum over the ranks."""
    given, handed_out = layouts
    model = MLP(bias=bias).to(device(), dtype)
    group = mesh()
    rank, world = group.get_local_rank(), group.size()
    if tp:
        plan = {
            "up": ColwiseParallel(input_layouts=given),
            "down": RowwiseParallel(output_layouts=handed_out),
        }
        parallelize_module(model, group, plan)

    def part(tensor: Tensor, layout: Any) -> Tensor:
        return (
            tensor.chunk(world, layout.dim)[rank].contiguous()
            if isinstance(layout, Shard) and tp
            else tensor
        )

    def run(step: int) -> tuple[Tensor, dict[str, Any]]:
        x, target = (
            draw(*shape, WIDTH, seed=step, dtype=dtype),
            draw(*shape, WIDTH, seed=100 + step, dtype=dtype),
        )
        mine = part(x, given).requires_grad_()
        y = model(mine)
        assert y.is_contiguous()
        loss = (y - part(target, handed_out)).square().sum()
        # Return the values of this rank.
        if not tp:
            return loss, {
                "x": lambda: part_of(mine.grad, given),
                "y": lambda: part_of(y, handed_out),
            }
        return loss, {"x": lambda: copy_full(mine.grad), "y": lambda: y.detach() * 1.0}

    def part_of(tensor: Tensor, layout: Any) -> Tensor:
        tensor = tensor.detach()
        return (
            tensor.chunk(world, layout.dim)[rank] if isinstance(layout, Shard) else tensor.clone()
        )

    return trained(model, run, steps, gathered=gathered)


LAYOUTS = {
    "first": ((Shard(0), Shard(0)), (LENGTH,)),
    "first of three": ((Shard(0), Shard(0)), (LENGTH, 2)),
    "second, one sample": ((Shard(1), Shard(1)), (1, LENGTH)),
    "second": ((Shard(1), Shard(1)), (2, LENGTH)),
    "from the end": ((Shard(-2), Shard(-2)), (2, LENGTH)),
    "replicated": ((Replicate(), Replicate()), (2, LENGTH)),
    "gathered, all-reduced": ((Shard(1), Replicate()), (2, LENGTH)),
    "replicated, scattered": ((Replicate(), Shard(0)), (LENGTH, 3)),
}


def check(results: list[Record]) -> None:
    for result in results:
        equal(result["stock"], result["patched"])
        counted = result["counters"]
        assert (counted["linears"], counted["calls"], counted["stock_calls"]) == (2, 4, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("world", "names"), [(2, tuple(LAYOUTS)), (4, ("second", "replicated, scattered"))]
)
def test_an_mlp(ranks, world, schedule, names):
    cases = {
        name: {"layouts": LAYOUTS[name][0], "shape": LAYOUTS[name][1], "bias": name != "second"}
        for name in names
    }
    check_all(ranks(world)(all_both, mlp, cases, options={"schedule": schedule}), check=check)


def alone_and_cut() -> dict[str, list[list[Record]]]:
    return {
        name: [seeded(mlp, *case, tp=tp, gathered=True) for tp in (False, True)]
        for name, case in LAYOUTS.items()
    }


def test_stock_pytorch_computes_the_values_of_one_process(ranks):
    """The tests above compare with stock PyTorch. This test shows that its values are the values of the model."""
    for found in ranks(2)(alone_and_cut):
        for single, cut in found.values():
            equal(single, cut, ("x", "y", "grad", "param"), 1e-10)

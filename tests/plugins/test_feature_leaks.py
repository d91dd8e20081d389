"""Objects that scripts of pipelines, tensor parallelism and recomputation make repeatedly are freed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ovpatch
from tests.plugins.dist_optimizer.test_leaks import NOISE, compare, measure
from tests.plugins.pipeline import cases
from tests.plugins.tp_linear.arms import mesh
from tests.plugins.tp_linear.models import MLP, WIDTH

Loop = Callable[[], None]

# The number of runs of each loop, and the number of runs after which it must no longer grow. The report keeps eight
# schedules, so the second number is larger than that.
TIMES, SETTLED = 20, 10


def train_pipelines(case: cases.Case) -> Callable[[], Loop]:
    """Make stages, a schedule and an optimizer, and train a step."""

    def run() -> None:
        cases.train(case)

    return lambda: run


def parallel_models() -> Loop:
    """Parallelize a new model by ``parallelize_module``, and train a step."""
    devices = mesh()

    def run() -> None:
        model = parallelize_module(
            MLP(), devices, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        opt = torch.optim.AdamW(model.parameters())
        model(torch.ones(6, WIDTH)).square().mean().backward()
        opt.step()

    return run


class Block(nn.Module):
    """A block with two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Blocks(nn.Module):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def recomputed_models() -> Loop:
    """Copy a model, make optimizers for it, train, and fail in a backward."""
    models = [Blocks()]

    def run() -> None:
        models[0] = copy.deepcopy(models[0])
        opts = [torch.optim.SGD([param], 0.1) for param in models[0].parameters()]
        models[0](torch.ones(2, 8)).sum().backward()
        for opt in opts:
            opt.step()
        output = models[0](torch.ones(2, 8))
        output.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()

    return run


LOOPS: dict[str, tuple[str, Callable[[], Loop]]] = {
    "schedules": ("pipeline", train_pipelines(cases.Case(microbatches=3, steps=1))),
    "orders": (
        "pipeline",
        train_pipelines(
            cases.Case(schedule="ScheduleInterleaved1F1B", chunks=2, microbatches=4, steps=1)
        ),
    ),
    "models": ("tp_linear", parallel_models),
    "optimizers": ("recompute", recomputed_models),
}


def grown(loop: str, is_patched: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the growth of a loop once it has settled, in bytes and in objects by class, and the feature's counters."""
    feature, make = LOOPS[loop]
    with ovpatch.applied(*[feature] if is_patched else ["ddp"]):
        run, found = make(), []
        for number in range(TIMES):
            run()
            dist.barrier()
            if number + 1 in (SETTLED, TIMES):
                found.append(measure(*found))
        counters = dict(ovpatch.report()[feature].counters) if is_patched else {}
    return *compare(*found), counters


@pytest.mark.parametrize("loop", LOOPS)
def test_objects_that_features_make_repeatedly_are_freed(ranks, loop):
    stock = ranks(2)(grown, loop, False, timeout=120)
    for rank, (size, objects, counters) in enumerate(ranks(2)(grown, loop, True, timeout=120)):
        assert any(counters.values()), counters
        assert not objects, f"rank {rank}: {objects}"
        assert size <= stock[rank][0] + NOISE, f"rank {rank}: {size} bytes"

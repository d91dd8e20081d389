"""Objects that scripts of pipelines, tensor parallelism and recomputation make repeatedly are freed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ovpatch
from ovpatch_plugins.pipeline import cut
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.dist_optimizer.test_leaks import NOISE, compare, measure
from tests.plugins.pipe_experts import models as experts
from tests.plugins.pipeline import cases
from tests.plugins.pipeline.models import ROWS, Block, Part
from tests.plugins.pipeline.models import WIDTH as PIPELINE_WIDTH
from tests.plugins.pipeline.plain_models import CONTEXT, Decoder, language_loss
from tests.plugins.pipeline.test_failures import Armed, Bomb
from tests.plugins.tp_linear.arms import mesh
from tests.plugins.tp_linear.models import MLP, WIDTH

Loop = Callable[[], None]

# The number of runs of each loop, and the number of runs after which it must no longer grow. The report keeps eight
# schedules, so the second number is larger than that.
TIMES, SETTLED = 20, 10


def train_pipelines(case: cases.Case) -> Callable[[bool], Loop]:
    """Make stages, a schedule and an optimizer, and train a step."""

    def run() -> None:
        cases.train(case)

    return lambda _is_patched: run


def failed_pipelines(is_patched: bool) -> Loop:
    """Make a pipeline whose second step fails on a rank, which stock PyTorch does not survive."""
    case = cases.Case(part=lambda _index: Part(Bomb("B"), Block()), microbatches=3, steps=1)

    def run() -> None:
        _, text = Armed(case, victim=1 if is_patched else None, left=1).run()
        assert is_patched == ("out of memory" in text), text

    return run


def evaluated_pipelines(_is_patched: bool) -> Loop:
    """Make a pipeline, and evaluate it before and after a step."""
    case = cases.Case(microbatches=3, steps=1)

    def run() -> None:
        schedule, parts = cases.make_schedule(case)
        params = cases.list_params(parts)
        optimizer = torch.optim.SGD([param for _, param in params], 0.1)
        (stage,) = list_stages(schedule)
        rows = torch.ones(case.microbatches * ROWS, 2, PIPELINE_WIDTH)
        for number in range(2):
            schedule.eval(*((rows,) if stage.is_first else ()), target=rows, losses=[])
            cases.run_steps(case, schedule, params, optimizer, number)

    return run


def pipelines_of_new_groups(_is_patched: bool) -> Loop:
    """Train a pipeline in a process group that is destroyed afterwards."""
    case = cases.Case(microbatches=3, steps=1)

    def run() -> None:
        group = dist.new_group()
        cases.train(case, group)
        gc.collect()
        dist.destroy_process_group(group)

    return run


def cut_models(_is_patched: bool) -> Loop:
    """Cut a new model into stages, and train a step."""
    ids = torch.zeros(6, CONTEXT, dtype=torch.long)

    def run() -> None:
        made = cut(Decoder(), dist.group.WORLD, (ids[:2],), n_microbatches=3, loss_fn=language_loss)
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        made.step(ids, target=ids)
        optimizer.step()

    return run


def train_experts(_is_patched: bool) -> Loop:
    """Make a layer of experts and train two steps."""

    def run() -> None:
        experts.train(experts.Case(steps=2))

    return run


def parallel_models(_is_patched: bool) -> Loop:
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


class Residual(nn.Module):
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
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def recomputed_models_after_apply(is_patched: bool) -> Loop:
    """Revert and apply before each run of :func:`recomputed_models`."""
    train = recomputed_models(is_patched)

    def run() -> None:
        if is_patched:
            ovpatch.revert()
            ovpatch.apply("recompute")
        train()

    return run


def recomputed_models(_is_patched: bool) -> Loop:
    """Copy a model, make optimizers for it, train, evaluate, and fail in a backward."""
    models = [Blocks()]

    def run() -> None:
        models[0] = copy.deepcopy(models[0])
        opts = [torch.optim.SGD([param], 0.1) for param in models[0].parameters()]
        models[0](torch.ones(2, 8)).sum().backward()
        for opt in opts:
            opt.step()
        with torch.no_grad():
            models[0].eval()(torch.ones(2, 8))
        output = models[0].train()(torch.ones(2, 8))
        output.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()

    return run


LOOPS: dict[str, tuple[str, Callable[[bool], Loop]]] = {
    "schedules": ("pipeline", train_pipelines(cases.Case(microbatches=3, steps=1))),
    "orders": (
        "pipeline",
        train_pipelines(
            cases.Case(schedule="ScheduleInterleaved1F1B", chunks=2, microbatches=4, steps=1)
        ),
    ),
    "failures": ("pipeline", failed_pipelines),
    "evaluations": ("pipeline", evaluated_pipelines),
    "groups": ("pipeline", pipelines_of_new_groups),
    "cut models": ("pipeline", cut_models),
    "experts": ("pipe_experts", train_experts),
    "models": ("tp_linear", parallel_models),
    "optimizers": ("recompute", recomputed_models),
    "apply again": ("recompute", recomputed_models_after_apply),
}


def grown(loop: str, is_patched: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the growth of a loop once it has settled, in bytes and in objects by class, and the feature's counters."""
    feature, make = LOOPS[loop]
    with ovpatch.applied(*[feature] if is_patched else ["ddp"]):
        run, found = make(is_patched), []
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

"""``torch.compile`` around models with patched linears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter
from tests.plugins.tp_linear.arms import (
    SCHEDULES,
    Record,
    both,
    check_same,
    copy_full,
    device,
    draw,
    mesh,
)
from tests.plugins.tp_linear.fused_graphs import compile_by
from tests.plugins.tp_linear.models import MLP, WIDTH, Llama, parallel_llama
from tests.plugins.tp_linear.test_models import LAYOUTS
from tests.plugins.tp_linear.training import equal, trained
from tests.support.rarely import ALL_CASES, RARELY

FUSED = {"compiled": True}


def compiled_mlp(
    layouts: Any, shape: tuple[int, ...], bias: bool, backend: str, autocast: bool = False
) -> Record:
    torch._dynamo.reset()
    given, handed_out = layouts
    dtype = torch.float32 if autocast else torch.float64
    model = MLP(bias=bias).to(device(), dtype)
    plan = {
        "up": ColwiseParallel(input_layouts=given),
        "down": RowwiseParallel(output_layouts=handed_out),
    }
    parallelize_module(model, mesh(), plan)
    world, rank = dist.get_world_size(), dist.get_rank()
    if bias:
        # The copies of the ranks differ, as they do after training with labels that differ between ranks.
        with torch.no_grad():
            model.down.bias.to_local().add_(rank)
    compiled = compile_by(backend, model)

    def run(step: int) -> tuple[Tensor, dict[str, Any]]:
        x = draw(*shape, WIDTH, seed=step, dtype=dtype)
        x = (
            x.chunk(world, given.dim)[rank].contiguous() if hasattr(given, "dim") else x
        ).requires_grad_()
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            y = compiled(x)
        return y.float().square().mean() if autocast else y.square().sum(), {
            "x": lambda: copy_full(x.grad)
        }

    return trained(model, run, 2)


SIMILAR_LAYOUTS = ("first of three", "second, one sample", "from the end")
# The operators of one step, forward and backward. All-reduces are not fused.
OPERATORS_BY_LAYOUT = {"replicated": 0, "gathered, all-reduced": 2, "replicated, scattered": 2}


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(name, marks=RARELY) if name in SIMILAR_LAYOUTS else name for name in LAYOUTS],
)
def test_an_mlp(ranks, layouts):
    schedule = SCHEDULES[list(LAYOUTS).index(layouts) % len(SCHEDULES)]
    bias = layouts != "second"
    for result in ranks(2)(
        both,
        compiled_mlp,
        *LAYOUTS[layouts],
        bias,
        "graphs",
        options={**FUSED, "schedule": schedule},
    ):
        equal(result["stock"], result["patched"])
        counted = result["counters"]
        assert counted["compiled_calls"] == 2 * OPERATORS_BY_LAYOUT.get(layouts, 4)
        assert counted["calls"] == counted["compiled_calls"]
        assert counted["stock_calls"] == 0


def test_inductor(ranks):
    cases = {"layouts": LAYOUTS["second"][0], "shape": LAYOUTS["second"][1], "bias": True}
    expected = {
        compiled_mlp: ({"": {**cases, "backend": "inductor"}}, {"compiled_calls": 2 * 4}),
        compiled_blocks: (
            {"": {"backend": "inductor", "attends": False}},
            {"compiled_calls": 2 * 4},
        ),
    }
    check_same(ranks(2), expected, options=FUSED)


def compiled_llama() -> list[Record]:
    torch._dynamo.reset()
    model = parallel_llama(Llama(layers=1).to(device(), torch.float64), mesh())
    compiled = compile_by("graphs", model)

    def run(step: int) -> tuple[Tensor, dict[str, Any]]:
        given = torch.randint(48, (2, 12), generator=torch.Generator().manual_seed(step)).to(
            device()
        )
        return torch.nn.functional.cross_entropy(compiled(given).flatten(0, 1), given.flatten()), {}

    return trained(model, run, 2)


def compiled_blocks(
    backend: str = "graphs", attends: bool = True, autocast: bool = False
) -> list[Record]:
    """Train blocks without a head: in torch 2.13, an eager head after compiled blocks raises in its backward."""
    torch._dynamo.reset()
    dtype = torch.float32 if autocast else torch.float64
    model = parallel_llama(Llama().to(device(), dtype), mesh()).layers
    # Inductor of torch 2.11 does not compile attention of float64 on CPUs. The hooks of a compiled module itself would
    # run outside of its graph.
    parts = model if attends else [torch.nn.Sequential(model[0].mlp)]
    blocks = [compile_by(backend, part) for part in parts]

    def run(step: int) -> tuple[Tensor, dict[str, Any]]:
        # Each rank has other rows.
        seed = 2 * step + dist.get_rank()
        x = y = draw(2, 6, WIDTH, seed=seed, dtype=dtype).requires_grad_()
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            for block in blocks:
                y = block(y)
        return y.square().sum(), {"x": lambda: x.grad}

    return trained(model, run, 2)


@RARELY
def test_shared_gathers_in_a_model_and_in_blocks_compiled_one_by_one(ranks):
    cases = {
        # A block has four operators, forward and backward; the head has one.
        compiled_llama: {"compiled_calls": 2 * 2 * (4 + 1)},
        compiled_blocks: {"compiled_calls": 2 * 2 * 2 * 4, "stock_calls": 0},
    }
    check_same(ranks(2), cases, options=FUSED)


def test_autocast_in_a_compiled_graph(ranks):
    layouts, shape = LAYOUTS["first"]
    mlp = {"layouts": layouts, "shape": shape, "bias": True, "backend": "graphs", "autocast": True}
    # The gradient of a gathered input is cast before its reduce-scatter, which stays in the graph.
    cases = {
        compiled_mlp: ({"": mlp}, {"compiled_calls": 2 * 3}),
        compiled_blocks: ({"": {"autocast": True}}, {"compiled_calls": 2 * 2 * 2 * 3}),
    }
    check_same(ranks(2), cases, options=FUSED)


def test_the_compiler_sees_stock_linears_by_default(ranks):
    mlps = {"first": dict(zip(("layouts", "shape"), LAYOUTS["first"], strict=True))}
    mlps = {name: {**case, "bias": True, "backend": "graphs"} for name, case in mlps.items()}
    counted = {"linears": 2, "compiled_calls": 0, "calls": 0}
    blocks = {compiled_blocks: {"compiled_calls": 0}} if ALL_CASES else {}
    check_same(ranks(2), {compiled_mlp: (mlps, counted), **blocks})


def lengths() -> list[float]:
    """Train a head that returns a DTensor from the graph, for two lengths."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    parallelize_module(
        head, mesh(), ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    )
    compiled = compile_by("graphs", head)
    found = []
    for length in (4, 6):
        x = draw(2, length, WIDTH, seed=dist.get_rank(), dtype=torch.float64).requires_grad_()
        compiled(x).to_local().square().sum().backward()
        found.append(copy_full(head.weight.grad))
    return found


def test_another_length(ranks):
    for result in ranks(2)(both, lengths, options=FUSED):
        equal([{"": result["stock"]}], [{"": result["patched"]}])
        # torch compiles the second length with symbolic sizes, which the pass leaves alone.
        assert result["counters"]["compiled_calls"] == 2


def compiled_functions() -> list[list[Tensor]]:
    torch._dynamo.reset()
    up, down = draw(6, 4, seed=1).requires_grad_(), draw(4, 6, seed=2).requires_grad_()

    def mlp(x: Tensor) -> Tensor:
        (h,) = all_gather_linear(x, [up], dist.group.WORLD)
        return linear_reduce_scatter(torch.relu(h), down, dist.group.WORLD)

    found = []
    for run in (torch.compile(mlp, backend="eager"), mlp):
        x = draw(2, 4, seed=3).requires_grad_()
        out = run(x)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, up, down])])
    return found


@pytest.mark.skipif(
    (2, 12) <= torch.__version__ < (2, 13),
    reason="stock torch 2.12 cannot break a graph if a group is an argument",
)
def test_the_functions_run_outside_of_a_compiled_graph(ranks):
    for compiled, eager in ranks(2)(compiled_functions):
        assert all(first.equal(second) for first, second in zip(compiled, eager, strict=True))

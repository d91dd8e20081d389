"""The pass over graphs: what it fuses, what it leaves alone, and its place among Inductor's passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.fx import Graph

import ovpatch
from ovpatch.overlap.tensor_parallel import graph_pass, tp_group
from ovpatch.overlap.tensor_parallel.graph_pass import FusionPass, InstalledPass
from ovpatch.overlap.tensor_parallel.operators import (
    GATHER_LINEARS,
    INPUT_GRADS_SCATTER,
    LINEAR_SCATTER,
)
from tests.plugins.ddp.checks import check_all
from tests.plugins.tp_linear.arms import SCHEDULES, apply, draw, mesh
from tests.plugins.tp_linear.fused_graphs import make_backend
from tests.support.equality import compare
from tests.support.rarely import ALL_CASES, RARELY

K, N = 8, 6

Pattern = Callable[..., Tensor]


def gather(x: Tensor, dim: int) -> Tensor:
    full = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    # In torch 2.11, Dynamo does not trace the function by which all_gather_tensor moves the ranks.
    return torch.cat(full.chunk(dist.get_world_size(), 0), dim) if dim else full


def scatter(y: Tensor, dim: int, reduction: str = "sum") -> Tensor:
    return functional.reduce_scatter_tensor(y, reduction, dim, dist.group.WORLD)


# - Patterns: functions of an activation [2, 4, K] or rows [8, K], weights [N, K] and a bias [N]


def shared_gather(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    full = gather(x, dim)
    q, k, v = (nn.functional.linear(full, weight) for weight in weights)
    return q * k + v


def biased_gather(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return nn.functional.linear(gather(x, dim), weights[0], bias)


def gather_with_more_readers(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    full = gather(x, dim)
    return nn.functional.linear(full.sin(), weights[0]) + nn.functional.linear(full, weights[1])


def gather_that_is_returned(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Any:
    full = gather(x, dim)
    return nn.functional.linear(full, weights[0]), full


def scatter_of_a_sum(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    q, k, v = (
        nn.functional.linear(x * scale, weight) for scale, weight in enumerate(weights, start=1)
    )
    return scatter(q + k + v, dim)


def scatter_of_a_biased_linear(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return scatter(nn.functional.linear(x, weights[0], bias), dim)


def gather_then_scatter(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    hidden = nn.functional.linear(gather(x, dim), weights[0], bias).relu()
    return scatter(nn.functional.linear(hidden, weights[1].t()), dim)


def gather_of_a_cast(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Any:
    # The schedules split GEMMs, so only sums of small integers have the same bits in fp32.
    rounded = [(4 * weight).round() for weight in weights[:2]]
    full = gather((4 * x).round(), dim).float()
    q, k = (nn.functional.linear(full, weight.float()) for weight in rounded)
    return q, k, full


# The number of operators in the graph of each function.
FUSED: dict[Pattern, int] = {
    shared_gather: 1,
    biased_gather: 1,
    gather_with_more_readers: 1,
    gather_that_is_returned: 1,
    scatter_of_a_sum: 1,
    scatter_of_a_biased_linear: 1,
    gather_then_scatter: 2,
    gather_of_a_cast: 1,
}


def averaged(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return scatter(nn.functional.linear(x, weights[0]), dim, "avg")


def cast_of_rows_that_are_read(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Any:
    full = gather(x, dim)
    return nn.functional.linear(full.float(), weights[0].float()), full


def casts_to_two_dtypes(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Any:
    full = gather(x, dim)
    return nn.functional.linear(full.float(), weights[0].float()), full.bfloat16()


def casts_of_which_one_is_returned(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Any:
    full = gather(x, dim)
    # The caller may write into the second result, which must not change what the GEMM has saved.
    return nn.functional.linear(full.float(), weights[0].float()), full.view(1, *full.shape).float()


def cast_to_a_wider_dtype(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return nn.functional.linear(gather(x.float(), dim).double(), weights[0])


def cast_without_a_gemm(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return gather(x, dim).float().sin()


def scatter_of_casts(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    q, k = (nn.functional.linear(x.float(), weight.float()) for weight in weights[:2])
    return scatter(q.double() + k.double(), dim)


def integers(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return nn.functional.linear(gather((8 * x).long(), dim), (8 * weights[0]).long())


def biased_terms(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    terms = [nn.functional.linear(x, weight, bias) for weight in weights]
    return scatter(terms[0] + terms[1], dim)


def term_that_is_read_twice(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    y = nn.functional.linear(x, weights[0])
    return scatter(y, dim).sum() + y


def scatter_of_an_activation(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    return scatter(nn.functional.linear(x, weights[0]).relu(), dim)


def weight_of_gathered_rows(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    full = gather(x, dim)
    return nn.functional.linear(full, weights[0] * full.mean())


def ranks_in_another_order(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    parts = gather(x, 0).chunk(dist.get_world_size(), 0)
    return nn.functional.linear(torch.cat(parts[::-1], 1), weights[0])


def half_of_the_ranks(x: Tensor, weights: list[Tensor], bias: Tensor, dim: int) -> Tensor:
    parts = gather(x, 0).chunk(2 * dist.get_world_size(), 0)
    return nn.functional.linear(torch.cat(parts, 1), weights[0])


UNCHANGED: tuple[Pattern, ...] = (
    averaged,
    cast_of_rows_that_are_read,
    casts_to_two_dtypes,
    casts_of_which_one_is_returned,
    cast_to_a_wider_dtype,
    cast_without_a_gemm,
    scatter_of_casts,
    integers,
    biased_terms,
    term_that_is_read_twice,
    scatter_of_an_activation,
    weight_of_gathered_rows,
    ranks_in_another_order,
    half_of_the_ranks,
)


def make_operands(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return operands, all of them different on each rank."""
    rank = dist.get_rank()
    x = draw(*shape, K, seed=rank, dtype=torch.float64)
    weights = [draw(N, K, seed=10 * seed + rank, dtype=torch.float64) for seed in (1, 2, 3)]
    return x, weights, draw(N, seed=50 + rank, dtype=torch.float64)


def run_pattern(
    pattern: Pattern,
    dim: int,
    shape: tuple[int, ...],
    schedule: str = "stock",
    dynamic: bool = False,
    agreed: bool = True,
) -> dict[str, Any]:
    """Return the results of stock PyTorch and of a graph with the pass, and the codes before and after the pass."""
    torch._dynamo.reset()
    tp_group.drop_tp_groups()
    if agreed:
        tp_group.record_agreement(dist.group.WORLD)
    codes: list[str] = []
    backend = make_backend(FusionPass(schedule), codes)
    compiled = torch.compile(pattern, backend=backend, fullgraph=True, dynamic=dynamic)
    x, weights, bias = make_operands(shape)
    with torch.no_grad():
        # torch.compile replaces the collectives of functional by others, so both runs are compiled.
        reference = torch.compile(pattern, backend="aot_eager", fullgraph=True)
        results = [run(x, weights, bias, dim) for run in (reference, compiled)]
    tp_group.drop_tp_groups()
    return {"stock": results[0], "patched": results[1], "codes": codes}


def run_patterns(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: run_pattern(**case) for name, case in cases.items()}


def count_operators(code: str) -> int:
    return sum(
        code.count(f"ovpatch.{operator.name().removeprefix('ovpatch::').removesuffix('.default')}.")
        for operator in (GATHER_LINEARS, LINEAR_SCATTER, INPUT_GRADS_SCATTER)
    )


def check_patterns(results: list[dict[str, dict[str, Any]]], expected: dict[str, int]) -> None:
    def check(results: list[dict[str, Any]]) -> None:
        for result in results:
            compare(result["stock"], result["patched"], floor=1e-10).assert_equal()

    check_all(results, check=check)
    for result in results:
        for name, count in expected.items():
            before, after = result[name]["codes"]
            assert count_operators(after) == count, f"{name}:\n{after}"
            if count:
                assert "_c10d_functional" in before
                assert "_c10d_functional" not in after, f"{name}:\n{after}"
            else:
                assert after == before, name


SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "rows": (0, (8,)),
    "first": (0, (4, 2)),
    "second": (1, (2, 4)),
    "second, one sample": (1, (1, 4)),
    "third": (2, (2, 3, 4)),
}


def choose_shapes(schedule: str, number: int) -> list[str]:
    """Return the shapes for the pattern of a number: by default two each, so that each shape has several patterns."""
    if schedule != SCHEDULES[0]:
        return ["second"]
    names = list(SHAPES)
    return names if ALL_CASES else [names[(number + more) % len(names)] for more in (0, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_patterns_of_all_layouts_are_fused(ranks, schedule):
    cases, expected = {}, {}
    for number, (pattern, count) in enumerate(FUSED.items()):
        for name in choose_shapes(schedule, number):
            dim, shape = SHAPES[name]
            case = f"{pattern.__name__}, {name}"
            cases[case] = {"pattern": pattern, "dim": dim, "shape": shape, "schedule": schedule}
            expected[case] = count
    check_patterns(ranks(2)(run_patterns, cases, timeout=300), expected)


@RARELY
def test_patterns_of_three_ranks_are_fused(ranks):
    cases = {pattern.__name__: {"pattern": pattern, "dim": 1, "shape": (2, 6)} for pattern in FUSED}
    expected = {pattern.__name__: count for pattern, count in FUSED.items()}
    check_patterns(ranks(3)(run_patterns, cases, timeout=300), expected)


def test_other_patterns_stay_as_they_are(ranks):
    second: dict[str, Any] = {"dim": 1, "shape": (2, 4)}
    # These let casts and groups be confused; the rest differs less from what is fused.
    often = (cast_of_rows_that_are_read, casts_of_which_one_is_returned, ranks_in_another_order)
    patterns = UNCHANGED if ALL_CASES else dict.fromkeys((*often, *UNCHANGED[::3]))
    cases = {pattern.__name__: {"pattern": pattern, **second} for pattern in patterns}
    cases["a group that has not agreed"] = {
        "pattern": gather_then_scatter, **second, "agreed": False,
    }  # fmt: skip
    cases["symbolic shapes"] = {"pattern": gather_then_scatter, **second, "dynamic": True}
    check_patterns(ranks(2)(run_patterns, cases, timeout=300), dict.fromkeys(cases, 0))


# - Inductor's list of passes


class ScriptPass(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        pass

    def uuid(self) -> Any:
        return "script"


def use_the_feature(compiled: bool, script_pass: Any) -> list[Any]:
    """Return Inductor's passes before the feature, while it is on and while it has a parallel linear, and after it."""
    config.post_grad_custom_pre_pass = script_pass
    found = [config.post_grad_custom_pre_pass]
    with apply({"compiled": compiled, "schedule": "ring"}):
        found.append(config.post_grad_custom_pre_pass)
        parallelize_module(nn.Linear(4, 4), mesh(), ColwiseParallel())
        found.append(config.post_grad_custom_pre_pass)
        names = [status.target for status in ovpatch.report().patches] if compiled else []
    found.append(config.post_grad_custom_pre_pass)
    config.post_grad_custom_pre_pass = None
    return [*map(describe_passes, found), any("post_grad" in name for name in names)]


def describe_passes(passes: Any) -> list[str]:
    passes = passes if isinstance(passes, tuple) else (passes,)
    parts = [vars(p).values() if type(p).__name__ == "_PassSequence" else (p,) for p in passes]
    return [type(part).__name__ for group in parts for part in group if part is not None]


def test_the_pass_is_installed_with_the_first_parallel_linear_and_removed(ranks):
    for found in ranks(2)(use_the_feature, True, None):
        assert found == [[], [], ["FusionPass"], [], True]


def test_the_pass_of_the_script_runs_first_and_stays(ranks):
    for found in ranks(2)(use_the_feature, True, ScriptPass()):
        script = ["ScriptPass"]
        assert found == [script, script, [*script, "FusionPass"], script, True]


def test_no_pass_is_installed_without_the_option(ranks):
    for found in ranks(2)(use_the_feature, False, None):
        assert found == [[], [], [], [], False]


def test_passes_that_the_script_sets_later_stay():
    installed = InstalledPass("bulk")
    later = ScriptPass()
    config.post_grad_custom_pre_pass = later
    installed.remove()
    assert config.post_grad_custom_pre_pass is later
    config.post_grad_custom_pre_pass = None


def test_one_pass_that_runs_two_for_older_versions_of_torch(monkeypatch):
    monkeypatch.delattr(graph_pass.custom_graph_pass, "get_custom_graph_passes", raising=False)
    config.post_grad_custom_pre_pass = script = ScriptPass()
    installed = InstalledPass("bulk")
    both = config.post_grad_custom_pre_pass
    assert both.uuid() == ("script", FusionPass("bulk").uuid())
    both(Graph())
    installed.remove()
    assert config.post_grad_custom_pre_pass is script
    config.post_grad_custom_pre_pass = None
    # A function has no key, so torch must not cache the graphs.
    assert graph_pass._PassSequence(len, FusionPass("bulk")).uuid() is None


def list_keys() -> list[Any]:
    """Return the keys of the cache for two schedules, and after an agreement."""
    tp_group.drop_tp_groups()
    found = [FusionPass(name).uuid() for name in ("bulk", "bulk", "ring")]
    tp_group.record_agreement(dist.group.WORLD)
    found.append(FusionPass("bulk").uuid())
    tp_group.drop_tp_groups()
    return [*found, FusionPass("bulk").uuid()]


def test_the_cache_of_graphs_knows_the_schedule_and_the_groups(ranks):
    for bulk, again, ring, agreed, dropped in ranks(2)(list_keys):
        assert bulk == again == dropped
        assert len({bulk, ring, agreed}) == 3

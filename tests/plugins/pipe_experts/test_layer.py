"""Expert-parallel layers against all experts in one process, and against the layer that is not cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ovpatch.insight.equality import compare
from ovpatch_plugins.pipe_experts.how import How
from tests.plugins.pipe_experts.models import KINDS, Case, expected, train

HOWS = {
    "none": How("none"),
    "experts": How("experts"),
    "experts, at once": How("experts", delay_wgrad=False),
    "2 chunks": How("tokens", 2),
    "5 chunks": How("tokens", 5),
    "chunks, at once, 2 communicators": How("tokens", 2, delay_wgrad=False, multi_stream=True),
    "experts, 2 communicators": How("experts", multi_stream=True),
}
CASES = {
    "4 experts": Case(local=4),
    "3 experts, top 1": Case(local=3, top_k=1),
    "1 expert": Case(local=1),
    "gelu": Case(activation="gelu"),
    "relu, shared": Case(activation="relu", shared=True),
    "separate": Case(module="separate"),
    "grouped": Case(module="grouped"),
    "numbered": Case(module="numbered"),
    "numbered, all tokens to one expert": Case(module="numbered", top_k=1, favourites=(1,)),
    "capacity": Case(capacity=2),
    "all tokens to one expert": Case(local=2, top_k=1, favourites=(1,)),
    "a rank without tokens": Case(tokens=(5, 0)),
    "no tokens at all": Case(tokens=(0,)),
    "fewer tokens than chunks": Case(tokens=(1, 3)),
}
FROZEN = {
    "input": ("x",),
    "experts": ("up", "down"),
    "one weight": ("down",),
    "input and one weight": ("x", "up"),
    "router": ("router",),
    "input, and a rank without tokens": ("x",),
}


def check(ranks, world: int, case: Case, **kwargs: object) -> None:
    right = expected(case, world)
    for rank, found in enumerate(ranks(world)(train, case, **kwargs)):
        compare(right[rank], found, floor=1e-10).assert_equal()


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("how", HOWS)
def test_it_computes_what_one_process_does(ranks, world, how):
    check(ranks, world, Case(how=HOWS[how], steps=3))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["none", "experts", "2 chunks", "5 chunks"])
def test_any_layer_may_be_cut(ranks, how, case):
    check(ranks, 2, dataclasses.replace(CASES[case], how=HOWS[how]))


@pytest.mark.parametrize("module", ["stacked", *KINDS])
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen(ranks, frozen, module):
    tokens = (5, 0) if "without" in frozen else (7, 4)
    for how in ("experts", "2 chunks"):
        check(ranks, 2, Case(frozen=FROZEN[frozen], module=module, tokens=tokens, how=HOWS[how]))


def test_ten_steps_on_three_ranks(ranks):
    for how in ("experts", "2 chunks"):
        check(ranks, 3, Case(steps=10, how=HOWS[how]))


@pytest.mark.parametrize("module", ["stacked", *KINDS])
def test_groups_of_experts_leave_all_bits_as_they_are(ranks, module):
    for local in (2, 4):
        case = Case(local=local, module=module, how=HOWS["none"])
        whole, cut = (ranks(2)(train, dataclasses.replace(case, how=how)) for how in (HOWS["none"], HOWS["experts"]))
        compare(whole, cut).assert_bitwise()


def checkpointed(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    out: Tensor = checkpoint(model, x, use_reentrant=reentrant)
    return out


def not_reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(model, x, reentrant=False)


def reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(model, x, reentrant=True)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """A backward through a graph that is kept, and then the one that counts."""
    out: Tensor = model(x)
    out.square().sum().backward(retain_graph=True)
    x.grad = None
    model.zero_grad()
    return out


@pytest.mark.parametrize("forward", [not_reentrant, reentrant, twice])
def test_checkpoints_and_graphs_that_are_kept(ranks, forward):
    for module in ("stacked", "separate", "numbered"):
        for how in ("experts", "2 chunks"):
            check(ranks, 2, Case(module=module, how=HOWS[how], tokens=(6, 0)), forward=forward)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    local=st.sampled_from([1, 2, 4]),
    top_k=st.sampled_from([1, 2]),
    how=st.sampled_from(sorted(HOWS)),
    favourites=st.sampled_from([(), (0, 1)]),
    seed=st.integers(0, 1000),
)
def test_any_numbers_of_tokens(ranks, tokens, local, top_k, how, favourites, seed):
    check(ranks, 2, Case(local, top_k, tuple(tokens), favourites, steps=1, seed=seed, how=HOWS[how]))


def of_dtype(dtype: torch.dtype, how: How) -> dict[str, Tensor]:
    """A layer under autocast, or all in one dtype: outputs and gradients, to be held against the layer not cut."""
    from ovpatch_plugins.pipe_experts.module import ExpertParallelFFN

    torch.manual_seed(dist.get_rank())
    layer = ExpertParallelFFN(16, 24, 4 * dist.get_world_size(), how=how)
    x = torch.randn(20, 16, requires_grad=True)
    index = torch.stack([torch.randperm(4 * dist.get_world_size())[:2] for _ in range(20)])
    weights = torch.rand(20, 2, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = layer(x, index, weights)
    out.float().square().sum().backward()
    assert layer.up.grad.dtype == layer.up.dtype
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "up": layer.up.grad, "down": layer.down.grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(ranks, dtype):
    for whole, cut in zip(
        ranks(2)(of_dtype, dtype, How("none")), ranks(2)(of_dtype, dtype, How("experts")), strict=True
    ):
        assert whole["out"].dtype == cut["out"].dtype
        compare(whole, cut).assert_bitwise()

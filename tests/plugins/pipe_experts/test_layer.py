"""Expert-parallel layers compute the values of one process with all experts, and of a layer that is not cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ovpatch.overlap.comm.consensus import RankMismatchError
from ovpatch_plugins.pipe_experts.layer import ExpertParallelFFN, expert_parallel_ffn
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from tests.plugins.pipe_experts.models import (
    KINDS,
    Case,
    OverRanks,
    check,
    differentiated,
    one_by_one,
    train_all,
)
from tests.support.equality import compare

HOWS = {
    "none": MoEConfig("none"),
    "experts": MoEConfig("experts"),
    "experts, at once": MoEConfig("experts", delay_wgrad=False),
    "2 chunks": MoEConfig("tokens", 2),
    "5 chunks": MoEConfig("tokens", 5),
    "chunks, at once, 2 communicators": MoEConfig(
        "tokens", 2, delay_wgrad=False, multi_stream=True
    ),
    "experts, 2 communicators": MoEConfig("experts", multi_stream=True),
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


def cut(case: Case, how: str, **changes: Any) -> Case:
    return dataclasses.replace(case, config=HOWS[how], **changes)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_layers_compute_the_values_of_one_process(ranks, world):
    check(ranks(world), {how: cut(Case(steps=3), how) for how in HOWS})


@pytest.mark.parametrize("how", ["none", "experts", "2 chunks", "5 chunks"])
def test_any_layer_can_be_cut(ranks, how):
    check(ranks(2), {name: cut(case, how) for name, case in CASES.items()})


@pytest.mark.parametrize("module", ["stacked", *KINDS])
def test_frozen_parts(ranks, module):
    """Weights or tokens are frozen, some ranks have no tokens, and some experts get none."""
    cases = {
        f"{what}, {how}": cut(
            Case(), how, frozen=names, tokens=(5, 0) if "without" in what else (7, 4)
        )
        for what, names in FROZEN.items()
        for how in ("experts", "2 chunks")
    } | {
        f"to {favourites}, {how}": cut(
            Case(), how, top_k=1, favourites=favourites, frozen=("x",), tokens=(3, 0)
        )
        for favourites in ((0,), (0, 3))
        for how in ("experts", "5 chunks")
    }
    check(
        ranks(2), {name: dataclasses.replace(case, module=module) for name, case in cases.items()}
    )


def wants_grad(cases: dict[str, Case]) -> list[str]:
    """Return the layers whose output requires a gradient."""
    found = []
    for name, case in cases.items():
        model = OverRanks(case)
        for param in model.parameters():
            param.requires_grad_("router" in name and param is model.router)
        if model(case.x(dist.get_rank(), 0)).requires_grad:
            found.append(name)
    return found


def test_fully_frozen_layers_require_no_gradient(ranks):
    cases = {
        f"{module}, {how}": cut(Case(module=module), how)
        for module in ("stacked", *KINDS)
        for how in HOWS
    }
    trained = {f"{name}, router": case for name, case in cases.items()}
    assert ranks(2)(wants_grad, cases | trained) == [list(trained)] * 2


@pytest.mark.parametrize(
    ("world", "local", "top_k", "favourites"),
    [(2, 4, 1, (1, 2, 5)), (3, 2, 2, ()), (4, 1, 2, (0, 1, 3))],
)
def test_ten_steps(ranks, world, local, top_k, favourites):
    case = Case(local, top_k, favourites=favourites, steps=10)
    check(ranks(world), {how: cut(case, how) for how in ("experts", "2 chunks")})


def test_groups_of_experts_keep_all_bits(ranks):
    # Rows have 64 bytes, because on some processors MKL rounds by the address of a row, and cuts change addresses.
    cases = {
        f"{module}, {local}, {how}": cut(Case(local=local, module=module, sizes=(8, 8)), how)
        for module in ("stacked", *KINDS)
        for local in (2, 4)
        for how in ("none", "experts")
    }
    for found in ranks(2)(train_all, cases):
        for name in cases:
            compare(found[name.replace("experts", "none")], found[name]).assert_bitwise()


def checkpointed(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    out: Tensor = checkpoint(model, x, use_reentrant=reentrant)
    return out


def not_reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(model, x, reentrant=False)


def reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpointed(model, x, reentrant=True)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Run a backward through a retained graph, before the backward that counts."""
    out: Tensor = model(x)
    out.square().sum().backward(retain_graph=True)
    x.grad = None
    model.zero_grad()
    return out


@pytest.mark.parametrize("forward", [not_reentrant, reentrant, twice])
def test_checkpoints_and_retained_graphs(ranks, forward):
    modules, hows = ("stacked", "separate", "numbered"), ("experts", "2 chunks")
    cases = {
        f"{module}, {how}": cut(Case(module=module, tokens=(6, 0)), how)
        for module in modules
        for how in hows
    }
    check(ranks(2), cases, forward=forward)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    local=st.sampled_from([1, 2, 4]),
    top_k=st.sampled_from([1, 2]),
    how=st.sampled_from(sorted(HOWS)),
    favourites=st.sampled_from([(), (0, 1)]),
    seed=st.integers(0, 1000),
)
def test_any_numbers_of_tokens(ranks, tokens, local, top_k, how, favourites, seed):
    check(
        ranks(2), {"": cut(Case(local, top_k, tuple(tokens), favourites, steps=1, seed=seed), how)}
    )


def autocast_layer(activation: str, how: MoEConfig | None) -> dict[str, Any]:
    """Compute a layer under autocast; without ``how``, sequentially by linears."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    up, down = torch.randn(4, 8, 6, generator=generator), torch.randn(4, 6, 8, generator=generator)
    local = 4 // world
    own = slice(rank * local, (rank + 1) * local)
    up, down = (up, down) if how is None else (up[own].clone(), down[own].clone())
    up.requires_grad_()
    down.requires_grad_()
    generator.manual_seed(rank)
    x, top = (
        torch.randn(9, 6, generator=generator).requires_grad_(),
        torch.rand(9, 2, generator=generator),
    )
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    function = {"relu": nn.functional.relu, "square": lambda h: h.float().square()}[activation]
    with torch.autocast("cpu", torch.bfloat16):
        if how is None:
            out = one_by_one(x, index, top, up, down, function)
        else:
            out = expert_parallel_ffn(x, index, top, (up, down), function, dist.group.WORLD, how)
    return differentiated(out, x, up, down, own if how is None else None)


@pytest.mark.parametrize("activation", ["relu", "square"])
def test_autocast(ranks, activation):
    for how in ("none", "experts"):
        pairs = zip(
            *(ranks(2)(autocast_layer, activation, h) for h in (None, HOWS[how])), strict=True
        )
        for right, found in pairs:
            assert found["out"].dtype == right["out"].dtype == torch.float32
            assert torch.equal(right["out"], found["out"]), "the same GEMMs, in bfloat16"
            assert torch.equal(right["x"], found["x"])
            for name in ("up", "down"):
                assert (found[name] - right[name]).abs().max() < 0.02 * right[name].abs().max()


def step_function() -> list[Any]:
    """Return whether weights have no gradient after an activation that passes none on, as in any graph."""
    found: list[Any] = []
    for delay in (True, False):
        layer = ExpertParallelFFN(
            4,
            3,
            2 * dist.get_world_size(),
            activation="relu",
            config=MoEConfig("experts", 0, delay),
        )
        x = torch.randn(6, 4, requires_grad=True)
        index = torch.arange(12).view(6, 2) % (2 * dist.get_world_size())
        group = dist.group.WORLD
        weights = (layer.up, layer.down)
        out = expert_parallel_ffn(
            x, index, torch.ones(6, 2), weights, lambda h: (h > 0).to(h.dtype), group, layer.config
        )
        out.sum().backward()
        found += [layer.up.grad is None, layer.down.grad is None]
    return found


def test_an_activation_without_a_gradient(ranks):
    for found in ranks(2)(step_function):
        assert found == [True, False, True, False]


def misfit() -> str:
    layer = ExpertParallelFFN(4, 3, 2 * dist.get_world_size())
    with pytest.raises(ValueError, match="do not fit") as caught:
        layer(torch.randn(6, 4), torch.zeros(5, 2, dtype=torch.long), torch.rand(5, 2))
    return str(caught.value)


def test_tables_of_other_lengths_are_refused(ranks):
    assert all("give [tokens, h], [tokens, k]" in text for text in ranks(2)(misfit))


def different_top_k() -> str:
    """Route tokens to different numbers of experts on each rank, by which ranks would choose different parts."""
    top_k = 1 + dist.get_rank()
    x, weights = torch.randn(6, 8), (torch.randn(2, 10, 8), torch.randn(2, 8, 10))
    index, top = torch.zeros(6, top_k, dtype=torch.int64), torch.ones(6, top_k)
    with pytest.raises(RankMismatchError) as caught:
        expert_parallel_ffn(x, index, top, weights, nn.functional.silu, dist.group.WORLD)
    return str(caught.value)


def test_ranks_with_different_numbers_of_experts_of_a_token_raise(ranks):
    for text in ranks(2)(different_top_k):
        assert "experts of a token" in text
        assert text.rstrip().endswith("leaves layers to torch.")

"""Layers with cut=auto measure and choose a plan, and each plan computes the values of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ovpatch
from ovpatch.overlap.comm.lifetimes import drop_values
from ovpatch.overlap.kernels.autotuner import report_lines
from ovpatch_plugins.pipe_experts.layer import MeasuredPlans, expert_parallel_ffn
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS
from ovpatch_plugins.pipe_experts.routing import (
    ChunkPlan,
    PlanCandidates,
    list_candidates,
    make_plan,
    route_tokens,
)
from tests.plugins.pipe_experts.models import KINDS, Case, Record, expected, train
from tests.plugins.pipe_experts.test_layer import reentrant
from tests.support.equality import compare
from tests.support.races import NOWHERE, forced

PLANS = ["none", "experts 2", "experts 4", "tokens 2", "tokens 4", "tokens 8"]
CASE = Case(local=4, tokens=(160, 0, 37), steps=1, config=MoEConfig("auto"))


def test_candidates_of_the_choice():
    assert list(list_candidates(2, 4)) == PLANS
    assert list(list_candidates(2, 8))[:4] == ["none", "experts 2", "experts 4", "experts 8"]
    assert list(list_candidates(2, 3))[:3] == ["none", "experts 2", "experts 3"]
    assert list(list_candidates(2, 1)) == ["none", "tokens 2", "tokens 4", "tokens 8"]
    assert list(list_candidates(2, 4, 3)) == ["none", "experts 3", "tokens 3"]
    assert len(list_candidates(2, 4)["tokens 8"].chunks) == 8


class Finest(PlanCandidates):
    """Candidates whose counts are finer than the chosen plan needs, because another plan was expected."""

    def __init__(self, wanted: ChunkPlan) -> None:
        super().__init__(make_plan(wanted.ep_size, wanted.num_local_experts, "experts"))
        self.finest, self.wanted = (
            make_plan(wanted.ep_size, wanted.num_local_experts, "tokens", 8),
            wanted,
        )
        self.calls: list[tuple[int, bool]] = []

    def choose_plan(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        self.calls.append((tokens, trains))
        return self.wanted


def routed(tokens: list[int]) -> tuple[list[str], list[tuple[int, bool]]]:
    rank, wrong, calls = dist.get_rank(), [], []
    generator = torch.Generator().manual_seed(rank)
    index = torch.randint(-1, 8, (tokens[rank], 3), generator=generator)
    for name, wanted in list_candidates(2, 4).items():
        plans = Finest(wanted)
        with torch.set_grad_enabled(rank == 0):
            found, right = (
                route_tokens(index, candidates, dist.group.WORLD)
                for candidates in (plans, PlanCandidates(wanted))
            )
        calls += plans.calls
        same = (
            torch.equal(found.order, right.order)
            and found.splits == right.splits
            and found.plan == wanted
        )
        wrong += [] if same else [name]
    return wrong, calls


@pytest.mark.parametrize("tokens", [(37, 20), (5, 0), (0, 0), (3, 64)])
def test_counts_that_are_finer_than_a_plan_needs_route_as_the_plan(ranks, tokens):
    for wrong, calls in ranks(2)(routed, tokens):
        assert not wrong
        assert set(calls) == {(max(tokens), tokens[0] >= tokens[1])}, (
            "the mode of the rank that has the most"
        )


def won_by(first: int, case: Case, **kwargs: Any) -> tuple[list[Record], list[str], int]:
    drop_values(MeasuredPlans)
    before = COUNTERS.as_dict()
    with forced(first) as won:
        found = train(case, **kwargs)
    now = COUNTERS.as_dict()
    return found, won, (now["parts"] - before["parts"]) // max(now["calls"] - before["calls"], 1)


def won_by_each(firsts: list[int], case: Case) -> list[tuple[list[Record], list[str], int]]:
    return [won_by(first, case) for first in firsts]


def check_all(ranks: Any, world: int, firsts: list[int], **kwargs: Any) -> None:
    right = expected(CASE, world)
    for rank, results in enumerate(ranks(world)(won_by_each, firsts, CASE, env=NOWHERE, **kwargs)):
        for first, (found, won, parts) in zip(firsts, results, strict=True):
            compare(right[rank], found, floor=1e-10).assert_equal()
            assert won == [PLANS[first], PLANS[(first + 1) % len(PLANS)]], (
                "forward; forward and backward"
            )
            assert parts == len(list_candidates(world, CASE.local)[won[1]].chunks)


@pytest.mark.parametrize(("world", "firsts"), [(2, [*range(len(PLANS))]), (3, [1, 3])])
def test_each_plan_computes_the_values_of_one_process(ranks, world, firsts):
    check_all(ranks, world, firsts)


def test_a_checkpoint_without_gradients_first(ranks):
    case = dataclasses.replace(CASE, steps=2, module="stacked", activation="gelu")
    right = expected(case, 2)
    for rank, (found, won, _) in enumerate(
        ranks(2)(won_by, 2, case, forward=reentrant, env=NOWHERE)
    ):
        compare(right[rank], found, floor=1e-10).assert_equal()
        assert won == ["experts 4", "tokens 2"]


@pytest.mark.parametrize("module", KINDS)
def test_experts_of_other_modules_are_not_cut(ranks, module):
    for _, won, parts in ranks(2)(won_by, 1, dataclasses.replace(CASE, module=module), env=NOWHERE):
        assert not won
        assert parts == 1


@pytest.mark.parametrize("tokens", [(0,), (3, 60)])
def test_few_tokens_are_computed_in_sequence(ranks, tokens):
    case = dataclasses.replace(CASE, tokens=tokens)
    for _, won, parts in ranks(2)(won_by, 1, case, env=NOWHERE):
        assert not won
        assert parts == 1


def layer(tokens: int) -> Tensor:
    """Compute a layer whose tokens and weights do not depend on the chosen plan."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, 16, generator=generator)
    up, down = (
        torch.randn(2, 24, 16, generator=generator),
        torch.randn(2, 16, 24, generator=generator),
    )
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens)])
    return expert_parallel_ffn(
        x, index, torch.ones(tokens, 2), (up, down), torch.nn.functional.gelu, dist.group.WORLD
    )


def compute_with_gradients_on_one_rank() -> tuple[Tensor, Tensor, list[str]]:
    """Compute a layer with gradients on one rank; plans of training and evaluation differ, but ranks must agree."""
    with forced(1) as won, torch.set_grad_enabled(dist.get_rank() == 1):
        found = layer(200)
        return layer(200), found, won


def test_ranks_need_not_have_the_same_gradient_mode(ranks):
    for again, found, won in ranks(2)(compute_with_gradients_on_one_rank, env=NOWHERE):
        assert won == ["experts 2", "tokens 2"]
        assert torch.equal(again, found)


def measuring() -> Record:
    """Compute layers whose number of tokens differs between steps and between ranks."""
    before = len(report_lines("pipe_experts"))
    state = torch.get_rng_state()
    rank = dist.get_rank()
    for tokens in ((200, 256), (300, 100), (600, 5), (200, 200), (7, 5)):
        layer(tokens[rank])
    assert torch.equal(state, torch.get_rng_state())
    with ovpatch.applied("pipe_experts"):
        shown = ovpatch.report()["pipe_experts"].remarks
    lines = report_lines("pipe_experts")[before:]
    return {"lines": lines, "shown": set(lines) <= set(shown)}


def test_each_number_of_tokens_is_measured_once(ranks, tmp_path):
    env = {"OVPATCH_CACHE_DIR": str(tmp_path)}
    first, second = ranks(2)(measuring, env=env)
    assert first == second
    assert first["shown"]
    assert len(first["lines"]) == 2 * 2, "two powers of two, two directions"
    layer = "256 tokens of 16, 2 experts each, 2 experts of 24 a rank, float32, 2 ranks: "
    assert first["lines"][0].startswith(f"forward, {layer}")
    assert first["lines"][1].startswith(f"forward and backward, {layer}")
    assert all(
        name in first["lines"][0] for name in ("none ", "experts 2 ", "tokens 8 ", "; measured)")
    )
    assert first["lines"][2].startswith("forward, 512 tokens of 16")
    for found in ranks(2)(measuring, env=env):
        assert all(line.endswith("; measured in an earlier run)") for line in found["lines"])
        assert len(found["lines"]) == 4


def deterministic() -> tuple[list[str], int]:
    before = COUNTERS.parts
    torch.use_deterministic_algorithms(True)
    try:
        with forced(3) as won:
            layer(256)
    finally:
        torch.use_deterministic_algorithms(False)
    return won, COUNTERS.parts - before


def test_deterministic_algorithms_cut_nothing(ranks):
    for won, parts in ranks(2)(deterministic, env=NOWHERE):
        assert not won
        assert parts == 1


@pytest.mark.gpu(2)
def test_any_plan_may_win_on_gpus(ranks):
    check_all(ranks, 2, [*range(len(PLANS))], backend="nccl", timeout=120)

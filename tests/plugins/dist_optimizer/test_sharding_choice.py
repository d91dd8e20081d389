"""``shard=auto``: on which side of the border a model is, alike on all ranks; where off, a step costs nothing."""

from __future__ import annotations

import collections
import copy
import dataclasses
import sys
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
from ovpatch_plugins.dist_optimizer import dist_optimizer_report as report
from ovpatch_plugins.dist_optimizer import sharding_choice
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import Counters
from ovpatch_plugins.dist_optimizer.sharding_choice import MIN_SAVED_NUMEL, ModelFacts
from tests.plugins.ddp.arms import Record
from tests.plugins.dist_optimizer.checks import SMALL, both, check, ddp, train_steps
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support.hosts import fake_hosts

STEPS = 6
NCCL, GLOO = ("nccl", "cuda"), ("gloo", "cpu")
AUTO = {"shard": "auto"}
SPARED = 20  # elements a tensor of net() on two ranks, of those that can be sharded


def facts(mean: float, world: int, backend: tuple[str, str] = NCCL) -> ModelFacts:
    """A model of 100 fp32 tensors of ``mean`` million elements."""
    numel = int(100e6 * mean)
    return ModelFacts(100, numel, 4 * numel, world, backend)


@pytest.mark.parametrize(
    ("model", "on"),
    [
        # As measured (milliseconds: ddp alone, with shards).
        (facts(10.2, 2), False),  # 73.7, 70.0; with blocks compiled 70.1, 86.9
        (facts(10.2, 8), False),  # compiled 63.5, 55.6, but without peers
        (facts(21.4, 2), True),  # compiled 136.3, 129.6
        (facts(2.76, 2), False),  # 41.6, 55.2
        (facts(20.2, 8), True),
        (facts(0.065, 2, GLOO), False),
        (facts(4.2, 2, GLOO), True),
        # Neither side was measured.
        (facts(1.0, 2), False),
        (facts(1000.0, 8, ("gloo", "cuda")), False),
        (facts(1000.0, 8, ("mpi", "cpu")), False),
        (ModelFacts(0, 0, 0, 8, NCCL), False),
    ],
)
def test_both_sides_of_the_border(model, on):
    assert (model.objection() == "") is on


@pytest.mark.parametrize("backend", MIN_SAVED_NUMEL)
@pytest.mark.parametrize("world", [2, 8])
def test_the_border_is_what_a_tensor_spares_a_rank(backend, world):
    least = MIN_SAVED_NUMEL[backend] * world // (world - 1) + 1
    model = ModelFacts(7, 7 * least, 28 * least, world, backend)
    assert model.objection() == ""
    assert dataclasses.replace(model, numel=model.numel - 14).objection() != ""


def test_the_choice_in_words():
    assert (
        facts(38.0, 8).gain() == "3.8B parameters on 8 ranks save 24.8 GiB of AdamW's state a rank"
    )
    assert facts(0.002, 2).objection() == (
        "0.2M parameters in 100 tensors on 2 ranks: the host may be the limit; a step could be "
        "longer (shard=always "
        "would save 0.8 MiB of AdamW's state a rank)"
    )
    assert "not measured with backend mpi on cpu" in facts(38.0, 8, ("mpi", "cpu")).objection()
    assert "min_param_numel" in ModelFacts(0, 0, 0, 8, NCCL).objection()
    assert facts(38.0, 8).objection_to_hosts(1) == ""
    assert "ranks: not measured on 2 hosts (shard=always would save 24.8 GiB" in facts(
        38.0, 8
    ).objection_to_hosts(2)


# --- what ranks do ---


def border(least: int) -> Any:
    """Place the border between models elsewhere on gloo."""
    return mock.patch.dict(MIN_SAVED_NUMEL, {GLOO: least})


def train(how: str = "") -> list[Record]:
    """Train; the wrapper may be a copy, or be followed by another whose model is left whole."""
    inner = net()
    model = ddp(inner)
    if how == "copied":
        model = copy.deepcopy(model)
    opt = OPTIMIZERS["adamw"](model.parameters())
    records = train_steps(model, opt, STEPS)
    if how == "wrapped again":
        with border(SPARED + 1):
            model = ddp(inner)
        records += train_steps(model, opt, STEPS)
    return records


def chosen(least: int, options: dict[str, Any], how: str = "") -> tuple[dict[str, Any], list[str]]:
    """Train stock and patched; return both, and what the report of the patched arm remarks."""
    remarks: list[str] = []

    def loop() -> list[Record]:
        records = train(how)
        remarks[:] = ovpatch.report()["dist_optimizer"].remarks
        return records

    with border(least), mock.patch.object(report, "_remarks", []):
        return both(loop, options=options), remarks


def only_of_choice(remarks: list[str]) -> list[str]:
    return [text for text in remarks if "shard=auto" in text]


def test_where_a_step_would_be_longer_nothing_is_sharded(ranks):
    results = ranks(2)(chosen, SPARED + 1, AUTO)
    check([result for result, _ in results], steps=0)
    for result, remarks in results:
        assert {name: result["counters"][name] for name in vars(Counters())} == dict.fromkeys(
            vars(Counters()), 0
        )
        assert only_of_choice(remarks) == [
            "Sequential (shard=auto): off: 161 parameters in 4 tensors on 2 ranks: the host may be "
            "the limit; a step "
            "could be longer (shard=always would save 0.0 MiB of AdamW's state a rank)"
        ]
        assert not any("nothing to divide" in text for text in remarks)


def test_where_it_would_not_all_is_sharded(ranks):
    results = ranks(2)(chosen, SPARED, AUTO)
    check([result for result, _ in results], steps=STEPS)
    for _, remarks in results:
        assert only_of_choice(remarks) == [
            "Sequential (shard=auto): on: 161 parameters on 2 ranks save 0.0 MiB of AdamW's state "
            "a rank"
        ]


@pytest.mark.parametrize("options", [{}, {"shard": "always"}])
def test_always_asks_nothing(ranks, options):
    results = ranks(2)(chosen, SPARED + 1, options)
    check([result for result, _ in results], steps=STEPS)
    assert [only_of_choice(remarks) for _, remarks in results] == [[], []]


def test_ranks_decide_alike_where_they_know_different_borders(ranks):
    results = ranks(2)(chosen_by_rank)
    check([result for result, _ in results], steps=0)
    ((first,), (second,)) = (only_of_choice(remarks) for _, remarks in results)
    assert first == second
    assert "off: " in first


def chosen_by_rank() -> tuple[dict[str, Any], list[str]]:
    return chosen(SPARED + dist.get_rank(), AUTO)


def test_an_optimizer_goes_on_where_its_model_is_wrapped_again_and_whole(ranks):
    results = ranks(2)(chosen, SPARED, AUTO, "wrapped again")
    check([result for result, _ in results], steps=STEPS, stock=1)
    for result, remarks in results:
        assert result["counters"]["steps"] == STEPS
        first, second = only_of_choice(remarks)
        assert "on: " in first
        assert "off: " in second


def test_a_copy_of_a_wrapper_stays_whole(ranks):
    results = ranks(2)(chosen, SPARED, AUTO, "copied")
    check([result for result, _ in results], steps=0)
    for _, remarks in results:
        original, copied = only_of_choice(remarks)
        assert "on: " in original
        assert "off: its ranks did not build it together" in copied


def test_ranks_on_several_hosts_stay_whole(ranks):
    results = ranks(2)(chosen_on_hosts, SPARED)
    check([result for result, _ in results], steps=0)
    for _, remarks in results:
        assert ["not measured on 2 hosts" in text for text in only_of_choice(remarks)] == [True]


def chosen_on_hosts(least: int) -> tuple[dict[str, Any], list[str]]:
    with fake_hosts(1):
        return chosen(least, AUTO)


def test_main_parameters_are_not_left_out():
    model, prepared = nn.Linear(4, 4).bfloat16(), list[str]()
    options = {"main_params_in_fp32": True, "min_param_numel": 16384}
    group: Any = None  # asked for nothing
    params = list(model.parameters())

    def prepare() -> str:
        prepared.append("")
        return ""

    assert sharding_choice.choose_sharding(
        options, prepare, model, params, group, sparse=(), together=True
    )
    assert prepared == []  # all patches are there from apply() on


# --- what a step calls ---


class Owner(nn.Module):
    """One module with any number of parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        for number in range(count):
            self.register_parameter(
                f"weight{number}", nn.Parameter(torch.eye(8) + 0.1 * torch.randn(8, 8))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters():
            x = x @ weight
        return x


def calls_of_step(options: dict[str, Any], count: int) -> dict[str, int]:
    """Return how often one warm step calls each function of the feature and of what reads its tensors."""
    found: collections.Counter[str] = collections.Counter()

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(
            ("ovpatch_plugins.dist_optimizer", "ovpatch.overlap.tensors")
        ):
            found[f"{module}.{frame.f_code.co_name}"] += 1

    with (
        border(2**40),
        ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | options}),
    ):
        model = DistributedDataParallel(Owner(count))
        opt = OPTIMIZERS["adamw"](model.parameters())
        assert (type(model.reducer.grad_reducer.sharder) is GradSharder) is (options == AUTO)
        for step in range(STEPS):
            sys.setprofile(profile if step == STEPS - 1 else None)
            model(torch.ones(2, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        sys.setprofile(None)
    return dict(found)


def calls_by_size(options: dict[str, Any]) -> list[dict[str, int]]:
    return [calls_of_step(options, count) for count in (2, 40)]


def test_where_off_no_parameter_costs_a_call(ranks):
    for few, many in ranks(2)(calls_by_size, AUTO):
        assert few == many
    for few, many in ranks(2)(
        calls_by_size, {"shard": "always"}
    ):  # what is counted does grow there
        assert sum(many.values()) > sum(few.values()) + 40

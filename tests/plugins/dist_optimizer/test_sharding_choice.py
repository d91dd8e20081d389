"""``shard=auto``: all ranks find the same side of the threshold, and an unsharded model costs no call in a step."""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
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
from ovpatch import OptionError
from ovpatch.overlap.comm import hosts
from ovpatch.overlap.comm.hosts import HostLayout
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
# The elements that sharding saves on each of two ranks, per tensor of net() that can be sharded.
SAVED = 20


def facts(mean: float, world: int, backend: tuple[str, str] = NCCL) -> ModelFacts:
    """Return a model of 100 fp32 tensors with a mean size of ``mean`` million elements."""
    numel = int(100e6 * mean)
    return ModelFacts(100, numel, 4 * numel, world, backend)


@pytest.mark.parametrize(
    ("model", "on"),
    [
        # Trailing comments have measurements in ms: ddp alone, and with shards.
        (facts(10.2, 2), False),  # 73.7, 70.0; compiled 70.1, 86.9
        # Compiled 63.5, 55.6, but measured without peers.
        (facts(10.2, 8), False),
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
def test_both_sides_of_the_threshold(model, on):
    assert (model.objection() == "") is on


@pytest.mark.parametrize("backend", MIN_SAVED_NUMEL)
@pytest.mark.parametrize("world", [2, 8])
def test_the_threshold_is_the_number_of_elements_a_tensor_saves_on_a_rank(backend, world):
    least = MIN_SAVED_NUMEL[backend] * world // (world - 1) + 1
    model = ModelFacts(7, 7 * least, 28 * least, world, backend)
    assert model.objection() == ""
    assert dataclasses.replace(model, numel=model.numel - 14).objection() != ""


def test_the_texts_of_the_choice():
    assert (
        facts(38.0, 8).gain() == "3.8B parameters on 8 ranks save 24.8 GiB of AdamW's state a rank"
    )
    assert facts(0.002, 2).objection() == (
        "its tensors are so small that steps could get longer (0.2M parameters in 100 tensors on "
        "2 ranks); shard=always would save 0.8 MiB of AdamW's state a rank"
    )
    assert "get longer with backend mpi on cpu (3.8B" in facts(38.0, 8, ("mpi", "cpu")).objection()
    assert "min_param_numel" in ModelFacts(0, 0, 0, 8, NCCL).objection()
    assert facts(38.0, 8).objection_to_hosts(1, "why") == ""
    assert facts(38.0, 8).objection_to_hosts(2, "why") == (
        "why, so parameters would cross the links of 2 hosts (3.8B parameters in 100 tensors on 8 "
        "ranks); shard=always would save 24.8 GiB of AdamW's state a rank"
    )


# --- choices of ranks ---


def saved_threshold(least: int) -> Any:
    """Set the threshold on gloo: the elements that a tensor must save on a rank."""
    return mock.patch.dict(MIN_SAVED_NUMEL, {GLOO: least})


def train(how: str = "") -> list[Record]:
    """Train. The wrapper may be a copy, or a second wrapper that is not sharded may follow."""
    inner = net()
    model = ddp(inner)
    if how == "copied":
        model = copy.deepcopy(model)
    opt = OPTIMIZERS["adamw"](model.parameters())
    records = train_steps(model, opt, STEPS)
    if how == "wrapped again":
        with saved_threshold(SAVED + 1):
            model = ddp(inner)
        records += train_steps(model, opt, STEPS)
    return records


def chosen(least: int, options: dict[str, Any], how: str = "") -> tuple[dict[str, Any], list[str]]:
    """Train stock and patched; return both arms, and the remarks of the patched arm."""
    remarks: list[str] = []

    def loop() -> list[Record]:
        records = train(how)
        remarks[:] = ovpatch.report()["dist_optimizer"].remarks
        return records

    with saved_threshold(least), mock.patch.object(report, "_remarks", []):
        return both(loop, options=options), remarks


def only_of_choice(remarks: list[str]) -> list[str]:
    return [text for text in remarks if "shard=auto" in text]


def test_a_model_whose_step_would_be_longer_is_not_sharded(ranks):
    results = ranks(2)(chosen, SAVED + 1, AUTO)
    check([result for result, _ in results], steps=0)
    for result, remarks in results:
        assert {name: result["counters"][name] for name in vars(Counters())} == dict.fromkeys(
            vars(Counters()), 0
        )
        assert only_of_choice(remarks) == [
            "Sequential (shard=auto): off: its tensors are so small that steps could get longer "
            "(161 parameters in 4 tensors on 2 ranks); shard=always would save 0.0 MiB of AdamW's "
            "state a rank"
        ]
        assert not any("nothing to shard" in text for text in remarks)


def test_a_model_whose_step_would_not_be_longer_is_sharded(ranks):
    results = ranks(2)(chosen, SAVED, AUTO)
    check([result for result, _ in results], steps=STEPS)
    for _, remarks in results:
        assert only_of_choice(remarks) == [
            "Sequential (shard=auto): on: 161 parameters on 2 ranks save 0.0 MiB of AdamW's state "
            "a rank"
        ]


@pytest.mark.parametrize("options", [{}, {"shard": "always"}])
def test_always_shards_without_a_choice(ranks, options):
    results = ranks(2)(chosen, SAVED + 1, options)
    check([result for result, _ in results], steps=STEPS)
    assert [only_of_choice(remarks) for _, remarks in results] == [[], []]


def test_ranks_with_different_thresholds_decide_the_same(ranks):
    results = ranks(2)(chosen_by_rank)
    check([result for result, _ in results], steps=0)
    ((first,), (second,)) = (only_of_choice(remarks) for _, remarks in results)
    assert first == second
    assert "off: " in first


def chosen_by_rank() -> tuple[dict[str, Any], list[str]]:
    return chosen(SAVED + dist.get_rank(), AUTO)


def test_an_optimizer_continues_as_in_torch_if_its_model_is_wrapped_again_unsharded(ranks):
    results = ranks(2)(chosen, SAVED, AUTO, "wrapped again")
    check([result for result, _ in results], steps=STEPS, stock=1)
    for result, remarks in results:
        assert result["counters"]["steps"] == STEPS
        first, second = only_of_choice(remarks)
        assert "on: " in first
        assert "off: " in second


def test_a_copy_of_a_wrapper_is_not_sharded(ranks):
    results = ranks(2)(chosen, SAVED, AUTO, "copied")
    check([result for result, _ in results], steps=0)
    for _, remarks in results:
        original, copied = only_of_choice(remarks)
        assert "on: " in original
        assert "off: its ranks did not build it at the same time" in copied


def test_a_model_on_several_hosts_is_not_sharded(ranks):
    results = ranks(2)(chosen_on_hosts, SAVED)
    check([result for result, _ in results], steps=0)
    for _, remarks in results:
        (text,) = only_of_choice(remarks)
        assert "each host has one rank, which would keep all state, so parameters would" in text


CUDA = torch.device("cuda")


def choose_layout(
    backend: str, names: str, device: torch.device = CUDA, **options: Any
) -> tuple[HostLayout | None, list[str]]:
    """Return the hosts that keep all state on rank 0 of a faked group, and the lines of the report."""
    layout = HostLayout.of(list(names), 0)
    group = mock.Mock(**{"size.return_value": len(names)})
    with (
        mock.patch.object(nn.Parameter, "device", device),
        mock.patch.object(hosts, "backend_name", return_value=backend),
        mock.patch.object(report, "_remarks", []),
    ):
        chosen = sharding_choice.choose_shard_layout(
            {"shard_over": "auto", "copy_engines": "auto"} | options,
            [nn.Parameter(torch.ones(2))],
            group,
            layout,
        )
        assert chosen in (None, layout)
        return chosen, report.list_remarks()


@pytest.mark.parametrize(("backend", "device"), [NCCL, GLOO])
def test_hosts_keep_all_state_each_on_these_backends(backend, device):
    for shard_over in ("auto", "host"):
        layout, (remark,) = choose_layout(
            backend, "aabb", torch.device(device), shard_over=shard_over
        )
        assert layout is not None
        expected = f"each of 2 hosts keeps all state, over its 2 ranks (shard_over={shard_over})"
        assert expected in remark
    assert choose_layout(backend, "aabb", torch.device(device), shard_over="world") == (None, [])
    assert choose_layout(backend, "aaaa", torch.device(device)) == (None, [])


@pytest.mark.parametrize(
    ("backend", "names", "reason"),
    [
        (
            "gloo",
            "aabb",
            "shards within hosts need gloo on the CPU or NCCL on CUDA, not gloo on cuda",
        ),
        ("nccl", "aaab", "hosts have different numbers of ranks (3 on a, 1 on b)"),
        ("nccl", "abcd", "each host has one rank, which would keep all state"),
    ],
)
def test_hosts_that_cannot_keep_all_state_each_are_an_error_if_named_and_a_remark_otherwise(
    backend, names, reason
):
    with pytest.raises(OptionError, match=re.escape(reason)):
        choose_layout(backend, names, shard_over="host")
    layout, (remark,) = choose_layout(backend, names)
    assert layout is None
    assert f"state is kept once over {len(set(names))} hosts" in remark
    assert reason in remark


def test_copy_engines_that_are_named_are_an_error_if_each_host_keeps_all_state():
    error = "connect all ranks of a process group, and each host keeps all state"
    with pytest.raises(OptionError, match=error):
        choose_layout("nccl", "aabb", copy_engines="on")
    # The world has copy engines if it is on one host, which another error says.
    assert choose_layout("nccl", "aabb", copy_engines="on", shard_over="world")[0] is None


@pytest.mark.parametrize(("names", "on"), [("aabb", True), ("aaab", False), ("abcd", False)])
def test_on_several_hosts_with_nccl_the_ranks_of_one_host_decide(names, on):
    layout = HostLayout.of(list(names), 0)
    group = mock.Mock(**{"size.return_value": len(names)})
    # Meta tensors take no memory. Each saves half of 21 million elements on two ranks of a host.
    model = nn.Linear(21_000_000, 1, bias=False, device="meta")
    options = {"shard_over": "auto", "main_params_in_fp32": False, "min_param_numel": 16384}
    with (
        mock.patch.object(nn.Parameter, "device", CUDA),
        mock.patch.object(hosts, "backend_name", return_value="nccl"),
        mock.patch.object(sharding_choice, "backend_name", return_value="nccl"),
        mock.patch.object(sharding_choice, "find_host_layout", return_value=layout),
        mock.patch.object(sharding_choice, "gather_values", lambda _group, _topic, value: [value]),
        mock.patch.object(report, "_remarks", []),
    ):
        chosen = sharding_choice.choose_sharding(
            options, str, model, list(model.parameters()), group, sparse=(), together=True
        )
        (remark,) = report.list_remarks()
    assert chosen is on
    if on:
        assert "on: 21.0M parameters on 2 ranks save" in remark
    else:
        assert "so parameters would cross the links of" in remark


def chosen_on_hosts(least: int) -> tuple[dict[str, Any], list[str]]:
    with fake_hosts(1):
        return chosen(least, AUTO)


def test_main_parameters_shard_without_a_choice():
    model, prepared = nn.Linear(4, 4).bfloat16(), list[str]()
    options = {"main_params_in_fp32": True, "min_param_numel": 16384}
    # The choice must not use the group.
    group: Any = None
    params = list(model.parameters())

    def prepare() -> str:
        prepared.append("")
        return ""

    assert sharding_choice.choose_sharding(
        options, prepare, model, params, group, sparse=(), together=True
    )
    # apply() has already applied all patches.
    assert prepared == []


# --- calls of a step ---


class Owner(nn.Module):
    """A module with any number of parameters."""

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
    """Count the calls of one warm step, by function, in the feature and in the code that reads its tensors."""
    found: collections.Counter[str] = collections.Counter()

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(
            ("ovpatch_plugins.dist_optimizer", "ovpatch.overlap.tensors")
        ):
            found[f"{module}.{frame.f_code.co_name}"] += 1

    with (
        saved_threshold(2**40),
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


def test_without_shards_no_parameter_costs_a_call(ranks):
    for few, many in ranks(2)(calls_by_size, AUTO):
        assert few == many
    # With shards the count grows, so the profile does see calls for each parameter.
    for few, many in ranks(2)(calls_by_size, {"shard": "always"}):
        assert sum(many.values()) > sum(few.values()) + 40

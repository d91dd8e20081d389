"""Options that cannot act on this machine are an error at the first use, and the report shows what has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch import hookspecs
from ovpatch.hookspecs import Option, OptionError
from ovpatch.session.plugins import Plugins, find_plugins
from ovpatch_plugins.recompute import recompute
from tests.plugins.pipeline.cases import Case, train
from tests.scripts.arms import needs

NO_GPU = "tensors are on cpu, not on CUDA devices (rank 0, 1)"
NO_NCCL = "it needs NCCL, and gloo reduces the gradients of this process group"


def wrap_model() -> None:
    DistributedDataParallel(nn.Linear(4, 4))


def step_optimizer() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def cut_linear() -> None:
    parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())


def call_experts() -> None:
    from ovpatch_plugins.pipe_experts import expert_parallel_ffn
    from ovpatch_plugins.pipe_experts.pipe_experts_options import STATE

    weights = [torch.ones(1, 4, 4), torch.ones(1, 4, 4)]
    index = torch.zeros(2, 1, dtype=torch.long)
    expert_parallel_ffn(
        torch.ones(2, 4), index, torch.ones(2, 1), weights, torch.relu, None, STATE.config
    )


def run_pipeline() -> None:
    train(Case(steps=1))


def train_megatron() -> None:
    from tests.plugins.megatron import models

    with models.parallel(tp=2):
        models.train_gpt()


# The value that this machine, on gloo and without GPUs, cannot follow, the first use, and the reason.
UNUSABLE: dict[tuple[str, str], tuple[Any, Callable[[], None], str]] = {
    ("ddp", "max_ctas"): (4, wrap_model, NO_NCCL),
    ("ddp", "average_in_collective"): (True, wrap_model, NO_NCCL),
    ("dist_optimizer", "copy_engines"): ("on", step_optimizer, NO_GPU),
    ("megatron", "schedule"): ("fused", train_megatron, NO_GPU),
    ("pipe_experts", "exchange"): ("symmetric", call_experts, NO_GPU),
    ("pipeline", "p2p_transport"): ("copies", run_pipeline, NO_GPU),
    ("tp_linear", "schedule"): ("fused", cut_linear, NO_GPU),
}
# Options that need nothing but their feature. A new option belongs here, or into the table above.
USABLE = {
    "ddp": "overlap_grad_reduce bucket_cap_mb bucket_granularity grad_reduce_in_fp32 grad_accumulate_in_fp32 "
    "agreement_timeout_s hierarchical",
    "dist_optimizer": "shard overlap_param_gather gather_granularity gather_bucket_mb grads_in_flight_mb "
    "min_param_numel main_params_in_fp32 element_wise per_parameter shard_over",
    "megatron": "linears min_linear_gflop chunks regather ordered_grad_reduce early_param_gather pipeline_schedule",
    "pipe_experts": "cut parts delay_wgrad multi_stream",
    "pipeline": "schedule memory_limit delay_wgrad_compute overlap_p2p_comm variable_seq_lengths plan_file "
    "weight_stash forward_doubling gradient_accumulation_fusion",
    "recompute": "granularity blocks keep ahead check",
    "tp_linear": "chunks regather shared_gather compiled gradient_accumulation_fusion",
}


def load_options() -> dict[str, tuple[Option, ...]]:
    plugins = Plugins()
    shipped = {name: found for name, found in find_plugins().items() if found.first_party}
    return {name: plugins.load_feature(found).options for name, found in shipped.items()}


def test_each_option_is_in_one_of_the_tables():
    names = {
        (feature, option.name) for feature, options in load_options().items() for option in options
    }
    usable = {(feature, name) for feature, text in USABLE.items() for name in text.split()}
    assert not usable & UNUSABLE.keys()
    assert usable | UNUSABLE.keys() == names


def use(feature: str, name: str) -> tuple[str, list[str], list[str]]:
    """Return the error of the first use, and the remarks with the option's value and with the default."""
    value, first_use, _ = UNUSABLE[feature, name]
    features = ("ddp", "dist_optimizer") if feature == "dist_optimizer" else (feature,)
    options = {feature: {name: value}}
    if feature == "dist_optimizer":
        options[feature]["min_param_numel"] = 1
    with ovpatch.applied(*features, options=options) as report:
        with pytest.raises(OptionError) as error:
            first_use()
        remarks = list(ovpatch.report()[feature].remarks)
    with ovpatch.applied(*features):
        first_use()
        report = ovpatch.report()[feature]
    return str(error.value), remarks, list(report.remarks)


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        pytest.param(*case, marks=[needs("megatron")] if case[0] == "megatron" else [])
        for case in UNUSABLE
    ],
)
def test_the_first_use_is_an_error_with_reason_and_remedy(ranks, feature, name):
    value, _, reason = UNUSABLE[feature, name]
    default = next(option.default for option in load_options()[feature] if option.name == name)
    variable = f"OVPATCH_{feature}_{name}".upper()
    instead = "none" if default is None else default
    expected = (
        f"ovpatch: option {name}={value} of feature {feature!r} cannot act here: {reason}. Set "
        f"{variable}={instead} on "
        "all ranks, or remove the variable and the argument of that name."
    )
    for error, remarks, by_default in ranks(2)(use, feature, name):
        assert error == expected
        (remark,) = [text for text in remarks if "failed with OptionError" in text]
        assert remark.endswith(f" failed with OptionError: {expected}")
        assert not any("failed with" in text for text in by_default)


def test_a_default_that_cannot_act_is_a_remark_until_the_feature_goes_off():
    options = (Option("fast", True, "Whether to be fast."),)
    hookspecs.refuse_option("a", options, "fast", True, "there is no road")
    assert hookspecs.list_failures("a") == ["fast=True does not act here: there is no road"]
    hookspecs.drop_failures("a")
    assert hookspecs.list_failures("a") == []


def fail_before_apply() -> tuple[list[str], list[str]]:
    """Return the messages after an error of a layer whose feature is off, and the remarks once it is on."""
    from ovpatch_plugins.pipe_experts import MoEConfig, expert_parallel_ffn

    weights = [torch.ones(1, 4, 4), torch.ones(1, 4, 4)]
    index = torch.zeros(2, 1, dtype=torch.long)
    config = MoEConfig(exchange="symmetric")
    with pytest.raises(OptionError):
        expert_parallel_ffn(
            torch.ones(2, 4), index, torch.ones(2, 1), weights, torch.relu, None, config
        )
    noted = hookspecs.list_failures("pipe_experts")
    with ovpatch.applied("pipe_experts"):
        return noted, list(ovpatch.report()["pipe_experts"].remarks)


def test_the_report_leaves_out_errors_from_before_the_feature_was_on(ranks):
    for noted, remarks in ranks(2)(fail_before_apply):
        assert len(noted) == 1
        assert not any("failed with" in text for text in remarks)


# Options that do nothing for a schedule, the fields of its case, and the remarks.
WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "an order": (
        {"schedule": "zb-h1"},
        {"schedule": "ScheduleInterleaved1F1B", "chunks": 2},
        ["schedule=zb-h1 has no effect: the schedule keeps its order"],
    ),
    "a limit of another order": (
        {"schedule": "zb-h1", "memory_limit": "1x"},
        {},
        ["memory_limit=1x has no effect: only schedule=auto solves an order"],
    ),
    "a limit and a plan of a solved order": (
        {"schedule": "auto", "memory_limit": "1x", "plan_file": "plan.json"},
        {},
        [],
    ),
    "orders of two directions": (
        {"forward_doubling": True},
        {},
        ["forward_doubling=True has no effect: the pipeline runs in one direction"],
    ),
}


def run_with_options(directory: str, names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        options, case, _ = WITHOUT_EFFECT[name]
        if "plan_file" in options:
            options = {**options, "plan_file": f"{directory}/plan.json"}
        with ovpatch.applied("pipeline", options={"pipeline": options}):
            train(Case(steps=1, **case))
            remarks = ovpatch.report()["pipeline"].remarks
        found[name] = [text for text in remarks if "no effect" in text]
    return found


def test_an_option_that_does_not_fit_a_schedule_is_a_remark(ranks, tmp_path):
    for found in ranks(2)(run_with_options, str(tmp_path), list(WITHOUT_EFFECT)):
        assert found == {name: remarks for name, (_, _, remarks) in WITHOUT_EFFECT.items()}


def recompute_with_options(granularity: str) -> list[str]:
    options = {"keep": "aten.mm", "granularity": granularity}
    with ovpatch.applied("recompute", options={"recompute": options}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        recompute(model, granularity, keep="aten.mm", blocks="0,1")
        recompute(model, "none", blocks="0,1")
        return [text for text in ovpatch.report()["recompute"].remarks if "no effect" in text]


def test_operators_to_keep_without_selective_are_a_remark(ranks):
    remark = "keep=aten.mm has no effect: granularity=full keeps no outputs"
    assert ranks(1)(recompute_with_options, "full") == [[remark]]
    assert ranks(1)(recompute_with_options, "selective") == [[]]


# An option whose values differ by rank, and what the report calls the first use.
DIFFERENT: dict[str, tuple[str, tuple[Any, Any], Callable[[], None], str]] = {
    "ddp": (
        "overlap_grad_reduce",
        (True, False),
        wrap_model,
        "wrapping Linear in DistributedDataParallel",
    ),
    "megatron": ("chunks", (2, 3), train_megatron, "the first column-parallel linear"),
    "pipeline": ("schedule", ("1f1b", "zb-h1"), run_pipeline, "preparing Schedule1F1B"),
    "tp_linear": ("chunks", (2, 3), cut_linear, "sharding a linear by ColwiseParallel"),
}


def differ(feature: str) -> tuple[str, list[str]]:
    name, values, first_use, _ = DIFFERENT[feature]
    with ovpatch.applied(feature, options={feature: {name: values[dist.get_rank()]}}):
        with pytest.raises(RuntimeError) as error:
            first_use()
        return type(error.value).__name__ + ": " + str(error.value), list(
            ovpatch.report()[feature].remarks
        )


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(name, marks=[needs("megatron")] if name == "megatron" else [])
        for name in DIFFERENT
    ],
)
def test_the_report_shows_that_ranks_differ(ranks, feature):
    name, _, _, action = DIFFERENT[feature]
    for error, remarks in ranks(2)(differ, feature):
        assert name in error
        assert f"{action} failed with {error.splitlines()[0]}" in remarks


def fail_to_wrap(options: dict[str, Any], kind: str) -> list[str]:
    """Return the remarks after a model could not be wrapped, in a process in which no model was."""
    import torch.distributed.fsdp  # noqa: F401  # whose users may have no model in DistributedDataParallel

    from ovpatch_plugins.ddp import ddp_report as report

    with (
        mock.patch.object(report, "COUNTERS", report.Counters()),
        ovpatch.applied("ddp", options={"ddp": options}),
    ):
        before = list(ovpatch.report()["ddp"].remarks)
        assert any("no model" in text for text in before), before
        with pytest.raises((ValueError, RuntimeError)):
            DistributedDataParallel({"Linear": nn.Linear(4, 4), "ReLU": nn.ReLU()}[kind])
        return list(ovpatch.report()["ddp"].remarks)


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"max_ctas": 4}, "Linear", "OptionError: ovpatch: option max_ctas=4"),
        ({}, "ReLU", "RuntimeError: DistributedDataParallel is not needed"),
    ],
    ids=["of an option", "of torch"],
)
def test_the_report_does_not_say_that_no_model_was_wrapped(ranks, options, kind, error):
    for remarks in ranks(2)(fail_to_wrap, options, kind):
        start = f"wrapping {kind} in DistributedDataParallel failed with {error}"
        assert any(text.startswith(start) for text in remarks), remarks
        assert not any("no model" in text for text in remarks), remarks

"""A GPT with sequence parallelism computes the results of Megatron, in every schedule."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ovpatch
from ovpatch.insight.equality import Verdict
from ovpatch_plugins.megatron import linears, megatron_report
from ovpatch_plugins.megatron.weight_grads import WeightGradQueue
from tests.plugins.megatron import models
from tests.plugins.megatron.models import RECOMPUTED, train_gpt
from tests.scripts.arms import needs
from tests.support.equality import compare
from tests.support.rarely import ALL_CASES

pytestmark = needs("megatron")

# The linears of two layers, and the output layer.
LINEARS = 2 * 4 + 1
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "gated, without biases": {"config": {"gated_linear_unit": True, "add_bias_linear": False}},
    "recomputed": {"config": RECOMPUTED},
    "bf16": {"dtype": torch.bfloat16, "config": {"bf16": True}},
    "frozen": {"prepare": "freeze_linears"},
    "fused": {"prepare": "fuse_gradients"},
    "fused, bf16": {"prepare": "fuse_gradients", "dtype": torch.bfloat16, "config": {"bf16": True}},
}
# Other orders of sums round differently. In float64, the difference is far smaller than that of a wrong term.
WIDE: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.float64},
    "frozen": {"dtype": torch.float64, "prepare": "freeze_linears"},
}


def run(cases: Mapping[str, Any], options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of Megatron and, for each of the options, the patched results and the counters."""
    with models.parallel(tp=dist.get_world_size()):
        return run_on_the_same_groups(cases, options)


def run_on_the_same_groups(
    cases: Mapping[str, Any], options: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    from ovpatch_plugins.megatron.megatron_report import COUNTERS

    found: dict[str, Any] = {}
    for name, case in cases.items():
        kernels = models.Kernels.calls
        found[name] = {
            "stock": train_gpt(**case),
            "patched": [],
            "kernels": models.Kernels.calls - kernels,
        }
    for option in options:
        with ovpatch.applied("megatron", options={"megatron": option}):
            for name, case in cases.items():
                before, kernels = COUNTERS.as_dict(), models.Kernels.calls
                patched = train_gpt(**case)
                counters = {key: value - before[key] for key, value in COUNTERS.as_dict().items()}
                found[name]["patched"].append((patched, counters, models.Kernels.calls - kernels))
    return found


@pytest.mark.parametrize(
    ("option", "names"),
    # The tensors kept for backward depend on trained parameters, on recomputation and on the owner of the GEMM.
    [
        ({}, list(CASES)),
        (
            {"regather": False},
            list(CASES) if ALL_CASES else ["recomputed", "frozen", "fused, bf16"],
        ),
    ],
    ids=["by default", "regather=False"],
)
def test_with_megatrons_order_of_sums_all_bits_are_the_bits_of_megatron(ranks, option, names):
    for found in ranks(2)(run, {name: CASES[name] for name in names}, [option]):
        for name, runs in found.items():
            recomputed = 2 * 2 * 4 if name == "recomputed" else 0
            ((patched, counters, kernels),) = runs["patched"]
            rows = compare(runs["stock"], patched).rows
            assert [row.name for row in rows if row.verdict is not Verdict.BITWISE] == [], name
            assert (counters["calls"], counters["stock_calls"]) == (2 * LINEARS + recomputed, 0), (
                name
            )
            assert kernels == runs["kernels"] == (2 * LINEARS if "fused" in name else 0), name


@pytest.mark.parametrize(
    ("world", "schedules"),
    [(2, ("ring", "chunk")), (4, ("stock", "bulk", "ring", "chunk") if ALL_CASES else ("ring",))],
)
def test_with_another_order_of_sums_only_rounding_differs(ranks, world, schedules):
    options = [{"schedule": schedule, "chunks": 2} for schedule in schedules]
    cases = WIDE if world == 2 else {"plain": WIDE["plain"]}
    for found in ranks(world)(run, cases, options):
        for name, runs in found.items():
            for patched, counters, _ in runs["patched"]:
                compare(runs["stock"], patched, floor=1e-12).assert_equal()
                assert counters["calls"] == 2 * LINEARS, name


def left_to_megatron() -> tuple[dict[str, Any], list[str]]:
    from megatron.core.tensor_parallel import layers

    from ovpatch_plugins.megatron.megatron_report import COUNTERS

    with ovpatch.applied("megatron"):
        # The replacement below comes after a first use.
        train_gpt(steps=1)
        stock, before = layers.reduce_scatter_to_sequence_parallel_region, COUNTERS.as_dict()
        layers.reduce_scatter_to_sequence_parallel_region = lambda *args, **kwargs: stock(
            *args, **kwargs
        )
        try:
            train_gpt()
        finally:
            layers.reduce_scatter_to_sequence_parallel_region = stock
        with models.parallel(tp=2):
            layers.linear_with_grad_accumulation_and_async_allreduce(
                torch.ones(2, 1, 4),
                torch.nn.Parameter(torch.ones(4, 4)),
                None,
                False,
                False,
                True,
                [],
            )
        remarks = list(ovpatch.report()["megatron"].remarks)
        return {key: value - before[key] for key, value in COUNTERS.as_dict().items()}, remarks


def wrapped_before_apply(managed: bool) -> tuple[list[str], dict[str, int], list[str]]:
    from megatron.core.tensor_parallel import layers

    from ovpatch_plugins.megatron.megatron_report import COUNTERS

    names, called = (
        ["linear_with_grad_accumulation_and_async_allreduce", "RowParallelLinear.forward"],
        [],
    )

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            called.append(original.__name__)
            return original(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        if managed:
            pm = ovpatch.PatchManager()
            for name in names:
                pm.register_patch(f"{layers.__name__}.{name}", wrap=wrap)
            pm.apply()
            stack.callback(pm.revert)
        else:
            for owner, name in ((layers, names[0]), (layers.RowParallelLinear, "forward")):
                stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        with ovpatch.applied("megatron"):
            before = COUNTERS.as_dict()
            train_gpt(steps=1)
            remarks = list(ovpatch.report()["megatron"].remarks)
            return (
                called,
                {key: value - before[key] for key, value in COUNTERS.as_dict().items()},
                remarks,
            )


@pytest.mark.parametrize("managed", [True, False], ids=["by a patch manager", "by hand"])
def test_wrappers_of_another_library_are_called_and_reported(ranks, managed):
    for called, counters, remarks in ranks(2)(wrapped_before_apply, managed):
        assert Counter(called) == {
            "linear_with_grad_accumulation_and_async_allreduce": LINEARS,
            "forward": 2 * 2,
        }
        assert (counters["calls"], counters["stock_calls"]) == (0, LINEARS)
        for kind in ("column", "row"):
            assert any(
                f"a {kind}-parallel linear" in text and "another library has replaced" in text
                for text in remarks
            )


def test_replacements_of_another_library_are_left_to_it_and_reported(ranks):
    for counters, remarks in ranks(2)(left_to_megatron):
        # The row-parallel linears.
        rows = 2 * 2
        assert counters["calls"] == 2 * (LINEARS - rows)
        assert counters["stock_calls"] == 2 * rows + 1
        text = " ".join(remarks)
        assert (
            "a row-parallel linear: another library has replaced "
            "reduce_scatter_to_sequence_parallel_region" in text
        )
        assert "a column-parallel linear: an operator does not support grad_output_buffer" in text


def column_0_17(
    input: Any,
    weight: Any,
    bias: Any,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: Any = None,
    wgrad_deferral_limit: Any = 0,
    tp_group: Any = None,
) -> Any:
    """Return the group; Megatron-Core 0.17 has this signature, without a parameter of earlier versions."""
    return tp_group


OPTIONS = {"schedule": "bulk", "chunks": 4, "regather": True, "min_linear_gflop": 1.0}


def called_as_in_0_17() -> list[bool]:
    with mock.patch.object(linears, "find_wrapped", return_value=""):
        linear, group = linears.LinearPatches(OPTIONS).wrap_column(column_0_17), dist.group.WORLD
    with models.parallel(tp=2):
        x, weight = torch.randn(2, 1, 4), torch.nn.Parameter(torch.randn(3, 4))
        found = linear(x, weight, None, False, False, True, None, 0, group)
        gathered = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(gathered, x)
        plain = linear(x, weight, None, False, False, False, tp_group=group)
        deferred = linear(x, weight, None, False, False, True, [])
        return [
            torch.equal(found, torch.cat(gathered) @ weight.t()),
            plain is group,
            deferred is None,
        ]


def test_functions_of_other_versions_are_called_with_their_own_signature(ranks):
    assert ranks(2)(called_as_in_0_17) == [[True, True, True]] * 2


def with_a_schedule_of_each_rank() -> str:
    schedule = ("bulk", "ring")[dist.get_rank()]
    with (
        ovpatch.applied("megatron", options={"megatron": {"schedule": schedule}}),
        pytest.raises(RuntimeError) as caught,
    ):
        train_gpt(steps=1)
    return str(caught.value)


def test_ranks_that_differ_are_named(ranks):
    for text in ranks(2)(with_a_schedule_of_each_rank):
        assert (
            'ranks disagree on \'megatron\': schedule is "bulk" on rank 0 but "ring" on rank 1'
            in text
        )
        assert "OVPATCH_MEGATRON_LINEARS=0" in text


@pytest.mark.parametrize(
    ("rows", "connections", "schedule", "reason"),
    [
        (4, None, "bulk", "its GEMM is smaller than min_linear_gflop"),
        (4, None, "ring", "its GEMM is smaller than min_linear_gflop"),
        (
            1 << 28,
            "1",
            "bulk",
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 Megatron overlaps the collectives of schedule bulk itself",
        ),
        (1 << 28, "1", "ring", ""),
        (1 << 28, "8", "bulk", ""),
    ],
)
def test_on_a_gpu_linears_without_a_gain_are_left_to_megatron(
    monkeypatch, rows, connections, schedule, reason
):
    monkeypatch.setattr(megatron_report, "_FALLBACKS", {})
    monkeypatch.setattr(linears, "check_consistent_once", lambda *_, **__: None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    x = mock.Mock(is_cuda=True, dtype=torch.float32, shape=(rows, 4), device=torch.device("cpu"))
    x.numel.return_value = 4 * rows
    group, weight = mock.Mock(), torch.nn.Parameter(torch.zeros(3, 4))
    group.size.return_value = 2
    patches = linears.LinearPatches(OPTIONS | {"schedule": schedule})
    for kind in ("column", "row"):
        megatron_report._FALLBACKS.clear()
        entering = patches._enter(x, weight, False, group, kind, "")
        assert (entering is None) == bool(reason)
        assert megatron_report.list_fallbacks() == (
            [f"a {kind}-parallel linear: {reason}"] if reason else []
        )


def test_linears_with_delayed_weight_gradients_are_patched_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(linears, "check_consistent_once", lambda *_, **__: None)
    x, group, queue = (
        mock.Mock(is_cuda=True, dtype=torch.float32, shape=(4, 4)),
        mock.Mock(),
        WeightGradQueue(),
    )
    x.device, x.numel.return_value, group.size.return_value = torch.device("cpu"), 16, 2
    patches, weight = linears.LinearPatches(OPTIONS, queue), torch.nn.Parameter(torch.zeros(3, 4))
    assert patches._enter(x, weight, False, group, "row", "") is None
    with queue.running():
        assert patches._enter(x, weight, False, group, "row", "") is not None


def with_connections_of_each_rank() -> str:
    x = mock.Mock(is_cuda=True, dtype=torch.float32, shape=(4, 4), device=torch.device("cpu"))
    x.numel.return_value = 16
    patches = linears.LinearPatches(OPTIONS)
    connections = mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS=str(1 + dist.get_rank()))
    with connections, pytest.raises(RuntimeError) as caught:
        patches._enter(x, torch.nn.Parameter(torch.zeros(3, 4)), False, dist.group.WORLD, "row", "")
    return str(caught.value)


def test_ranks_on_gpus_that_disagree_on_the_fallback_are_named(ranks):
    for text in ranks(2)(with_connections_of_each_rank):
        assert 'CUDA_DEVICE_MAX_CONNECTIONS is "1" on rank 0 but "2" on rank 1' in text

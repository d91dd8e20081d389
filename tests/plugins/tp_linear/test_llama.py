"""A model with attention and gated feed-forwards in torchtitan's plan trains in stock PyTorch and patched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.plugins.ddp.checks import check_all
from tests.plugins.tp_linear.arms import SCHEDULES, Record, all_both, both, copy_full, device, mesh
from tests.plugins.tp_linear.models import Llama, parallel_llama
from tests.plugins.tp_linear.training import equal, trained
from tests.support.rarely import ALL_CASES, RARELY

WORDS = 48
Wrapping = Callable[[nn.Module], None]


def tokens(step: int, batch: int, length: int) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(step)).to(
        device()
    )


def llama(
    *,
    shape: tuple[int, int] = (2, 12),
    dtype: torch.dtype = torch.float64,
    tp: bool = True,
    steps: int = 2,
    layers: int = 1,
    losses_cut: bool = False,
    local: bool = False,
    bias: bool = True,
    checkpointing: str = "",
    frozen: str = "",
    autocast: bool = False,
    micro: int = 1,
    gathered: bool = False,
) -> list[Record]:
    """Train a small model."""
    model = Llama(layers=layers, words=WORDS, bias=bias).to(device(), dtype)
    if tp:
        parallel_llama(model, mesh(), loss_parallel=losses_cut, local=local)
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    wrap_checkpoints(model, checkpointing)

    def run(step: int) -> tuple[Tensor, dict[str, Any]]:
        total = torch.zeros((), dtype=dtype, device=device())
        for part in range(micro):
            given = tokens(10 * step + part, *shape)
            with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
                logits = model(given)
            with loss_parallel() if losses_cut else contextlib.nullcontext():
                loss = (
                    nn.functional.cross_entropy(logits.flatten(0, 1), given.roll(-1, 1).flatten())
                    / micro
                )
                loss.backward()
            total += copy_full(loss)
        return total, {}

    return trained(model, run, steps, backward=False, gathered=gathered)


def wrap_checkpoints(model: Llama, kind: str) -> None:
    """Have layers recompute in the backward."""
    policies = {
        "GEMMs kept": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
        "collectives kept": [
            torch.ops._c10d_functional.all_gather_into_tensor.default,
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
        ],
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if op in policies[kind]
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    for layer in model.layers if kind else ():
        options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
        if kind in policies:
            options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
        forward = layer.forward
        layer.forward = lambda x, forward=forward, options=options: checkpoint(
            forward, x, **options
        )


CASES = {
    "loss parallel": {"losses_cut": True},
    "one sample": {"shape": (1, 12)},
    "no biases": {"bias": False},
    "weights frozen": {"frozen": "weight"},
    "attention frozen": {"frozen": "attention"},
    "microbatches": {"micro": 3},
    **{
        kind: {"checkpointing": kind}
        for kind in ("reentrant", "not reentrant", "GEMMs kept", "collectives kept")
    },
}


def linears(result: Record, steps: int = 2, layers: int = 1, local: bool = False) -> None:
    """Assert that the feature ran every linear of every forward, and linears of shared gathers with the gather."""
    counted = result["counters"]
    assert counted["linears"] == 7 * layers + 1
    assert counted["stock_calls"] == counted["unused"] == 0
    assert counted["calls"] == (7 * layers + 1) * steps
    assert counted["gathers"] == (0 if local else 2 * layers)
    assert counted["shared_calls"] == (0 if local else 5 * layers * steps)


@pytest.mark.parametrize(
    ("world", "local", "schedule"),
    [
        *((2, False, name) for name in SCHEDULES),
        (4, True, "ring"),
        pytest.param(4, True, "chunk", marks=RARELY),
    ],
)
def test_all_schedules(ranks, world, local, schedule):
    for result in ranks(world)(both, llama, local=local, options={"schedule": schedule}):
        equal(result["stock"], result["patched"])
        linears(result, local=local)


def check(results: list[Record]) -> None:
    for result in results:
        equal(result["stock"], result["patched"])


@pytest.mark.parametrize(
    "schedule", ["bulk", "chunk", *(pytest.param(name, marks=RARELY) for name in ("stock", "ring"))]
)
def test_inputs_gathered_again(ranks, schedule):
    more = (
        ("not reentrant", "attention frozen", "microbatches")
        if schedule != "bulk" or ALL_CASES
        else ()
    )
    cases = {"": {}, **{name: CASES[name] for name in more}}
    options = {"schedule": schedule, "regather": True}
    results = ranks(2)(all_both, llama, cases, options=options, timeout=120)
    check_all(results, check=check)
    for result in results:
        stock_calls = [case_result["counters"]["stock_calls"] for case_result in result.values()]
        assert stock_calls == [0] * len(cases)


@pytest.mark.parametrize("local", [False, True])
def test_torch_runs_shared_gathers_if_the_option_is_off(ranks, local):
    for result in ranks(2)(both, llama, local=local, options={"shared_gather": False}):
        equal(result["stock"], result["patched"])
        assert result["counters"]["calls"] == 8 * 2
        assert result["counters"]["shared_calls"] == result["counters"]["stock_calls"] == 0


def test_steps_against_one_process(ranks):
    alone = ranks(2)(llama, tp=False, steps=5, layers=2)
    for single, result in zip(
        alone, ranks(2)(both, llama, steps=5, layers=2, gathered=True), strict=True
    ):
        equal(result["stock"], result["patched"])
        equal(single, result["patched"], ("loss", "norm", "grad", "param"), 1e-9)
        linears(result, 5, 2)


@pytest.mark.parametrize("schedule", ["bulk", "chunk"])
def test_cases(ranks, schedule):
    cases = (
        CASES
        if schedule == "bulk"
        else {name: CASES[name] for name in ("reentrant", "not reentrant")}
    )
    results = ranks(2)(all_both, llama, cases, options={"schedule": schedule}, timeout=120)
    check_all(results, check=check)
    for result in results:
        for name, case in cases.items():
            if "checkpointing" not in case:
                linears(result[name], 2 * case.get("micro", 1))
            elif "reentrant" in name:
                assert result[name]["counters"]["calls"] > 8 * 2, "layers are recomputed"
                assert result[name]["counters"]["stock_calls"] == 0


def test_torch_runs_features_that_do_not_divide(ranks):
    for result in ranks(3)(both, uneven):
        equal(result["stock"], result["patched"])
        assert result["counters"]["stock_calls"] > 0


def uneven() -> list[Record]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from tests.plugins.tp_linear.models import MLP

    model = MLP(hidden=49).double()
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh(), plan)

    def run(step: int) -> tuple[Tensor, dict[str, Any]]:
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return model(x).square().sum(), {}

    return trained(model, run, 2)


def test_autocast_rounds_no_worse_than_stock_pytorch(ranks):
    exact = ranks(2)(llama, dtype=torch.float64, steps=1, gathered=True)
    results = ranks(2)(both, llama, dtype=torch.float32, steps=1, autocast=True, gathered=True)
    for single, result in zip(exact, results, strict=True):
        linears(result, 1)
        grads = {arm: result[arm][0]["grad"] for arm in ("stock", "patched")}
        error = {
            arm: sum(
                float((found[name].double() - single[0]["grad"][name]).square().sum())
                for name in found
            )
            for arm, found in grads.items()
        }
        assert 0 < error["patched"] <= 1.1**2 * error["stock"]


def test_single_precision_by_the_shared_rule(ranks):
    from tests.support.equality import compare

    alone = ranks(2)(llama, dtype=torch.float32, tp=False)
    for single, result in zip(
        alone, ranks(2)(both, llama, dtype=torch.float32, gathered=True), strict=True
    ):
        keep = ("loss", "norm", "grad")
        stock, ours, reordered = (
            [{name: step[name] for name in keep} for step in run[:-1]]
            for run in (result["stock"], result["patched"], single)
        )
        compare(stock, ours, reordered=reordered).assert_equal()

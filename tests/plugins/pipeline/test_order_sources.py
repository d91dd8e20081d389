"""Orders from every source run unchanged: gradients are reduced and scaled at the REDUCE_GRAD of the order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.cases import Case, counters, differences, feature_report, train
from tests.plugins.pipeline.order_sources import SOURCES, STOCK_SOURCES

STEPS = 2
LOOP = Case("ScheduleInterleaved1F1B", microbatches=4, chunks=2, steps=STEPS)
DIVIDED = dataclasses.replace(LOOP, schedule="ScheduleInterleavedZeroBubble")


def _reduce_by_script(schedule: Any) -> None:
    for stage in list_stages(schedule):
        stage.perform_reduce_grad(3)


def _list_cases() -> dict[str, Case]:
    """Return a case for each source of an order, with stages that torch reduces and stages that it does not reduce."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": lambda module: DistributedDataParallel(module, process_group=mesh.get_group()),
        "fsdp": lambda module: fully_shard(module, mesh=mesh),
    }
    cases = {source: dataclasses.replace(LOOP, source=source) for source in SOURCES}
    for source in ("built", "without REDUCE_GRAD"):
        cases[f"{source}, divided backwards"] = dataclasses.replace(DIVIDED, source=source)
        cases[f"{source}, unscaled"] = dataclasses.replace(
            LOOP, source=source, options={"scale_grads": False}
        )
    for source in ("without REDUCE_GRAD", "REDUCE_GRAD at the end"):
        for name, wrap in wraps.items():
            case = dataclasses.replace(LOOP, source=source, wrap=wrap)
            # Gradients that FSDP2 has not reduced show only in the result of the script's own reduction.
            after_step = _reduce_by_script if name == "fsdp" else case.after_step
            cases[f"{source}, {name}"] = dataclasses.replace(
                case, microbatches=8, after_step=after_step
            )
    return cases


def _compare(cases: dict[str, Case]) -> dict[str, tuple[list[str], int]]:
    """Return the differences of each case from stock PyTorch, and the number of steps that the engine ran."""
    found = {}
    stock = {name: train(case) for name, case in cases.items()}
    with ovpatch.applied("pipeline"):
        for name, case in cases.items():
            before = counters()["steps"]
            changes = differences(stock[name], train(case))
            found[name] = changes, counters()["steps"] - before
    return found


def _compare_sources() -> dict[str, tuple[list[str], int]]:
    return _compare(_list_cases())


def test_an_order_of_any_source_has_the_bits_of_torch(ranks: Any) -> None:
    for rank, found in enumerate(ranks(2)(_compare_sources)):
        assert not {name: changes[:2] for name, (changes, _) in found.items() if changes}, (
            f"rank {rank}"
        )
        # Torch itself computes the first step of stages in DistributedDataParallel.
        run = {
            name: steps
            for name, (_, steps) in found.items()
            if steps != STEPS - name.endswith("ddp")
        }
        assert not run, f"rank {rank}"


def _leave_to_stock(source: str) -> tuple[list[str], int, list[str]]:
    stock = train(dataclasses.replace(DIVIDED, source=source))
    with ovpatch.applied("pipeline"):
        before = counters()["steps"]
        changes = differences(stock, train(dataclasses.replace(DIVIDED, source=source)))
        return changes, counters()["steps"] - before, list(feature_report().remarks)


@pytest.mark.parametrize("source", STOCK_SOURCES)
def test_an_order_that_reduces_in_between_is_left_to_torch(ranks: Any, source: str) -> None:
    for changes, steps, remarks in ranks(2)(_leave_to_stock, source):
        assert not changes
        assert not steps
        assert any("REDUCE_GRAD" in remark for remark in remarks), remarks


def _train_with_gradients_kept() -> list[Any]:
    """Return the norm of gradients of an order without REDUCE_GRAD, relative to that of the order of the class."""
    found = []
    for source in ("built", "without REDUCE_GRAD"):
        grads = train(dataclasses.replace(LOOP, source=source, steps=1))[2]
        found.append(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    return [round(float(found[1] / found[0]), 4)]


def test_the_table_has_orders_whose_gradients_differ(ranks: Any) -> None:
    """Without REDUCE_GRAD, torch sums gradients over microbatches and takes no mean."""
    assert ranks(2)(_train_with_gradients_kept) == [[4.0], [4.0]]

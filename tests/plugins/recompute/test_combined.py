"""With data, tensor and pipeline parallelism, results keep their bits, and recomputations start before waits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.comm.backward_waits import BACKWARD_WAITS
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch_plugins.pipeline.runtime.engine import Engine
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from tests.plugins.pipeline.cases import Case, train
from tests.plugins.pipeline.models import Block, Part
from tests.plugins.recompute import models
from tests.plugins.recompute.models import Decoder, count_differences, data
from tests.plugins.tp_linear import models as tp_models
from tests.plugins.tp_linear import test_llama
from tests.support.rarely import RARELY

SHARDED: dict[str, Any] = {"dist_optimizer": {"min_param_numel": 1}}


@contextlib.contextmanager
def _counted(found: dict[str, int]) -> Iterator[None]:
    before = COUNTERS.as_dict()
    yield
    found.update({name: value - before[name] for name, value in COUNTERS.as_dict().items()})


# --- data parallelism ---


def _copy_full(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def _train(wrap: str, kind: str = "", micro: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model: Any = Decoder(functools.partial(models.Block, kind, 0.2))
    if wrap == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + dist.get_rank())
    found = []
    for step in range(3):
        for part in range(micro):
            is_last = part + 1 == micro
            with contextlib.nullcontext() if is_last or wrap == "fsdp" else model.no_sync():
                loss = model(data(100 * dist.get_rank() + 10 * step + part)).square().mean()
                loss.backward()
        found += [loss.detach(), *(_copy_full(param.grad) for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found + [_copy_full(param) for param in model.parameters()]


def _compare_replicas(granularity: str) -> dict[str, tuple[int, dict[str, int]]]:
    found = {}
    for name, wrap, features in (
        ("ddp", "ddp", ("ddp",)),
        ("dist_optimizer", "ddp", ("ddp", "dist_optimizer")),
        ("stock ddp", "ddp", ()),
        ("fsdp", "fsdp", ()),
    ):
        with ovpatch.applied(*features, options=SHARDED) if features else contextlib.nullcontext():
            stock = _train(wrap)
        counts: dict[str, int] = {}
        options = {**SHARDED, "recompute": {"granularity": granularity}}
        with ovpatch.applied("recompute", *features, options=options), _counted(counts):
            patched = _train(wrap)
            for feature in ovpatch.report().features:
                if feature.name == "dist_optimizer" and feature.name in features:
                    counts["sharded steps"] = feature.counters["steps"]
        found[name] = count_differences(stock, patched), counts
    return found


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_replicas(ranks: Any, granularity: str) -> None:
    for found in ranks(2)(_compare_replicas, granularity):
        for name, (changed, counts) in found.items():
            assert not changed, f"{name}: {changed} tensors differ"
            assert counts["recomputations"] == counts["calls"] == 3 * 3 * 2, name
        assert found["dist_optimizer"][1]["sharded steps"] >= 3


# --- tensor parallelism ---


def _train_llama(
    schedule: str, granularity: str, layers: int
) -> tuple[list[Any], list[Any], dict[str, int], dict[str, int]]:
    options: dict[str, Any] = {
        "tp_linear": {"schedule": schedule},
        "recompute": {"granularity": granularity},
    }
    with ovpatch.applied("tp_linear", options=options):
        torch.manual_seed(0)
        stock = test_llama.llama(layers=layers)
    counts: dict[str, int] = {}
    with ovpatch.applied("tp_linear", "recompute", options=options), _counted(counts):
        torch.manual_seed(0)
        before = _tp_counters()
        patched = test_llama.llama(layers=layers)
        linears = {name: value - before[name] for name, value in _tp_counters().items()}
    return _flat(stock), _flat(patched), counts, linears


def _tp_counters() -> dict[str, int]:
    from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS as counters

    return counters.as_dict()


def _flat(records: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [
        tensor
        for record in records
        for key in record
        for tensor in (record[key].values() if isinstance(record[key], dict) else [record[key]])
        if isinstance(tensor, torch.Tensor)
    ]


def _compare_llamas(
    cases: list[tuple[str, str, int]],
) -> dict[tuple[str, str, int], tuple[int, dict[str, int], dict[str, int]]]:
    found = {}
    for case in cases:
        stock, patched, counts, linears = _train_llama(*case)
        assert len(stock) > 50
        found[case] = count_differences(stock, patched), counts, linears
    return found


# A schedule, a granularity, and the number of layers. With three layers, blocks are recomputed early sequentially.
LLAMAS = [
    ("bulk", "full", 3),
    ("bulk", "selective", 2),
    ("ring", "full", 2),
    ("stock", "selective", 2),
]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_tensor_parallelism(ranks: Any, world: int) -> None:
    for found in ranks(world)(_compare_llamas, LLAMAS if world == 2 else LLAMAS[:1]):
        for case, (changed, counts, linears) in found.items():
            assert not changed, f"{case}: {changed} tensors differ"
            layers = case[-1]
            assert counts["recomputations"] == counts["calls"] == layers * 2, case
            # In each step, blocks whose gradient the backward waits for are recomputed early, all but the last one.
            assert counts["launched_ahead"] == (0 if case[0] == "stock" else (layers - 1) * 2), case
            assert linears["stock_calls"] == 0, case
            assert linears["calls"] > 7 * layers * 2, case


def _order_of_a_backward() -> list[str]:
    """Return the gathers of gradients and the recomputations of one backward, in order."""
    events: list[str] = []
    gather, block = TPGroup.all_gather, tp_models.Block.forward

    def all_gather(self: Any, rows: torch.Tensor) -> Any:
        events.append("gather")
        return gather(self, rows)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        events.append("block")
        return block(self, x)

    with (
        mock.patch.object(tp_models.Block, "forward", forward),
        mock.patch.object(TPGroup, "all_gather", all_gather),
        ovpatch.applied("tp_linear", "recompute", options={"recompute": {"ahead": 0}}),
    ):
        model = tp_models.Llama(layers=2)
        tp_models.parallel_llama(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model.norm(_run_blocks(model)).to_local().sum()
        events.clear()
        loss.backward()
    return events


def _run_blocks(model: tp_models.Llama) -> Any:
    x = model.words(torch.arange(12).view(1, 12))
    for layer in model.layers:
        x = layer(x)
    return x


def test_a_block_is_recomputed_during_the_gather_of_its_gradient(ranks: Any) -> None:
    for events in ranks(2)(_order_of_a_backward):
        assert events[:2] == ["gather", "block"]
        assert events.count("block") == 2


# --- pipelines ---


def _blocks(dropout: float = 0.2) -> Any:
    return lambda _index: Part(Block(dropout), Block(dropout))


PIPELINES = {
    "Schedule1F1B": (Case(part=_blocks()), 0),
    "ScheduleGPipe": (Case("ScheduleGPipe", part=_blocks()), 0),
    "zb-h1": (Case(part=_blocks()), 0),
    "loop": (Case("ScheduleInterleaved1F1B", microbatches=8, chunks=2, part=_blocks()), 0),
    "two ahead": (Case(part=_blocks()), 2),
}


def _compare_pipelines(names: list[str]) -> dict[str, tuple[int, dict[str, int], int]]:
    found = {}
    for name in names:
        case, ahead = PIPELINES[name]
        order = name if name.startswith("zb") else "as-given"
        with ovpatch.applied("pipeline", options={"pipeline": {"schedule": order}}):
            stock = train(case)
        counts: dict[str, int] = {}
        options = {"pipeline": {"schedule": order}, "recompute": {"ahead": ahead or 1}}
        with ovpatch.applied("pipeline", "recompute", options=options), _counted(counts):
            patched = train(case)
        flat = [_list_tensors(result) for result in (stock, patched)]
        found[name] = count_differences(*flat), counts, len(flat[0])
    return found


def _list_tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [tensor for item in value for tensor in _list_tensors(item)]
        if isinstance(value, list)
        else [value]
    )


@pytest.mark.parametrize("world", [2, 3])
def test_pipelines(ranks: Any, world: int) -> None:
    names = list(PIPELINES) if world == 2 else ["Schedule1F1B"]
    for rank, found in enumerate(ranks(world)(_compare_pipelines, names)):
        for name, (changed, counts, tensors) in found.items():
            case, ahead = PIPELINES[name]
            assert not changed, f"{name}: {changed} tensors differ"
            assert tensors > 20
            backwards = case.steps * case.microbatches * case.chunks
            # A stage infers shapes by one more forward, and by a backward if it sends a gradient.
            for counter in ("recomputations", "calls"):
                assert 2 * backwards <= counts[counter] <= 2 * backwards + 2 * case.chunks, name
            # These stages receive the gradient of their output.
            stages = case.chunks - (rank == world - 1)
            assert (
                counts["launched_ahead"] == (ahead or 1) * case.steps * case.microbatches * stages
            ), name


def _order_of_a_step() -> list[str]:
    events: list[str] = []
    wait, block = Engine._wait_for, Block._compute

    def wait_for(self: Any, receive: Any) -> None:
        events.append(f"wait {receive.action.kind.name}")
        wait(self, receive)

    def compute(self: Any, x: torch.Tensor) -> torch.Tensor:
        events.append("block")
        return block(self, x)

    case = Case(part=_blocks(), microbatches=2, steps=1)
    with (
        mock.patch.object(Engine, "_wait_for", wait_for),
        mock.patch.object(Block, "_compute", compute),
        ovpatch.applied("pipeline", "recompute"),
    ):
        train(case)
    return events


def test_a_block_is_recomputed_before_the_gradient_has_come(ranks: Any) -> None:
    events = ranks(2)(_order_of_a_step)[0]
    waits = [index for index, event in enumerate(events) if event in ("wait B", "wait BW")]
    assert len(waits) == 2
    for index in waits:
        assert events[index - 1 : index + 2] == ["block", events[index], "block"]


def _in_three_dimensions() -> tuple[int, dict[str, int]]:
    """Train with pipeline and tensor parallelism, with ``tp_linear`` in both arms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    group = mesh["pp"].get_group()

    def wrap(module: nn.Module) -> nn.Module:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for block in module.blocks:  # type: ignore[union-attr]
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        return module

    case = Case(part=_blocks(0.0), wrap=wrap)
    with ovpatch.applied("pipeline", "tp_linear"):
        stock = train(case, group)
    counts: dict[str, int] = {}
    with ovpatch.applied("pipeline", "tp_linear", "recompute"), _counted(counts):
        patched = train(case, group)
    return count_differences(_list_tensors(stock), _list_tensors(patched)), counts


def test_tensor_parallel_stages(ranks: Any) -> None:
    for rank, (changed, counts) in enumerate(ranks(4)(_in_three_dimensions)):
        assert not changed
        assert counts["recomputations"] >= 2 * 2 * 6
        # Blocks are recomputed during the receive; the last stage has none.
        assert counts["launched_ahead"] == (2 * 6 if rank < 2 else 0)


def _waits_when_off() -> tuple[Any, Any]:
    with ovpatch.applied("recompute"):
        assert BACKWARD_WAITS.launch_inside is not None
    return BACKWARD_WAITS.launch_inside, BACKWARD_WAITS.launch_before


def test_waits_are_empty_when_the_feature_is_off(ranks: Any) -> None:
    assert ranks(1)(_waits_when_off) == [(None, None)]

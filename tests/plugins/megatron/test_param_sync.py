"""Reads of parameters between a step and the next forward are stale in stock Megatron, and right patched."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from tests.plugins.megatron.models import (
    Paths,
    distributed_optimizer,
    features,
    parallel,
    rows,
    wrapped,
)
from tests.scripts.arms import needs

pytestmark = needs("megatron")

READERS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "state_dict": lambda model: model.module.state_dict(),
    "functional read": lambda model: {
        name: linear(torch.eye(16), getattr(model.module, name).weight).t() for name in "abc"
    },
    "deepcopy": lambda model: {
        name: param.detach() for name, param in copy.deepcopy(model.module).named_parameters()
    },
    "saved": lambda model: _saved(model.module),
    "no hooks": lambda model: _without_hooks(model),
}


def _saved(module: torch.nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(list(module.parameters()), file)
    file.seek(0)
    return {
        name: param.detach()
        for name, param in zip("abc", torch.load(file, weights_only=False), strict=True)
    }


def _without_hooks(model: Any) -> dict[str, Tensor]:
    model.disable_forward_pre_hook(param_sync=False)
    try:
        return {name: getattr(model.module, name)(torch.eye(16)).t() for name in "abc"}
    finally:
        model.enable_forward_pre_hook()


def train(
    read: Callable[[Any], dict[str, Tensor]] | None, reader: int | None, steps: int = 3
) -> Any:
    """Return the values that all ranks, or one rank, read after each step, and the parameters at the end."""
    model = wrapped(
        Paths(("a", "b", "c")), use_distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = distributed_optimizer(model)
    found = []
    for step in range(steps):
        model.zero_grad_buffer()
        model(rows(step, dist.get_rank())).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        if read is not None and reader in (None, dist.get_rank()):
            found.append(
                {
                    name.partition(".")[0]: value.detach().clone()
                    for name, value in read(model).items()
                }
            )
    model.start_param_sync(force_sync=True)
    return found, {
        name[0]: param.detach().clone() for name, param in model.module.named_parameters()
    }


def reference(steps: int = 3) -> list[dict[str, Tensor]]:
    """Return the parameters after each step, without Megatron."""
    model = Paths(("a", "b", "c"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-8)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(rows(step, dist.get_rank())).square().mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        found.append({name[0]: param.detach().clone() for name, param in model.named_parameters()})
    return found


def error(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((values[name] - wanted[name]).abs().max()) for name in "abc")


def read_between(
    name: str, patched: bool, reader: int | None
) -> tuple[list[float], float, dict[str, int]]:
    from ovpatch_plugins.megatron.megatron_report import COUNTERS

    before = COUNTERS.as_dict()
    with parallel(), features(patched):
        found, last = train(READERS[name], reader)
        right = reference()
    counters = {name: value - before[name] for name, value in COUNTERS.as_dict().items()}
    return (
        [error(values, wanted) for values, wanted in zip(found, right, strict=False)],
        error(last, right[-1]),
        counters,
    )


def all_reads(names: list[str], patched: bool, reader: int | None) -> dict[str, Any]:
    with parallel():
        return {name: read_between(name, patched, reader) for name in names}


def test_reads_between_step_and_forward_are_stale_in_stock_megatron(ranks):
    for found in ranks(2)(all_reads, list(READERS), False, None):
        for name, (stale, last, _) in found.items():
            assert min(stale) > 1e-3, (
                f"{name} is right in stock Megatron by now: the feature's part has lost its reason"
            )
            assert last < 1e-6, name


@pytest.mark.parametrize("reader", [None, 1], ids=["all ranks", "one rank alone"])
def test_reads_between_step_and_forward_are_right_if_patched(ranks, reader):
    for rank, found in enumerate(ranks(2)(all_reads, list(READERS), True, reader)):
        for name, (errors, last, counters) in found.items():
            assert len(errors) == (3 if reader in (None, rank) else 0)
            assert max([*errors, last]) < 1e-6, name
            assert counters["gathers"] == 3 * 3, name
            assert bool(counters["reads"]) == bool(errors), name


def drop_a_model_with_pending_params() -> tuple[int, int]:
    from ovpatch.overlap.tensors.pending_param import PENDING

    with parallel(), features(True):
        model = wrapped(
            Paths(("a", "b", "c")), use_distributed_optimizer=True, overlap_param_gather=True
        )
        optimizer = distributed_optimizer(model)
        model.zero_grad_buffer()
        model(rows(0, dist.get_rank())).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        pending = len(PENDING)
        del model, optimizer
        gc.collect()
        return pending, len(PENDING)


def test_a_freed_model_leaves_no_parameter_pending(ranks):
    assert ranks(2)(drop_a_model_with_pending_params) == [(3, 0)] * 2


#: The tensor that a script keeps from before each step, and how many of the three weights are pending after the step.
KEPT = {"nothing": 3, "a graph": 2, "an alias": 0}


def train_with(kept: str, patched: bool) -> tuple[list[Tensor], list[int]]:
    """Return the values that are read of a weight after each step, and the number of weights pending then."""
    from ovpatch.overlap.tensors.pending_param import PENDING

    with parallel(), features(patched):
        module = Paths(("a", "b", "c")).bfloat16()
        model = wrapped(module, use_distributed_optimizer=True, overlap_param_gather=patched)
        optimizer = distributed_optimizer(model)
        values, pending = [], []
        for step in range(3):
            model.zero_grad_buffer()
            model(rows(step, dist.get_rank()).bfloat16()).square().mean().backward()
            model.finish_grad_sync()
            x = torch.zeros(16, 16, dtype=torch.bfloat16, requires_grad=True)
            graph = (x * module.b.weight).sum() if kept == "a graph" else None
            alias = module.b.weight.detach() if kept == "an alias" else module.b.weight
            optimizer.step()
            pending.append(len(PENDING))
            values.append(
                alias.detach().clone() if graph is None else torch.autograd.grad(graph, x)[0]
            )
        return values, pending


def all_kept(patched: bool) -> dict[str, Any]:
    with parallel():
        return {kept: train_with(kept, patched) for kept in KEPT}


def test_a_graph_or_an_alias_from_before_a_step_reads_new_values(ranks):
    # Without overlap_param_gather, Megatron's own step() gathers.
    for right, found in zip(ranks(2)(all_kept, False), ranks(2)(all_kept, True), strict=True):
        for kept, (values, pending) in found.items():
            assert all(map(torch.equal, values, right[kept][0])), kept
            assert pending == [KEPT[kept]] * 3, kept

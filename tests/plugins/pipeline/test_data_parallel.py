"""Pipelines of two ranks in two replicas, or with tensor parallelism, have the bits of stock PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.plugins.pipeline.cases import (
    Case,
    counters,
    differences,
    feature_report,
    make_schedule,
    train,
)
from tests.plugins.pipeline.models import ROWS, WIDTH, Block, Part, Variant
from tests.support.rarely import ALL_CASES, RARELY

# With so few microbatches, no backward comes before the last forward, and the stock reducer of DDP fails.
LOOP: dict[str, Any] = {"microbatches": 4, "chunks": 2}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Wrap = Callable[[nn.Module], nn.Module]


def _ddp(mesh: DeviceMesh, **options: Any) -> Wrap:
    return lambda module: DistributedDataParallel(module, process_group=mesh.get_group(), **options)


def _fsdp(mesh: DeviceMesh, **options: Any) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(module, mesh=mesh, **options)

    return wrap


def _fsdp_as_one(mesh: DeviceMesh) -> Wrap:
    """Wrap a module so that FSDP2 takes its parameters out of the modules again after each forward."""
    return lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=True)


def _replicate(mesh: DeviceMesh) -> Wrap:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return lambda module: replicate(module, mesh=mesh)  # type: ignore[arg-type]


def _tensor_parallel(mesh: DeviceMesh) -> Wrap:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def wrap(module: nn.Module) -> nn.Module:
        for block in module.blocks:  # type: ignore[union-attr]
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return module

    return wrap


def _checkpointed(_index: int) -> nn.Module:
    return Part(Block(0.0, False), Block(0.0, False))


# Name, its wrapper, arguments of the case, and other features that are on, in the stock run too.
SETTINGS: dict[str, tuple[Callable[..., Wrap], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "ddp": (_ddp, {}, {}, ()),
    "ddp, gradients in buckets": (_ddp, {"gradient_as_bucket_view": True}, {"pieces": 2}, ()),
    "ddp, unused parameters": (_ddp, {"find_unused_parameters": True}, {}, ()),
    "ddp, loop": (_ddp, {}, {"schedule": "ScheduleInterleaved1F1B", **LOOP, "microbatches": 8}, ()),
    "our ddp": (_ddp, {}, {"pieces": 2}, ("ddp",)),
    "our ddp, dist_optimizer": (_ddp, {}, {}, ("ddp", "dist_optimizer")),
    "fsdp": (_fsdp, {}, {}, ()),
    "fsdp, bf16": (_fsdp, {"mp_policy": HALF}, {}, ()),
    "fsdp, bf16, checkpoint": (_fsdp, {"mp_policy": HALF}, {"part": _checkpointed}, ()),
    "fsdp, loop": (_fsdp, {"mp_policy": HALF}, {"schedule": "ScheduleInterleaved1F1B", **LOOP}, ()),
    "fsdp, read elsewhere": (
        _fsdp_as_one,
        {},
        {"part": lambda _index: Variant("read elsewhere")},
        (),
    ),
    "replicate": (_replicate, {}, {}, ()),
    "tensor parallel": (_tensor_parallel, {}, {}, ()),
    "tensor parallel, loop": (
        _tensor_parallel,
        {},
        {"schedule": "ScheduleInterleavedZeroBubble", **LOOP},
        (),
    ),
    "tp_linear": (_tensor_parallel, {}, {}, ("tp_linear",)),
}


def _compare(names: list[str]) -> dict[str, tuple[list[str], int, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, found = mesh["pp"].get_group(), {}
    for name in names:
        wrap, arguments, more, features = SETTINGS[name]
        case = Case(**{"wrap": wrap(mesh["dp"], **arguments), "microbatches": 4, **more})
        seed = 0 if wrap is _tensor_parallel else mesh.get_local_rank("dp")
        options: dict[str, Any] = (
            {"dist_optimizer": {"min_param_numel": 1}} if "dist_optimizer" in features else {}
        )
        if features:
            ovpatch.apply(*features, options=options)
        stock = train(case, group, seed)
        ovpatch.revert()
        ovpatch.apply("pipeline", *features, options={"pipeline": {"schedule": "zb-h1"}, **options})
        before = counters()
        patched = train(case, group, seed)
        after = counters()
        ovpatch.revert()
        changes = differences(stock, patched)
        found[name] = (
            changes,
            after["weight_grads"] - before["weight_grads"],
            after["steps"] - before["steps"],
        )
    return found


@pytest.mark.parametrize("part", range(3))
def test_as_stock(ranks: Any, part: int) -> None:
    # Other cases test bf16 with checkpoints, and in a loop.
    names = [name for name in SETTINGS if ALL_CASES or name != "fsdp, bf16"]
    for rank, found in enumerate(ranks(4)(_compare, names[part::3], timeout=120)):
        for name, (changes, deferred, steps) in found.items():
            assert not changes, f"rank {rank}, {name}: {changes[:4]}"
            # With DistributedDataParallel, torch computes the first step.
            assert steps >= 1, name
            assert (deferred == 0) == (name == "ddp, unused parameters"), name


def _zero_bubble(
    schedule: str, wrapper: str, features: tuple[str, ...]
) -> tuple[list[str], int, int]:
    """Compare the gradients of a first step with averages over replicas that are not wrapped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, seed = mesh["pp"].get_group(), mesh.get_local_rank("dp")
    case: dict[str, Any] = {"schedule": schedule, "vee": schedule in VEES, "steps": 1, **LOOP}
    wanted = train(Case(**case), group, seed)[2]
    for grad in wanted.values():
        dist.all_reduce(grad, group=mesh["dp"].get_group())
    ovpatch.apply(
        "pipeline",
        *features,
        options={"dist_optimizer": {"min_param_numel": 1}} if features[1:] else {},
    )
    before = counters()["steps"]
    wrap = _fsdp(mesh["dp"]) if wrapper == "fsdp" else _ddp(mesh["dp"])
    grads = train(Case(wrap=wrap, **case), group, seed)[2]
    found = {name.replace(".module.", "."): grad for name, grad in grads.items()}
    steps = counters()["steps"] - before
    wrong = []
    for name, grad in wanted.items():
        part = (grad / 2).chunk(2)[seed] if wrapper == "fsdp" else grad / 2
        if found[name] is None or not torch.allclose(found[name], part, atol=1e-6):
            wrong.append(name)
    return wrong, len(wanted), steps


VEES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
DIVIDING = [
    ("ScheduleZBVZeroBubble", "fsdp", ()),
    ("ScheduleInterleavedZeroBubble", "fsdp", ()),
] + [
    (schedule, "ddp", features)
    for schedule, features in [
        ("ScheduleZBVZeroBubble", ()),
        ("ScheduleInterleavedZeroBubble", ("ddp",)),
        ("ScheduleDualPipeV", ("ddp", "dist_optimizer")),
    ]
]


@pytest.mark.parametrize(("schedule", "wrapper", "features"), DIVIDING)
def test_zero_bubble_classes_whose_gradients_torch_loses(
    ranks: Any, schedule: str, wrapper: str, features: tuple[str, ...]
) -> None:
    for wrong, count, steps in ranks(4)(_zero_bubble, schedule, wrapper, features):
        assert not wrong
        assert count == 20
        assert steps == 1


def _zero_bubble_with_an_evaluation(features: tuple[str, ...]) -> tuple[list[str], list[float]]:
    """Compute the gradients of two steps; after the evaluation between them, torch 2.13 infers shapes once more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, seed = mesh["pp"].get_group(), mesh.get_local_rank("dp")
    seen: list[float] = []

    def run(wrap: Wrap) -> list[torch.Tensor]:
        case = Case("ScheduleInterleavedZeroBubble", wrap=wrap, **LOOP)
        schedule, parts = make_schedule(case, group)
        params = [param for part in parts for param in part.parameters()]
        for param in params:
            param.register_post_accumulate_grad_hook(
                lambda param: seen.append(float(param.grad.abs().max()))
            )
        generator = torch.Generator().manual_seed(seed)
        for step in range(2):
            x, y = torch.randn(2, 4 * ROWS, 2, WIDTH, generator=generator)
            is_last = mesh.get_local_rank("pp") == 1
            inputs = () if is_last else (x,)
            schedule.step(*inputs, target=y if is_last else None)
            if not step:
                schedule.eval(*inputs, target=y if is_last else None)
        return [param.grad for param in params if param.grad is not None]

    wanted = run(lambda module: module)
    for grad in wanted:
        dist.all_reduce(grad, group=mesh["dp"].get_group())
    seen.clear()
    ovpatch.apply("pipeline", *features)
    found = run(_ddp(mesh["dp"], gradient_as_bucket_view=True))
    assert len(wanted) == len(found) == 20
    return [
        str(i) for i in range(20) if not torch.allclose(found[i], wanted[i] / 2, atol=1e-6)
    ], seen


@pytest.mark.parametrize("features", [(), ("ddp",)])
def test_gradients_stay_if_shapes_are_inferred_again(ranks: Any, features: tuple[str, ...]) -> None:
    for wrong, seen in ranks(4)(_zero_bubble_with_an_evaluation, features):
        assert not wrong
        assert seen
        assert min(seen) > 0, "a hook of the script saw the zeros that complete a reduction"


def _run_with_a_search_for_unused_parameters() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ovpatch.apply("pipeline")
    wrap = _ddp(mesh["dp"], find_unused_parameters=True)
    case = Case("ScheduleZBVZeroBubble", vee=True, wrap=wrap, steps=1, microbatches=2, chunks=2)
    train(case, mesh["pp"].get_group())
    return list(feature_report().remarks)


def test_the_report_warns_of_zero_bubble_classes_whose_first_step_torch_runs(ranks: Any) -> None:
    for remarks in ranks(4)(_run_with_a_search_for_unused_parameters):
        assert any("so that replicas differ afterwards" in remark for remark in remarks)


def _only_a_part_is_wrapped() -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = mesh["pp"].get_group()

    def wrap(module: nn.Module) -> nn.Module:
        fully_shard(module.blocks[0], mesh=mesh["dp"])  # type: ignore[index,arg-type]
        return module

    stock = train(Case(wrap=wrap), group)
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    return differences(stock, train(Case(wrap=wrap), group)), list(feature_report().remarks)


def test_a_stage_whose_module_is_wrapped_in_part(ranks: Any) -> None:
    for changes, remarks in ranks(4)(_only_a_part_is_wrapped):
        assert not changes
        assert any("only a part of the stage's module is wrapped" in remark for remark in remarks)


def _three_dimensions() -> tuple[list[str], int]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    shard, cut = _fsdp(mesh["dp"]), _tensor_parallel(mesh["tp"])
    case = Case(wrap=lambda module: shard(cut(module)))
    group, seed = mesh["pp"].get_group(), mesh.get_local_rank("dp")
    stock = train(case, group, seed)
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    before = counters()["weight_grads"]
    changes = differences(stock, train(case, group, seed))
    return changes, counters()["weight_grads"] - before


# tests/examples/test_three_d.py compares parameters after each step, on as many ranks.
@RARELY
def test_three_dimensions(ranks: Any) -> None:
    for rank, (changes, deferred) in enumerate(ranks(8)(_three_dimensions, timeout=150)):
        assert not changes, f"rank {rank}: {changes[:4]}"
        assert deferred


def _wrap_some_stages(chunks: int, schedule: str) -> tuple[list[str], int, int]:
    """Train pipelines whose first rank wraps its stages in DistributedDataParallel and whose second rank does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, seed = mesh["pp"].get_group(), mesh.get_local_rank("dp")
    wrap = _ddp(mesh["dp"]) if mesh.get_local_rank("pp") == 0 else lambda module: module
    case = Case(schedule=schedule, wrap=wrap, chunks=chunks, microbatches=8, steps=3)
    stock = train(case, group, seed)
    ovpatch.apply("pipeline")
    before = counters()
    changes = differences(stock, train(case, group, seed))
    after = counters()
    ovpatch.revert()
    return changes, after["steps"] - before["steps"], after["stock_steps"] - before["stock_steps"]


@pytest.mark.parametrize(
    ("chunks", "schedule"), [(1, "Schedule1F1B"), (2, "ScheduleInterleaved1F1B")]
)
def test_replicas_of_some_stages_alone(ranks: Any, chunks: int, schedule: str) -> None:
    """All ranks of a pipeline leave the first step to torch, or none does. Otherwise their messages would not match."""
    for rank, (changes, steps, stock_steps) in enumerate(
        ranks(4)(_wrap_some_stages, chunks, schedule, timeout=60)
    ):
        assert not changes, f"rank {rank}: {changes[:4]}"
        assert (steps, stock_steps) == (2, 1)

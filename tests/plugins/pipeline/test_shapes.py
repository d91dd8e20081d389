"""Microbatches whose shapes differ from those of the first step, between steps and inside of one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ovpatch
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.cases import (
    MAY_LACK_GRADIENTS,
    Case,
    differences,
    feature_report,
    make_schedule,
)
from tests.plugins.pipeline.models import WIDTH, Autocast, Block, Part
from tests.support.rarely import ALL_CASES, RARELY

STEPS = ((12, 2), (12, 5), (7, 3), (5, 2), (12, 2))
"""The rows of a step, which its microbatches partition, and the length of the sequences."""


class Pair(nn.Module):
    """A stage that passes on two tensors of different dimensions; no stage reads the second one."""

    def __init__(self, index: int, last: int) -> None:
        super().__init__()
        self.block, self.index, self.last = Block(), index, last

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.block(x)
        if self.index == self.last:
            return h + 0 * x
        return h, (x * 2).flatten()


class Indexed(nn.Module):
    """A stage that passes on positions, which get no gradient, before the hidden states."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.block, self.is_last = Block(), is_last

    def forward(self, *inputs: Tensor) -> Any:
        x = inputs[-1]
        positions = torch.arange(x.shape[1]) if len(inputs) == 1 else inputs[0]
        h = self.block(x + positions[:, None])
        return h if self.is_last else (positions, h)


def _make_case(name: str) -> Case:
    several: dict[str, Any] = {"microbatches": 4, "chunks": 2}
    return {
        "1F1B": Case(microbatches=4),
        "two tensors": Case(
            microbatches=4, part=lambda index: Pair(index, dist.get_world_size() - 1)
        ),
        "positions first": Case(
            microbatches=4, part=lambda index: Indexed(index == dist.get_world_size() - 1)
        ),
        "autocast": Case(
            microbatches=4, part=lambda _index: Autocast(Part(Block(0.0, False), Block()))
        ),
        "loop": Case("ScheduleInterleaved1F1B", **several),
        "vee": Case("ScheduleZBVZeroBubble", vee=True, **several),
    }[name]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    data, (rows, length) = torch.Generator().manual_seed(step), STEPS[step]
    return torch.randn(rows, length, WIDTH, generator=data), torch.randn(
        rows, length, WIDTH, generator=data
    )


def _train(case: Case, order: str) -> list[Any]:
    """Train with the engine; return losses, gradients and parameters."""
    ovpatch.apply(
        "pipeline", options={"pipeline": {"schedule": order, "variable_seq_lengths": True}}
    )
    schedule, parts = make_schedule(case)
    found: list[Any] = []
    stages = list_stages(schedule)
    for step in range(len(STEPS)):
        x, y = _batch(step)
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        target = y if any(stage.is_last for stage in stages) else None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses)
        found.append([loss.detach().clone() for loss in losses])
        found += _apply_gradients(parts)
    ovpatch.revert()
    return found


def _apply_gradients(parts: Sequence[nn.Module]) -> list[Any]:
    found = [
        {name: param.grad.clone() for name, param in part.named_parameters()} for part in parts
    ]
    for part in parts:
        for param in part.parameters():
            param.data.add_(param.grad, alpha=-0.1)
            param.grad = None
    return found


def _train_alone(case: Case) -> list[Any]:
    """Train the same model without a pipeline: stages and microbatches run sequentially."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count, modules = size * case.chunks, []
    for index in range(count):
        torch.manual_seed(100 + index)
        modules.append(case.part(index))
    mine = [rank, count - 1 - rank] if case.vee else list(range(rank, count, size))
    found: list[Any] = []
    for step in range(len(STEPS)):
        x, y = _batch(step)
        losses = []
        for rows, target in zip(
            x.tensor_split(case.microbatches), y.tensor_split(case.microbatches), strict=True
        ):
            h: Any = (rows,)
            for module in modules:
                h = module(*h) if isinstance(h, tuple) else module(h)
            losses.append(nn.functional.mse_loss(h, target))
            losses[-1].backward()
        for module in modules:
            for param in module.parameters():
                param.grad /= case.microbatches
        found.append([loss.detach() for loss in losses] if count - 1 in mine else [])
        done = _apply_gradients(modules)
        found += [done[index] for index in mine]
    return found


def _compare(names: list[str], orders: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        alone = _train_alone(_make_case(name))
        for order in orders:
            changes = differences(alone, _train(_make_case(name), order))
            found[f"{name}, {order}"] = changes
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=RARELY)])
def test_shapes_may_change_between_steps_and_inside_of_one(ranks: Any, world: int) -> None:
    names = [
        "1F1B",
        "autocast",
        *(["two tensors", "positions first"] if MAY_LACK_GRADIENTS else []),
    ]
    found = ranks(world)(
        _compare, names, ["as-given", "zb-h2"] if world == 2 or ALL_CASES else ["zb-h2"]
    )
    found += ranks(world)(_compare, ["loop", "vee"], ["as-given"])
    for outcomes in found:
        for name, changes in outcomes.items():
            assert not changes, f"{name}: {changes[:4]}"


def _step(schedule: Any, step: int) -> str:
    """Run a step and return its error, or ""."""
    x, y = _batch(step)
    try:
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), target=y, return_outputs=False)
    # The test reads any error.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error} {error.__cause__}"
    return ""


def _meet_another_shape() -> list[str]:
    ovpatch.apply("pipeline")
    schedule, _ = make_schedule(Case(microbatches=4))
    return [_step(schedule, step) for step in (0, 1, 4)]


def test_another_shape_is_an_error_on_all_ranks_unless_it_is_expected(ranks: Any) -> None:
    for rank, (first, second, again) in enumerate(ranks(2)(_meet_another_shape)):
        assert not first
        assert not again
        assert rank == 0 or second.startswith("PipelineRankError")
        # Torch 2.11 checks the inputs of the script itself.
        if "PipeliningShapeError" in second:
            assert "Stage 0 forward inputs: value 0 has a shape mismatch" in second
            continue
        assert rank == 1 or second.startswith("ValueError")
        assert (
            "sends tensors of shapes [(3, 5, 12)], and its receiver expects [(3, 2, 12)]" in second
        )
        assert (
            "Set OVPATCH_PIPELINE_VARIABLE_SEQ_LENGTHS=1 on all ranks, or pad the microbatches to "
            "one shape." in second
        )


class Failing(nn.Module):
    """A block that fails in one of its forwards or of its backwards."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.block, self.where, self.left = Block(), where, 10**6

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if self.where == "F":
            self._count()
        elif torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(lambda _grad: self._count())
        return y

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("planted")


def _fail(victim: int, where: str) -> tuple[str, list[str]]:
    found = []
    for is_failing in (False, True):
        ovpatch.apply(
            "pipeline", options={"pipeline": {"schedule": "zb-h1", "variable_seq_lengths": True}}
        )
        schedule, parts = make_schedule(Case(microbatches=4, part=lambda _index: Failing(where)))
        _step(schedule, 0)
        text = ""
        if is_failing:
            if dist.get_rank() == victim:
                parts[0].left = 2
            text = _step(schedule, 1)
        for param in parts[0].parameters():
            param.grad = None
        after = _step(schedule, 2)
        found.append([after, {name: param.grad for name, param in parts[0].named_parameters()}])
        ovpatch.revert()
    return text, [*differences(found[0][1], found[1][1]), found[1][0]]


@pytest.mark.parametrize("where", ["F", "B"])
def test_a_failed_step_of_other_shapes_leaves_clean_queues(ranks: Any, where: str) -> None:
    for victim in range(3):
        for rank, (text, after) in enumerate(ranks(3)(_fail, victim, where)):
            # Such a rank may have finished its step.
            is_done = where == "B" and rank > victim and not text
            assert is_done or "planted" in text, (rank, text)
            assert after == [""], after


def _choose() -> tuple[list[str], str]:
    options = {"schedule": "auto", "variable_seq_lengths": True}
    ovpatch.apply("pipeline", options={"pipeline": options})
    schedule, _ = make_schedule(Case(microbatches=4))
    errors = [_step(schedule, step) for step in (0, 1, 2, 3, 4, 1, 2, 0)]
    return errors, " ".join(feature_report().remarks)


def test_costs_are_measured_between_steps_of_other_shapes(ranks: Any, tmp_path: Any) -> None:
    for errors, remarks in ranks(2)(_choose, env={"OVPATCH_CACHE_DIR": str(tmp_path)}):
        assert errors == [""] * 8
        assert "schedule=auto" in remarks


def _plant_attributes() -> list[str]:
    """Return the attributes of a stage that the script has set itself and that a step has changed."""
    planted: dict[str, Any] = {
        name: functools.partial(lambda *_arguments: None)
        for name in ("_validate_fwd_input", "_validate_fwd_outputs", "_send_meta", "_recv_meta")
    }
    planted["_runtime_validate"] = False
    ovpatch.apply("pipeline", options={"pipeline": {"variable_seq_lengths": True}})
    schedule, _ = make_schedule(Case(microbatches=4))
    stage = schedule._stage
    vars(stage).update(planted)
    x, y = _batch(0)
    schedule.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None)
    ovpatch.revert()
    return [name for name, value in planted.items() if vars(stage).get(name) is not value]


def test_attributes_that_the_script_has_set_on_a_stage_stay(ranks: Any) -> None:
    assert ranks(2)(_plant_attributes) == [[], []]

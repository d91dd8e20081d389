"""Stashed weights have the bits of stages in one process that copy each stage for each forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ovpatch
from ovpatch_plugins.pipeline import attach_optimizer
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from tests.plugins.pipeline.cases import Case, differences, make_schedule, run_steps
from tests.plugins.pipeline.models import ROWS, WIDTH, Block, Part, Raw, Variant

SIX = ROWS * 6
CASES = {
    "plain": Case(steps=3),
    "checkpoint": Case(part=lambda _index: Part(Block(0.0, False), Block(0.0, False))),
    "raw input": Case(part=lambda _index: Raw()),
    "tied": Case(part=lambda _index: Variant("tied")),
    "frozen": Case(part=lambda _index: Variant("frozen")),
    "weight norm": Case(part=lambda _index: Variant("weight norm")),
    "gpipe": Case("ScheduleGPipe"),
    "one microbatch": Case("ScheduleGPipe", microbatches=1),
}


def _list_order(case: Case, stage: int, stages: int) -> list[tuple[str, int]]:
    """Return the Fs and Bs of a stage: 1F1B, or all Fs first."""
    count = case.microbatches
    ahead = count if case.schedule == "ScheduleGPipe" else min(stages - stage, count)
    order = [("F", index) for index in range(ahead)]
    for index in range(count):
        order += [("B", index)] + ([("F", ahead + index)] if ahead + index < count else [])
    return order


class _Delayed:
    """All stages in one process. Each forward, and its backward, runs in its own copy of the stage."""

    def __init__(self, case: Case, stages: int) -> None:
        self.case, self.modules = case, []
        for index in range(stages):
            torch.manual_seed(100 + index)
            self.modules.append(case.part(index))
        params = [[p for p in module.parameters() if p.requires_grad] for module in self.modules]
        self.optimizers = [torch.optim.AdamW(own, lr=1e-2) for own in params]
        self.losses: list[torch.Tensor] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        stages = len(self.modules)
        given, wanted = x.chunk(self.case.microbatches), y.chunk(self.case.microbatches)
        orders = [_list_order(self.case, stage, stages) for stage in range(stages)]
        runs: dict[tuple[int, int], Any] = {}
        grads: dict[tuple[int, int], torch.Tensor] = {}
        while any(orders):
            for stage, order in enumerate(orders):
                while order and self._is_due(stage, order[0], runs, grads):
                    kind, index = order.pop(0)
                    if kind == "B":
                        self._backward(stage, runs[stage, index], grads, index)
                        continue
                    received = (
                        given[index]
                        if not stage
                        else runs[stage - 1, index][2].detach().requires_grad_()
                    )
                    module = copy.deepcopy(self.modules[stage])
                    output = module(received)
                    if stage == stages - 1:
                        output = nn.functional.mse_loss(output, wanted[index])
                        self.losses.append(output.detach())
                    runs[stage, index] = module, received, output

    def _is_due(
        self, stage: int, action: tuple[str, int], runs: dict[Any, Any], grads: dict[Any, Any]
    ) -> bool:
        kind, index = action
        if kind == "F":
            return stage == 0 or (stage - 1, index) in runs
        return stage == len(self.modules) - 1 or (stage, index) in grads

    def _backward(self, stage: int, run: Any, grads: dict[Any, Any], index: int) -> None:
        module, received, output = run
        output.backward(grads.get((stage, index)))
        if stage:
            grads[stage - 1, index] = received.grad
        for live, own in zip(self.modules[stage].parameters(), module.parameters(), strict=True):
            live.grad = own.grad
        self.optimizers[stage].step()
        self.optimizers[stage].zero_grad()


def _compare(names: list[str]) -> dict[str, tuple[list[str], list[str], int, bool]]:
    ovpatch.apply("pipeline", options={"pipeline": {"weight_stash": "pipedream"}})
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for name in names:
        case, before = CASES[name], COUNTERS.microbatch_updates
        schedule, parts = make_schedule(case)
        params = [(key, param) for part in parts for key, param in part.named_parameters()]
        optimizer = torch.optim.AdamW(
            [param for _, param in params if param.requires_grad], lr=1e-2
        )
        attach_optimizer(schedule, optimizer)
        results = run_steps(case, schedule, params, optimizer, 0)
        delayed = _Delayed(case, size)
        for step in range(case.steps):
            data = torch.Generator().manual_seed(10 * step)
            x, y = (
                torch.randn(ROWS * case.microbatches, 2, WIDTH, generator=data) for _ in range(2)
            )
            delayed.step(x, y)
        losses = [loss for step in results[0:-1:3] for loss in step]
        wrong = differences(dict(delayed.modules[rank].named_parameters()), results[-1])
        wrong += differences(delayed.losses, losses) if rank == size - 1 else []
        left = [key for grads in results[2:-1:3] for key, grad in grads.items() if grad is not None]
        is_own = all(dict(parts[0].named_parameters())[key] is param for key, param in params)
        found[name] = (wrong, left, COUNTERS.microbatch_updates - before, is_own)
    return found


@pytest.mark.parametrize(("world", "names"), [(2, list(CASES)), (4, ["plain", "gpipe"])])
def test_stashed_weights_have_the_bits_of_one_process_with_the_same_delays(
    ranks: Any, world: int, names: list[str]
) -> None:
    for rank, found in enumerate(ranks(world)(_compare, names)):
        for name, (wrong, left, updates, is_own) in found.items():
            assert not wrong, f"rank {rank}, {name}: {wrong[:4]}"
            assert not left, f"rank {rank}, {name}"
            assert updates == CASES[name].microbatches * CASES[name].steps
            assert is_own, name


def _misuse(kind: str) -> str:
    options = {"weight_stash": "pipedream", **({"schedule": "zb-h1"} if kind == "zb-h1" else {})}
    ovpatch.apply("pipeline", options={"pipeline": options})
    wrap = nn.parallel.DistributedDataParallel if kind == "replicas" else lambda module: module
    group = (
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if kind == "replicas"
        else None
    )
    case = Case(
        wrap=(lambda module: wrap(module, process_group=group)) if kind == "replicas" else wrap
    )
    schedule, (part,) = make_schedule(case)
    params = list(part.parameters())
    if kind != "no optimizer":
        attach_optimizer(
            schedule,
            torch.optim.SGD(params[1:] if kind == "left out" and dist.get_rank() else params),
        )
    if kind == "gradient" and dist.get_rank():
        params[0].grad = torch.zeros_like(params[0])
    if kind == "hook" and dist.get_rank():
        params[0].register_hook(lambda grad: grad)
    if kind == "read around" and dist.get_rank():
        part.register_forward_hook(lambda _module, _args, out: out * params[-1].sum())
    rows = torch.ones(SIX, 2, WIDTH)
    try:
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
    except RuntimeError as error:
        return str(error)
    return ""


MISUSES = {
    "no optimizer": "attach_optimizer(schedule, optimizer)",
    "zb-h1": "schedule=as-given or 1f1b, not zb-h1",
    "replicas": "cannot reduce the gradients of stage 0 over replicas",
    "left out": "stage 1: weight of a LayerNorm is in no optimizer",
    "gradient": "stage 1: weight of a LayerNorm has a gradient",
    "hook": "stage 1: weight of a LayerNorm has hooks",
    "read around": "stage 1: weight of a Linear is read around its module",
}


def _misuse_each(kinds: list[str]) -> list[str]:
    return [(_misuse(kind), ovpatch.revert())[0] for kind in kinds]  # type: ignore[func-returns-value]


def test_models_that_cannot_be_stashed_are_an_error_on_all_ranks(ranks: Any) -> None:
    for texts in ranks(2)(_misuse_each, list(MISUSES)):
        for kind, text in zip(MISUSES, texts, strict=True):
            assert MISUSES[kind] in text, kind
            assert "OVPATCH_PIPELINE_WEIGHT_STASH=off" in text, kind


def _attach_without_the_option() -> tuple[list[str], int]:
    found, before = [], COUNTERS.microbatch_updates
    for attaches in (False, True):
        schedule, (part,) = make_schedule(Case())
        params = list(part.named_parameters())
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
        if attaches:
            ovpatch.apply("pipeline")
            attach_optimizer(schedule, optimizer)
        found.append(run_steps(Case(), schedule, params, optimizer, 0))
    return differences(*found), COUNTERS.microbatch_updates - before


def test_an_attached_optimizer_changes_nothing_without_the_option(ranks: Any) -> None:
    assert ranks(2)(_attach_without_the_option) == [([], 0)] * 2


def _fail() -> tuple[str, int, bool]:
    ovpatch.apply("pipeline", options={"pipeline": {"weight_stash": "pipedream"}})
    schedule, (part,) = make_schedule(Case())
    attach_optimizer(schedule, torch.optim.SGD(part.parameters(), lr=1e-2))
    loss, rows, texts, before = (
        schedule._loss_fn,
        torch.ones(SIX, 2, WIDTH),
        [],
        COUNTERS.microbatch_updates,
    )
    # Some versions of torch call the loss once more in a first step.
    for fails in (False, True, False):
        calls = iter(range(6))
        schedule._loss_fn = lambda *args, fails=fails, calls=calls: (
            loss(*args) / (not fails or next(calls) != 3 or 1 // 0)
        )
        try:
            schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
        except (RuntimeError, ZeroDivisionError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    updates = COUNTERS.microbatch_updates - before
    return " / ".join(texts), updates, all(param.grad is None for param in part.parameters())


def test_a_step_that_fails_and_the_next_one(ranks: Any) -> None:
    (first, updates, is_clean), (last, updates_of_last, also) = ranks(2)(_fail)
    assert last == "ZeroDivisionError: integer division or modulo by zero"
    assert first.startswith(
        "PipelineRankError: ovpatch: the pipeline's step failed: rank 1 failed in 1F3: ZeroDivisionError"
    )
    assert updates_of_last == 6 + 3 + 6  # three backwards before the failure
    # No update uses zeros of the failed rank.
    assert 6 + 6 <= updates <= 6 + 3 + 6
    assert is_clean
    assert also

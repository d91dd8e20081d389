"""The engine runs schedules that it supports; torch runs the remaining ones, and results have the bits of torch."""

from __future__ import annotations

import csv
import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import ovpatch
from ovpatch.overlap.comm import lifetimes
from ovpatch_plugins.pipeline import pipeline_attach
from ovpatch_plugins.pipeline.pipeline_report import Prediction, list_schedules
from ovpatch_plugins.pipeline.runtime.engine import Engine
from tests.plugins.pipeline.cases import (
    Case,
    compute_loss,
    counters,
    differences,
    feature_report,
    list_params,
    make_schedule,
    run_steps,
    train,
)
from tests.plugins.pipeline.models import ROWS, WIDTH, Block, Part

SIX = ROWS * 6


def _rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIX, 2, WIDTH, generator=torch.Generator().manual_seed(seed))


def _first(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (rows,) if dist.get_rank() == 0 else ()


def _advance(before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in counters().items()}


def _train_evaluate_train() -> list[Any]:
    case, found = Case(), []
    schedule, parts = make_schedule(case)
    params = list_params(parts)
    optimizer = torch.optim.SGD([param for _, param in params], lr=1e-2)
    for _ in range(2):
        found += run_steps(case, schedule, params, optimizer, 0)
        out = schedule.eval(*_first(_rows()), target=_rows(), losses=(losses := []))
        found += [[loss.clone() for loss in losses], None if out is None else out.clone()]
    return found


def _evaluate() -> tuple[list[str], int, int]:
    stock = _train_evaluate_train()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    before = counters()
    changes = differences(stock, _train_evaluate_train())
    counts = _advance(before)
    return changes, counts["steps"], counts["stock_steps"]


def test_evaluation_between_steps(ranks: Any) -> None:
    for changes, steps, stock_steps in ranks(2)(_evaluate):
        assert not changes
        assert (steps, stock_steps) == (4, 0)


def _two_schedules() -> list[str]:
    def run() -> list[Any]:
        cases = (
            Case(),
            dataclasses.replace(Case("ScheduleInterleaved1F1B"), microbatches=8, chunks=2),
        )
        made = [(case, *make_schedule(case)) for case in cases]
        found = []
        for seed in range(2):
            for case, schedule, parts in made:
                params = list_params(parts)
                found += run_steps(
                    case, schedule, params, torch.optim.SGD([p for _, p in params], lr=0.1), seed
                )
        return found

    stock = run()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h2"}})
    return differences(stock, run())


def test_two_schedules_in_one_process(ranks: Any) -> None:
    assert ranks(2)(_two_schedules) == [[], []]


def _share_a_stage() -> tuple[list[str], int]:
    def run() -> list[Any]:
        case, found = dataclasses.replace(Case(), steps=1), []
        schedule, parts = make_schedule(case)
        params = list_params(parts)
        optimizer = torch.optim.SGD([param for _, param in params], lr=0.1)
        gpipe = schedules.ScheduleGPipe(schedule._stage, case.microbatches, loss_fn=compute_loss)

        def evaluate() -> None:
            out = gpipe.eval(*_first(_rows()), target=_rows(), losses=(losses := []))
            found.extend([[loss.clone() for loss in losses], None if out is None else out.clone()])

        # The evaluation is first, because a stage of torch 2.11 cannot train after it was initialized for evaluation.
        evaluate()
        for seed in range(2):
            found += run_steps(case, schedule, params, optimizer, seed)
            evaluate()
        found += run_steps(case, schedule, params, optimizer, 2)
        del schedule
        evaluate()
        return found

    stock = run()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    before = counters()
    changes = differences(stock, run())
    return changes, _advance(before)["steps"]


def test_a_schedule_that_only_evaluates_shares_its_stage_with_one_that_trains(ranks: Any) -> None:
    assert ranks(2)(_share_a_stage) == [([], 3), ([], 3)]


def _drop() -> tuple[list[bool], str]:
    """Return whether the parts of a dropped schedule that the report still shows are alive, and its bubble's line."""
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    case = dataclasses.replace(Case(), steps=7)
    schedule, parts = make_schedule(case)
    run_steps(case, schedule, [], torch.optim.SGD(parts[0].parameters()), 0)
    references = [
        weakref.ref(part) for part in (schedule, schedule._stage, parts[0], *parts[0].parameters())
    ]
    del schedule, parts
    gc.collect()
    bubbles = [line for line in feature_report().remarks if line.startswith("bubble")]
    return [reference() is not None for reference in references], bubbles[-1]


def test_the_report_of_a_schedule_that_was_dropped_keeps_no_stage(ranks: Any) -> None:
    for alive, bubble in ranks(2)(_drop):
        assert not any(alive)
        assert "% predicted" in bubble


def _turn_off_and_on() -> tuple[list[str], dict[str, int]]:
    def run(change: Callable[[int], None]) -> list[Any]:
        case, found = dataclasses.replace(Case(), steps=1), []
        schedule, parts = make_schedule(case)
        params = list_params(parts)
        optimizer = torch.optim.SGD([param for _, param in params], lr=0.1)
        for seed in range(4):
            change(seed)
            found += run_steps(case, schedule, params, optimizer, seed)
        return found

    def change(seed: int) -> None:
        ovpatch.revert() if seed % 2 else ovpatch.apply(
            "pipeline", options={"pipeline": {"schedule": "zb-h1"}}
        )

    stock = run(lambda _seed: None)
    ovpatch.apply("pipeline")
    before = counters()
    changes = differences(stock, run(change))
    ovpatch.apply("pipeline")
    return changes, _advance(before)


def test_turned_off_and_on_between_steps(ranks: Any) -> None:
    for changes, counts in ranks(2)(_turn_off_and_on):
        assert not changes
        assert counts["steps"] == 2


def _run_csv(path: str, base: str) -> tuple[list[str], int, str]:
    def run() -> list[Any]:
        rank, found = dist.get_rank(), []
        torch.manual_seed(rank)
        part = Part(Block(), Block())
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = getattr(schedules, base)([stage], 3, loss_fn=nn.functional.mse_loss)
        schedule._load_csv(path)
        for _ in range(2):
            rows, losses = _rows()[: 3 * ROWS], []
            out = schedule.step(*_first(rows), target=rows, losses=losses)
            found += [
                losses and [loss.detach() for loss in losses],
                out,
                [p.grad.clone() for p in part.parameters()],
            ]
        return found

    stock = run()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "gpipe"}})
    changes = differences(stock, run())
    ((_, stage),) = list_schedules()[-1].stages.items()
    assert stage.receive_nbytes == ROWS * 2 * WIDTH * 4, (
        "an activation on one rank, its gradient on the other"
    )
    return changes, counters()["weight_grads"], " ".join(feature_report().remarks)


@pytest.mark.parametrize("base", ["_PipelineScheduleRuntime", "PipelineScheduleMulti"])
def test_a_loaded_order_is_run_as_it_is(ranks: Any, tmp_path: Path, base: str) -> None:
    orders = [
        ["0F0", "0F1", "", "0F2", "0I0", "0I1", "0W0", "", "0W1", "0B2"],
        ["", "1F0", "1B0", "1F1", "1I1", "1F2", "1W1", "1B2"],
    ]
    path = tmp_path / "order.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(orders)
    for changes, deferred, remarks in ranks(2)(_run_csv, str(path), base):
        assert not changes
        assert deferred
        assert "runs as its own order" in remarks
        assert (
            "receive buffers of 0.0 MiB a microbatch, for those in flight instead of 3" in remarks
        )
        assert "at most 3 with activations" in remarks or "at most 2 with activations" in remarks


def _leave_to_stock(kind: str) -> tuple[list[str], dict[str, int], str]:
    def run() -> list[Any]:
        case = Case("ScheduleInterleaved1F1B", microbatches=8, chunks=2)
        if kind == "dw_builder" and dist.get_rank() == 1:
            case = dataclasses.replace(case, stage={"dw_builder": lambda: lambda: None})
        if kind == "autograd":
            case = dataclasses.replace(case, options={"backward_requires_autograd": False})
        schedule, parts = make_schedule(case)
        if kind == "custom":
            schedule.register_custom_function(schedules.REDUCE_GRAD, lambda action, ctx: None)
        params = list_params(parts)
        return run_steps(case, schedule, params, torch.optim.SGD([p for _, p in params], lr=0.1), 0)

    stock = run()
    ovpatch.apply("pipeline")
    before = counters()
    changes = differences(stock, run())
    return changes, _advance(before), " ".join(feature_report().remarks)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dw_builder", "a stage computes weight gradients by its own dw_builder"),
        ("custom", "register_custom_function() replaces computations"),
        ("autograd", "backward_requires_autograd=False"),
    ],
)
def test_torch_runs_unsupported_schedules_on_all_ranks(ranks: Any, kind: str, reason: str) -> None:
    for changes, counts, remarks in ranks(2)(_leave_to_stock, kind):
        assert not changes
        assert counts["steps"] == 0
        assert counts["stock_steps"] == 2
        assert reason in remarks


def _watch_memory() -> tuple[int, int]:
    def live(schedule: Any) -> int:
        infos = [*schedule._stage.args_recv_info.values(), *schedule._stage.grad_recv_info.values()]
        buffers = (
            getattr(info, "buffer", None) for items in infos for info in items
        )  # torch 2.11: not of inputs
        return sum(buffer is not None and not buffer.is_meta for buffer in buffers)

    schedule, _ = make_schedule(Case())
    schedule.step(*_first(_rows()), target=_rows())
    stock = live(schedule)
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "1f1b"}})
    peak = 0
    module = schedule._stage.submod
    module.register_forward_hook(lambda *_: None)

    def watch(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, live(schedule))

    module.register_forward_pre_hook(watch)
    schedule.step(*_first(_rows()), target=_rows())
    assert live(schedule) == 0
    return stock, peak


def test_receive_buffers_are_those_in_flight(ranks: Any) -> None:
    for stock, peak in ranks(2)(_watch_memory):
        # Up to torch 2.14 the buffers stay. From 2.15 on torch, too, makes each when it is due.
        assert stock in (0, 6)
        assert peak <= 4


def _describe() -> str:
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    train(dataclasses.replace(Case(), steps=9))
    return " ".join(feature_report().remarks)


def test_the_report_has_costs_and_the_bubble(ranks: Any) -> None:
    for rank, text in enumerate(ranks(2)(_describe)):
        assert (
            f"Schedule1F1B runs as zb-h1 on rank {rank}: 6 microbatches, at most 2 with activations"
            in text
        )
        assert f"stage {rank}: F " in text
        # The order has Ws. With full backwards, the first rank would have no Bs.
        assert ", B " in text
        assert ", W " in text
        assert "% of a step measured, " in text
        assert "% predicted" in text


def _predict_twice() -> list[list[float]]:
    """Return the predicted bubbles of two groups of one name; the second group has only the costs of rank 0.

    Gloo cannot make two groups of one name in one store. So the second group is the first one without its state.
    """
    found = []
    case = dataclasses.replace(Case(), steps=7)
    for number in range(2):
        with ovpatch.applied("pipeline"), pytest.MonkeyPatch.context() as patch:
            if number and dist.get_rank():
                patch.setattr(Prediction, "after_step", lambda *_: None)
            train(case)
            dist.barrier()  # Now the store has the costs of all ranks.
            prediction = list_schedules()[-1].prediction
            prediction.after_step()
            found.append(list(prediction.find_bubbles()))
        dist.barrier()
        lifetimes._group_states.clear()
    return found


def test_a_prediction_takes_no_costs_of_an_earlier_group(ranks: Any) -> None:
    for first, second in ranks(2)(_predict_twice):
        assert len(first) == 2
        assert not second


IMPORTS = """
import sys, ovpatch
ovpatch.apply('pipeline')
print([m for m in sys.modules if m.startswith(('torch.distributed.pipelining', 'ovpatch_plugins.pipeline.'))])
import ovpatch_plugins.pipeline.pipeline_attach
print([m for m in sys.modules if m.startswith('ovpatch_plugins.pipeline.')])
"""


def test_nothing_is_imported_before_the_pipeline_is_and_the_solver_for_schedule_auto_alone(
    forks: Any, tmp_path: Path
) -> None:
    program = tmp_path / "imports.py"
    program.write_text(IMPORTS)
    applied, attached = forks.torchrun(1, program).check().stdout.splitlines()
    assert "ovpatch_plugins.pipeline.pipeline_feature" in applied
    assert "torch.distributed.pipelining" not in applied
    assert "pipeline_attach" not in applied
    assert "pipeline_attach" in attached
    assert "_schedule'" not in attached
    assert "solver" not in attached


def _watch_receives() -> tuple[list[str], list[int], list[int]]:
    """Return the numbers of receives started before each wait, for the first step and for a later one."""
    case = Case("ScheduleInterleaved1F1B", chunks=2, microbatches=4)
    stock = train(case)
    ovpatch.apply("pipeline")
    started: list[list[int]] = []
    wait, run = Engine._wait_for, Engine.run_step

    def _run(self: Any, inputs: Any) -> None:
        started.append([])
        run(self, inputs)

    def _wait_for(self: Any, receive: Any) -> None:
        started[-1].append(len(self.messages.arriving))
        wait(self, receive)

    with pytest.MonkeyPatch.context() as patch:
        # Receives wait on the device here, but gloo carries the messages.
        patch.setattr(pipeline_attach, "blocks_host", lambda *_: False)
        patch.setattr(Engine, "run_step", _run)
        patch.setattr(Engine, "_wait_for", _wait_for)
        changes = differences(stock, train(case))
    return changes, started[0], started[1]


def test_no_receive_waits_on_the_device_in_the_first_step(ranks: Any) -> None:
    for changes, first, later in ranks(2)(_watch_receives):
        assert not changes
        assert max(first) == 1
        assert max(later) == 2


class _Schedule:
    """The part of a torch schedule with several stages that the decision about it reads."""

    def __init__(self) -> None:
        self.rank = 0
        self.pipeline_order: dict[int, list[str]] = {0: ["0F0"]}
        self._stages = [SimpleNamespace(submod=object(), dw_builder=None)]


def test_a_replaced_order_module_or_builder_is_attached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def attach(schedule: Any, owner: str, options: Any, facts: tuple[Any, ...]) -> Any:
        made.append(SimpleNamespace(facts=facts))
        return made[-1]

    monkeypatch.setattr(pipeline_attach, "attach_schedule", attach)
    schedule = _Schedule()
    changes: list[tuple[Any, str, Any]] = [
        (schedule, "pipeline_order", {0: ["0F0"]}),
        (schedule._stages[0], "submod", object()),
        (schedule._stages[0], "dw_builder", print),
    ]
    for number, change in enumerate([(schedule, "rank", 0), *changes], 1):
        setattr(*change)
        found = [
            pipeline_attach._find_attached(schedule, "PipelineScheduleMulti", {}) for _ in range(2)
        ]
        assert found == [made[-1]] * 2
        assert len(made) == number, change[1]

"""Additions to torch's pipelines after 2.13 behave as in stock PyTorch with the engine, and so do stages alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

import ovpatch
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.cases import (
    MAY_LACK_GRADIENTS,
    Case,
    Stage,
    counters,
    differences,
    make_schedule,
    train_both,
)
from tests.plugins.pipeline.models import ROWS, WIDTH, Block

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EIGHT: dict[str, Any] = {"microbatches": 8, "chunks": 2}
STEP = inspect.signature(schedules.PipelineScheduleMulti.step).parameters


def needs(argument: str) -> Any:
    """Skip a test if ``schedule.step()`` of the installed torch does not have an argument."""
    return pytest.mark.skipif(
        argument not in STEP, reason=f"this torch has no schedule.step({argument}=)"
    )


# --- gradients that a later call reduces ---


def _make_sharded(
    case: Case, policy: MixedPrecisionPolicy | None, kind: str
) -> tuple[Any, list[nn.Module]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    options: dict[str, Any] = (
        {"mesh": mesh["dp"]} if policy is None else {"mesh": mesh["dp"], "mp_policy": policy}
    )

    def wrap(module: nn.Module) -> nn.Module:
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, **options)
        return fully_shard(module, **options)

    return make_schedule(Case(**{**vars(case), "wrap": wrap}), mesh["pp"].get_group())


def _rows(case: Case, seed: int) -> Tensor:
    return torch.randn(
        case.microbatches * ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(seed)
    )


def _call(schedule: Any, case: Case, seed: int, **more: Any) -> list[Any]:
    stages, losses = list_stages(schedule), list[Tensor]()
    x, y = _rows(case, seed), _rows(case, seed + 1000)
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    target = y if any(stage.is_last for stage in stages) else None
    schedule.step(*inputs, target=target, losses=losses, **more)
    return [loss.detach().clone() for loss in losses]


def _look(parts: Sequence[nn.Module]) -> list[Any]:
    """Return the values and gradients of the parameters as a script sees them, which shows whether they are sharded."""
    found: list[Any] = []
    for part in parts:
        for param in part.parameters():
            tensors = [tensor for tensor in (param.detach(), param.grad) if tensor is not None]
            found.append(
                [
                    tensor.to_local().clone() if hasattr(tensor, "to_local") else tensor.clone()
                    for tensor in tensors
                ]
            )
    return found


def _accumulate(
    case: Case, policy: MixedPrecisionPolicy | None, kind: str, between: Callable[[Any, int], None]
) -> list[Any]:
    schedule, parts = _make_sharded(case, policy, kind)
    params = [param for part in parts for param in part.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    found: list[Any] = []
    for step in range(2):
        for number, last in enumerate((False, False, True)):
            seed = 10 * step + number + 100 * dist.get_rank()
            found.append(_call(schedule, case, seed, finalize_gradients=last))
            found.append(_look(parts))
            between(schedule, number)
        optimizer.step()
        optimizer.zero_grad()
    return found


LOOP = Case("ScheduleInterleaved1F1B", **EIGHT)
ACCUMULATED: dict[str, tuple[Case, MixedPrecisionPolicy | None, str]] = {
    "one stage": (Case(), None, "fsdp"),
    "one stage, bf16": (Case(), HALF, "fsdp"),
    "loop": (LOOP, HALF, "fsdp"),
    "loop, one stage gathered": (
        Case("ScheduleInterleaved1F1B", options={"max_active_stages": 1}, **EIGHT),
        None,
        "fsdp",
    ),
    "loop, gathered late": (
        Case("ScheduleInterleaved1F1B", options={"unshard_lookahead": "auto"}, **EIGHT),
        HALF,
        "fsdp",
    ),
    "ddp": (Case(), None, "ddp"),
}


def _finalize_later(names: Sequence[str]) -> dict[str, tuple[list[str], int]]:
    def do_nothing(_schedule: Any, _number: int) -> None:
        return

    found = {}
    for name in names:
        stock = _accumulate(*ACCUMULATED[name], do_nothing)
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
        before = counters()["steps"]
        patched = _accumulate(*ACCUMULATED[name], do_nothing)
        found[name] = differences(stock, patched), counters()["steps"] - before
        ovpatch.revert()
    return found


@needs("finalize_gradients")
def test_gradients_that_a_later_call_reduces(ranks: Any) -> None:
    for rank, found in enumerate(ranks(4)(_finalize_later, list(ACCUMULATED), timeout=120)):
        for name, (changes, steps) in found.items():
            assert not changes, f"rank {rank}, {name}: {changes[:4]}"
            assert steps == (5 if name == "ddp" else 6), name


def _change_in_between(kind: str) -> list[str]:
    def evaluate(schedule: Any, number: int) -> None:
        if number == 1:
            stages = list_stages(schedule)
            x = _rows(LOOP, 5)
            schedule.eval(*((x,) if any(stage.is_first for stage in stages) else ()), target=x)

    def turn(_schedule: Any, number: int) -> None:
        is_on = number % 2 == (kind == "turned off")
        ovpatch.apply("pipeline") if is_on else ovpatch.revert()

    def do_nothing(_schedule: Any, _number: int) -> None:
        return

    stock = _accumulate(LOOP, None, "fsdp", evaluate if kind == "evaluated" else do_nothing)
    ovpatch.apply("pipeline")
    return differences(
        stock, _accumulate(LOOP, None, "fsdp", evaluate if kind == "evaluated" else turn)
    )


@needs("finalize_gradients")
@pytest.mark.parametrize("kind", ["evaluated", "turned off", "turned on"])
def test_between_such_calls(ranks: Any, kind: str) -> None:
    for changes in ranks(4)(_change_in_between, kind):
        assert not changes


def _watch_reductions() -> tuple[list[str], list[Any], list[Any]]:
    case = Case("ScheduleInterleaved1F1B", options={"defer_reduce_grad_wait": True}, **EIGHT)
    results, orders = [], []
    for patched in (False, True):
        if patched:
            ovpatch.apply("pipeline")
        schedule, parts = _make_sharded(case, None, "fsdp")
        calls: list[tuple[str, int]] = []
        for stage in list_stages(schedule):
            for name in (
                "start_gradient_reduction",
                "wait_for_gradient_reduction",
                "backward_one_chunk",
            ):
                _record(stage, name, calls)
        results.append([_call(schedule, case, seed) + _look(parts) for seed in range(2)])
        orders.append(calls)
    return differences(*results), *orders  # type: ignore[return-value]


def _record(stage: Any, name: str, calls: list[tuple[str, int]]) -> None:
    method = getattr(stage, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((name, stage.stage_index))
        return method(*args, **kwargs)

    setattr(stage, name, call)


@needs("finalize_gradients")
def test_a_reduction_that_is_waited_for_later(ranks: Any) -> None:
    for changes, stock, patched in ranks(4)(_watch_reductions):
        assert not changes
        assert patched == stock
        starts = [
            place for place, (name, _) in enumerate(stock) if name == "start_gradient_reduction"
        ]
        assert any(stock[place + 1][0] == "backward_one_chunk" for place in starts)


# --- inputs ---


class Scaled(nn.Module):
    """A block with a factor for its input; each stage gets the factor as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
        result: Tensor = self.block(x * factor)
        return result


def _split_before() -> list[str]:
    cases = [
        Case(part=lambda _index: Scaled()),
        Case("ScheduleInterleaved1F1B", part=lambda _index: Scaled(), **EIGHT),
    ]

    def run() -> list[Any]:
        found: list[Any] = []
        for case in cases:
            schedule, parts = make_schedule(case)
            stages, losses = list_stages(schedule), list[Tensor]()
            data = torch.Generator().manual_seed(3)
            mbs = [torch.randn(ROWS, 2, WIDTH, generator=data) for _ in range(case.microbatches)]
            for _ in range(2):
                out = schedule.step(
                    arg_mbs=[(mb,) for mb in mbs]
                    if any(stage.is_first for stage in stages)
                    else None,
                    kwarg_mbs=[{"factor": mb.mean() + 1} for mb in mbs],
                    target_mbs=mbs if any(stage.is_last for stage in stages) else None,
                    losses=losses,
                )
                found += [[loss.detach().clone() for loss in losses], out, _look(parts)]
        return found

    stock = run()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    before = counters()["steps"]
    changes = differences(stock, run())
    return changes if counters()["steps"] == before + 4 else ["no step of the engine"]


@needs("arg_mbs")
def test_inputs_that_the_script_has_split(ranks: Any) -> None:
    assert ranks(2)(_split_before) == [[], []]


# --- stages ---


def _enter_contexts() -> list[list[Any]]:
    found = []
    for patched in (False, True):
        if patched:
            ovpatch.apply("pipeline")
        case = Case("ScheduleZBVZeroBubble", vee=True, **EIGHT)
        schedule, _ = make_schedule(case)
        entered: list[Any] = []

        class Context:
            def __init__(self, info: Any, entered: list[Any] = entered) -> None:
                self.info, self.entered = info, entered

            def __enter__(self) -> None:
                self.entered.append((self.info.stage_index, self.info.microbatch_index))

            def __exit__(self, *_: Any) -> None:
                self.entered.append("end")

        for stage in list_stages(schedule):
            stage.register_forward_context(Context)
        for seed in range(2):
            _call(schedule, case, seed)
        found.append(entered)
    return found


@pytest.mark.skipif(
    not hasattr(PipelineStage, "register_forward_context"), reason="this torch has no such contexts"
)
def test_contexts_of_forwards(ranks: Any) -> None:
    for stock, patched in ranks(2)(_enter_contexts):
        assert stock == patched
        assert len(stock) > 2 * 2 * 16


def _keep_outputs() -> list[int]:
    found = []
    for patched in (False, True):
        if patched:
            ovpatch.apply("pipeline", options={"pipeline": {"schedule": "gpipe"}})
        case = Case("ScheduleGPipe")
        schedule, (part,) = make_schedule(case)
        most = 0

        def count(*_: Any, stage: Any = schedule._stage) -> None:
            nonlocal most
            states = stage._forward_chunk_states.values()
            most = max(
                most, sum(output is not None for state in states for output in state.live_outputs)
            )

        _call(schedule, case, 0)
        part.register_forward_pre_hook(count)
        _call(schedule, case, 1)
        found.append(most)
    return found


@pytest.mark.skipif(
    not hasattr(PipelineStage, "release_fwd_send_outputs"), reason="this torch keeps all outputs"
)
def test_outputs_leave_the_stage_when_they_are_sent(ranks: Any) -> None:
    (stock, patched), (_, last) = ranks(2)(_keep_outputs)
    # GPipe waits for its sends after the last forward.
    assert stock == 5
    assert patched == 0
    # The script gets these outputs.
    assert last == 5


def _limit_sends() -> tuple[list[str], list[str]]:
    case = Case("ScheduleInterleaved1F1B", options={"max_outstanding_sends": 2}, **EIGHT)
    outcome = train_both(case)
    return outcome.differences, outcome.remarks


@needs("finalize_gradients")
def test_torch_runs_schedules_with_a_limit_of_sends(ranks: Any) -> None:
    for changes, remarks in ranks(2)(_limit_sends):
        assert not changes
        assert any(
            "the script limits sends in flight by max_outstanding_sends" in remark
            for remark in remarks
        )


class Several(nn.Module):
    """A stage that passes on positions, hidden states and an unread tensor, or three tensors that get gradients."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.block, self.is_last = Block(), is_last
        self.fails = False

    def forward(self, *inputs: Tensor) -> Any:
        if self.fails:
            raise RuntimeError("planted")
        if not MAY_LACK_GRADIENTS:
            h = self.block(torch.stack(inputs).sum(0))
            return h if self.is_last else (h, h * 2, h * 3)
        x = inputs[0] if len(inputs) == 1 else inputs[1]
        positions = torch.arange(x.shape[1]) if len(inputs) == 1 else inputs[0]
        h = self.block(x + positions[:, None])
        return h if self.is_last else (positions, h, self.block(x) * 2)


def _lack_gradients() -> dict[str, list[str]]:
    size = dist.get_world_size()
    cases = {
        "straight": Case(part=lambda index: Several(index == size - 1)),
        "loop": Case(
            "ScheduleInterleaved1F1B", part=lambda index: Several(index == 2 * size - 1), **EIGHT
        ),
        "vee": Case(
            "ScheduleZBVZeroBubble",
            vee=True,
            part=lambda index: Several(index == 2 * size - 1),
            **EIGHT,
        ),
    }
    return {name: train_both(case).differences for name, case in cases.items()}


@pytest.mark.skipif(not MAY_LACK_GRADIENTS, reason="this torch expects a gradient for each output")
def test_outputs_without_a_gradient(ranks: Any) -> None:
    for found in ranks(2)(_lack_gradients):
        for name, changes in found.items():
            assert not changes, f"{name}: {changes[:4]}"


def _fail_at_first(victim: int) -> tuple[str, list[str]]:
    """Fail in the first step, before any sent message shows the number of its tensors."""
    size, found, text = dist.get_world_size(), [], ""
    for is_failing in (False, True):
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": "1f1b"}})
        case = Case(part=lambda index: Several(index == size - 1), steps=1)
        schedule, parts = make_schedule(case)
        if is_failing:
            _fail_after_inference(schedule, parts[0], dist.get_rank() == victim)
            try:
                _call(schedule, case, 0)
            except RuntimeError as error:
                text = str(error.__cause__ or error)
            parts[0].fails = False  # type: ignore[assignment]
            parts[0].zero_grad()
        found.append([_call(schedule, case, 1), _look(parts)])
        ovpatch.revert()
    return text, differences(*found)


def _fail_after_inference(schedule: Any, part: nn.Module, fails: bool) -> None:
    initialize = schedule._initialize_stage

    def call(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        part.fails = fails  # type: ignore[assignment]
        del schedule._initialize_stage

    schedule._initialize_stage = call
    call.__signature__ = inspect.signature(initialize)  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_first_step_that_fails(ranks: Any, victim: int) -> None:
    for text, changes in ranks(3)(_fail_at_first, victim):
        assert "planted" in text
        assert not changes


def _load_lowered(path: str) -> tuple[list[str], int]:
    case = Case("ScheduleZBVZeroBubble", vee=True, **EIGHT)
    made, _ = make_schedule(case)
    if dist.get_rank() == 0:
        made._dump_csv(path)
    dist.barrier()

    def run() -> list[Any]:
        _, parts = make_schedule(case)
        stages = [
            Stage(part, index, 4, torch.device("cpu"))
            for part, index in zip(parts, (dist.get_rank(), 3 - dist.get_rank()), strict=True)
        ]
        schedule = schedules._PipelineScheduleRuntime(
            stages, case.microbatches, loss_fn=nn.functional.mse_loss
        )
        schedule._load_csv(path, format="compute_comms")
        return [[_call(schedule, case, seed), _look(parts)] for seed in range(2)]

    stock = run()
    ovpatch.apply("pipeline")
    before = counters()["steps"]
    return differences(stock, run()), counters()["steps"] - before


def test_a_loaded_order_with_its_transfers_and_waits(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2)(_load_lowered, str(tmp_path / "order.csv")) == [([], 2)] * 2

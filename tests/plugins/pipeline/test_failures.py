"""A step that fails on one rank names it on all ranks, and the next steps are right."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ovpatch
from ovpatch_plugins.pipeline.runtime import step_failures as failures
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.cases import (
    Case,
    counters,
    device,
    differences,
    list_params,
    make_schedule,
    run_steps,
)
from tests.plugins.pipeline.models import ROWS, WIDTH, Block, Part
from tests.support.rarely import ALL_CASES, RARELY

SIX = ROWS * 6


class Bomb(nn.Module):
    """A block that fails in its forward, in the backward of its output, or in a weight gradient, once it is armed.

    Attributes:
        left: Calls until it fails, or None.
    """

    def __init__(self, where: str, delay_s: float = 0.0) -> None:
        super().__init__()
        self.block, self.where, self.delay_s = Block(), where, delay_s
        self.left: int | None = None
        self.block.down.weight.register_hook(lambda _grad: self._count("W"))

    def forward(self, x: Tensor) -> Tensor:
        self._count("F")
        y: Tensor = self.block(x)
        if y.requires_grad:
            y.register_hook(lambda _grad: self._count("B"))
        return y

    def _count(self, where: str) -> None:
        if where == self.where and self.left is not None:
            self.left -= 1
            if self.left < 0:
                time.sleep(self.delay_s)
                raise torch.OutOfMemoryError("out of memory, for a test.")


class Armed:
    """A training whose middle step fails on one rank."""

    def __init__(
        self, case: Case, victim: int | None, left: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.case, self.victim, self.left = case, victim, left
        self.schedule, self.parts = make_schedule(case, group)
        self.params = list_params(self.parts)
        self.optimizer = torch.optim.AdamW([param for _, param in self.params], lr=1e-2)

    def run(self) -> tuple[list[Any], str]:
        found = run_steps(self.case, self.schedule, self.params, self.optimizer, 0)
        text = "" if self.victim is None else self.fail()
        return found + run_steps(self.case, self.schedule, self.params, self.optimizer, 1), text

    def fail(self) -> str:
        bombs = [
            module for part in self.parts for module in part.modules() if isinstance(module, Bomb)
        ]
        for bomb in bombs:
            bomb.left = self.left if dist.get_rank() == self.victim else None
        rows = torch.ones(self.case.microbatches * ROWS, 2, WIDTH, device=device())
        text = ""
        try:
            is_first = any(stage.is_first for stage in list_stages(self.schedule))
            self.schedule.step(*((rows,) if is_first else ()), target=rows, losses=[])
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error} / {error.__cause__!r}"
        for bomb in bombs:
            bomb.left = None
        return text


def fail(
    where: str,
    cases: Sequence[tuple[int, int]],
    order: str,
    schedule: str = "Schedule1F1B",
    *,
    delay_s: float = 0.0,
    **options: Any,
) -> list[tuple[list[str], str]]:
    """Let a step fail for each victim and number of its call; return the differences afterwards, and the error."""
    more: dict[str, Any] = (
        {} if "1F1B" in schedule and "Inter" not in schedule else {"chunks": 2, "microbatches": 8}
    )
    case = Case(
        schedule,
        part=lambda _index: Part(Bomb(where, delay_s), Block()),
        steps=1,
        vee="ZBV" in schedule,
        **more,
    )
    stock, _ = Armed(case, None, 0).run()
    found = []
    for victim, left in cases:
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": order, **options}})
        failed = counters()["failed_steps"]
        patched, text = Armed(case, victim, left).run()
        assert counters()["failed_steps"] == failed + bool(text)
        ovpatch.revert()
        found.append((differences(stock, patched), text))
    return found


@pytest.mark.parametrize("where", ["F", "B", "W"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_a_failing_rank_is_named_and_the_next_steps_are_right(
    ranks: Any, where: str, schedule: str
) -> None:
    world = 3 if schedule == "Schedule1F1B" else 2
    victims = list(range(world))
    cases = [(victim, left) for victim in victims for left in (0, 2, 5)]
    # Every victim and every call remain, in different pairs.
    if not ALL_CASES:
        cases = cases[where == "B" :: 2]
    by_rank = ranks(world)(fail, where, cases, "zb-h1", schedule)
    for number, (victim, left) in enumerate(cases):
        for rank, results in enumerate(by_rank):
            wrong, text = results[number]
            assert not wrong, f"rank {rank}, failure {left} of rank {victim}: {wrong[:4]}"
            if rank == victim:
                assert "out of memory, for a test" in text
            # A rank whose step ended before the failure has a good step.
            elif text:
                assert text.startswith("PipelineRankError"), text
                assert f"rank {victim} failed in " in text
                assert "OutOfMemoryError" in text
                assert "zero_grad()" in text
            assert ".." not in text
        if where == "F":
            # Every rank waits for a tensor of this microbatch.
            assert all(results[number][1] for results in by_rank)


def _fail_in_fsdp(
    where: str, victims: Sequence[int], policy: MixedPrecisionPolicy, calls: Sequence[int]
) -> list[tuple[list[str], str]]:
    """Let a stage fail in both of its replicas; return the differences afterwards, and the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(module: nn.Module) -> nn.Module:
        fully_shard(module.blocks[0], mesh=mesh["dp"], mp_policy=policy)  # type: ignore[index, arg-type]
        return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)  # type: ignore[return-value]

    case = Case(part=lambda _index: Part(Bomb(where), Block()), wrap=wrap, steps=1)
    group, found = mesh["pp"].get_group(), []
    for victim, left in [(-1, 0), *itertools.product(victims, calls)]:  # the first does not fail
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
        armed = Armed(case, None if victim < 0 else dist.get_rank(), left, group)
        if mesh.get_local_rank("pp") != victim:
            armed.left = 10**6
        found.append(armed.run())
        ovpatch.revert()
    return [(differences(found[0][0], results), text) for results, text in found[1:]]


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("policy", "calls"),
    [(MixedPrecisionPolicy(), (1, 4)), pytest.param(HALF, (1, 4), marks=RARELY)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("where", ["F", "B"])
def test_gradients_of_a_failed_step_do_not_stay_in_fsdp(
    ranks: Any, where: str, policy: MixedPrecisionPolicy, calls: tuple[int, ...]
) -> None:
    cases = list(itertools.product((0, 1), calls))
    for rank, results in enumerate(ranks(4)(_fail_in_fsdp, where, (0, 1), policy, calls)):
        for (victim, left), (wrong, text) in zip(cases, results, strict=True):
            # The last stage may have ended its step when a B of the first one fails.
            assert "out of memory, for a test" in text or (where, victim, rank // 2) == (
                "B",
                0,
                1,
            ), rank
            assert not wrong, f"rank {rank}, failure {left} of stage {victim}: {wrong[:4]}"


class SlowStore:
    """A store over a slow network: values come late, but before the reply to a later request."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._late: threading.Thread | None = None

    def set(self, key: str, value: str) -> None:
        def arrive() -> None:
            time.sleep(0.5)
            self._store.set(key, value)

        self._late = threading.Thread(target=arrive)
        self._late.start()

    def __getattr__(self, name: str) -> Any:
        if self._late is not None:
            self._late.join()
        return getattr(self._store, name)


def _fail_over_a_slow_network() -> list[tuple[list[str], str]]:
    store = failures.group_store
    with mock.patch.object(failures, "group_store", lambda group: SlowStore(store(group))):
        return fail("F", [(0, 0)], "zb-h1")


def test_a_failure_is_known_before_the_messages_after_it(ranks: Any) -> None:
    for ((wrong, text),) in ranks(3)(_fail_over_a_slow_network):
        assert not wrong
        assert "out of memory, for a test" in text


def _fail_in_the_loss() -> tuple[list[str], str]:
    case = Case(steps=1)
    stock, _ = Armed(case, None, 0).run()
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    armed = Armed(case, 1, 0)
    schedule = armed.schedule
    first = run_steps(case, schedule, armed.params, armed.optimizer, 0)
    loss, calls = schedule._loss_fn, [0]

    def fail(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("a bad target")
        return loss(*args)

    schedule._loss_fn = fail
    rows, text = torch.ones(SIX, 2, WIDTH), ""
    try:
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
    except (ValueError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    schedule._loss_fn = loss
    return differences(
        stock, first + run_steps(case, schedule, armed.params, armed.optimizer, 1)
    ), text


def test_a_failing_loss(ranks: Any) -> None:
    (wrong, first), (also, last) = ranks(2)(_fail_in_the_loss)
    assert not wrong + also
    assert last == "ValueError: a bad target"
    assert "rank 1 failed in 1F2: ValueError: a bad target" in first


def _take_gradients_inside() -> str:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x if x.requires_grad else x.requires_grad_()
            y = self.linear(x)
            if not x.grad_fn and y.grad_fn and self.armed:
                (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                y = y + grad
            return y

        armed = False

    ovpatch.apply("pipeline", options={"pipeline": {"delay_wgrad_compute": "on"}})
    schedule, (part,) = make_schedule(Case(part=lambda _index: Inner()))
    rows = torch.randn(SIX, 2, WIDTH)
    inputs = (rows,) if dist.get_rank() == 0 else ()
    schedule.step(*inputs, target=rows)
    part.armed = True  # type: ignore[assignment]
    try:
        schedule.step(*inputs, target=rows)
    except RuntimeError as error:
        return f"{error} {error.__cause__}"
    return ""


def test_gradients_inside_a_forward_are_an_error_not_a_wrong_result(ranks: Any) -> None:
    for text in ranks(2)(_take_gradients_inside):
        assert "OVPATCH_PIPELINE_DELAY_WGRAD_COMPUTE=off" in text


def _differ_in_options() -> str:
    ovpatch.apply(
        "pipeline", options={"pipeline": {"schedule": "zb-h1" if dist.get_rank() else "1f1b"}}
    )
    schedule, _ = make_schedule(Case())
    rows = torch.randn(SIX, 2, WIDTH)
    try:
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_other_options_are_an_error(ranks: Any) -> None:
    for text in ranks(2)(_differ_in_options):
        assert "schedule" in text
        assert "zb-h1" in text


def read_failure_on_both_ranks() -> Any:
    step_failures = failures.StepFailures(dist.group.WORLD)
    step_failures.step = 3
    if dist.get_rank() == 0:
        assert step_failures.read() == ""
        step_failures.publish("rank 0 failed")
        step_failures.wait_for_readers()
        return dist.distributed_c10d._get_process_group_store(dist.group.WORLD).check(
            [f"{step_failures._key()}/read by 1"]
        )
    time.sleep(0.3)
    while not (text := step_failures.read()):
        time.sleep(0.01)
    return text


def test_a_rank_that_hosts_the_store_fails_after_its_peers_have_read_the_failure(ranks):
    assert ranks(2)(read_failure_on_both_ranks) == [True, "rank 0 failed"]


def read_a_closed_store() -> str:
    """Read a store whose host has exited after its last step."""
    step_failures = failures.StepFailures(dist.group.WORLD)
    closed = mock.Mock(side_effect=dist.DistNetworkError("broken pipe"))
    store = mock.Mock(check=closed, set=closed)
    with mock.patch.object(failures, "group_store", return_value=store):
        step_failures.publish("the error of the computation is what the script sees")
        found = step_failures.read()
    assert closed.call_count == 2
    return found


def test_a_closed_store_reports_no_failure(ranks):
    assert ranks(2)(read_a_closed_store) == ["", ""]

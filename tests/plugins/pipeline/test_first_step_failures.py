"""A rank fails while torch infers shapes in the first step: all ranks name it, and the next steps are right."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_store
from ovpatch_plugins.pipeline.runtime.step_failures import Vote
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.cases import Case, differences, list_params, make_schedule, run_steps
from tests.plugins.pipeline.models import ROWS, WIDTH, Block, Part
from tests.plugins.pipeline.test_failures import Bomb
from tests.support import patience, signs

#: The limit in which all ranks must raise. Torch's receives would wait for half an hour.
SOON_S = 50.0

#: Whether torch also infers the shapes of gradients, and infers all shapes again after an evaluation.
INFERS_BACKWARDS = hasattr(PipelineStage, "_recv_meta")


class First:
    """A training whose first steps fail on one rank.

    Args:
        case: The pipeline.
        group: Its group.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup | None = None) -> None:
        self.case = case
        self.schedule, self.parts = make_schedule(case, group)
        self.params = list_params(self.parts)
        self.optimizer = torch.optim.AdamW([param for _, param in self.params], lr=1e-2)
        self.stages = list_stages(self.schedule)

    def train(self, seed: int = 0) -> list[Any]:
        return run_steps(self.case, self.schedule, self.params, self.optimizer, seed)

    def fail(self, part: int | None, losses: Any = None) -> tuple[str, float]:
        """Make a step that fails in a part of this rank; return the error and the seconds it took."""
        bombs = (
            []
            if part is None
            else [module for module in self.parts[part].modules() if isinstance(module, Bomb)]
        )
        for bomb in bombs:
            bomb.left = 0
        begin = time.monotonic()
        text = self._call(losses)
        for bomb in bombs:
            bomb.left = None
        return text, time.monotonic() - begin

    def _call(self, losses: Any) -> str:
        rows = torch.ones(self.case.microbatches * ROWS, 2, WIDTH)
        is_first = any(stage.is_first for stage in self.stages)
        try:
            self.schedule.step(*((rows,) if is_first else ()), target=rows, losses=losses)
        except (RuntimeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def evaluate(self) -> None:
        rows = torch.ones(self.case.microbatches * ROWS, 2, WIDTH)
        is_first = any(stage.is_first for stage in self.stages)
        self.schedule.eval(*((rows,) if is_first else ()), target=rows)


def bombed(where: str) -> Case:
    """Return a pipeline whose stages can fail."""
    return Case(part=lambda _index: Part(Bomb(where), Block()), steps=1, microbatches=8)


def check(by_rank: Sequence[Any], victim: int, error: str) -> None:
    """Check that all ranks name the failing one soon, and that training continued with the bits of stock PyTorch."""
    for rank, (text, seconds, wrong) in enumerate(by_rank):
        assert not wrong, f"rank {rank}, failure of rank {victim}: {wrong[:4]}"
        assert seconds < SOON_S, f"rank {rank} raised after {seconds} s"
        if rank == victim:
            assert text.startswith(error), text
        else:
            assert text.startswith("PipelineRankError"), (
                f"rank {rank}, failure of rank {victim}: {text}"
            )
            assert f"rank {victim} failed " in text
            assert error in text


SCHEDULES = {
    "1F1B": {"schedule": "Schedule1F1B"},
    "Interleaved1F1B": {"schedule": "ScheduleInterleaved1F1B", "chunks": 2},
    "ZBV": {"schedule": "ScheduleZBVZeroBubble", "chunks": 2, "vee": True},
}


def _fail(
    where: str, names: Sequence[str], victims: Sequence[int]
) -> list[tuple[str, float, list[str]]]:
    found = []
    for name in names:
        case = replace(bombed(where), **SCHEDULES[name])
        stock = First(case).train()
        for victim in victims:
            ovpatch.apply("pipeline")
            first = First(case)
            text, seconds = first.fail(len(first.parts) - 1 if dist.get_rank() == victim else None)
            found.append((text, seconds, differences(stock, first.train())))
            ovpatch.revert()
    return found


# In each case, the last stage of a victim fails. The first stage of a pipeline has no backward while shapes are
# inferred.
CASES = [
    ("F", 2, ("1F1B", "Interleaved1F1B", "ZBV"), (0, 1)),
    ("F", 4, ("1F1B",), (0, 1, 3)),
    ("B", 2, ("Interleaved1F1B", "ZBV"), (0, 1)),
    ("B", 4, ("1F1B",), (1, 3)),
]


@pytest.mark.parametrize(("where", "world", "names", "victims"), CASES)
def test_a_rank_that_fails_in_the_first_step_is_named(
    ranks: Any, where: str, world: int, names: tuple[str, ...], victims: tuple[int, ...]
) -> None:
    if where == "B" and not INFERS_BACKWARDS:
        pytest.skip("this torch infers no shapes of gradients")
    for number, by_rank in enumerate(zip(*ranks(world)(_fail, where, names, victims), strict=True)):
        check(
            by_rank, victims[number % len(victims)], "OutOfMemoryError: out of memory, for a test"
        )


def _fail_again_and_again() -> list[tuple[str, float, list[str]]]:
    """Fail on each rank in turn, before the same schedule trains, and after an evaluation."""
    case = bombed("F")
    stock = First(case)
    expected = [stock.train(0)]
    stock.evaluate()
    expected.append(stock.train(1))
    ovpatch.apply("pipeline")
    first, size = First(case), dist.get_world_size()
    texts = [first.fail(0 if dist.get_rank() == victim else None) for victim in range(size)]
    found = [first.train(0)]
    first.evaluate()
    if INFERS_BACKWARDS:  # torch 2.11 infers once
        texts += [first.fail(0 if dist.get_rank() == victim else None) for victim in range(size)]
    found.append(first.train(1))
    wrong = differences(expected, found)
    return [(*failure, wrong) for failure in texts]


def test_failures_on_all_ranks_sequentially(ranks: Any) -> None:
    for number, by_rank in enumerate(zip(*ranks(3)(_fail_again_and_again), strict=True)):
        check(by_rank, number % 3, "OutOfMemoryError: out of memory, for a test")


def _fail_around_the_inference(victim: int, *, is_after: bool) -> tuple[str, float, list[str]]:
    """Fail on wrong inputs before the inference, or after this rank has done its part of the inference."""
    case = bombed("F")
    stock = First(case).train()
    ovpatch.apply("pipeline")
    first = First(case)
    is_victim = dist.get_rank() == victim
    if not is_after:
        text, seconds = first.fail(None, losses=() if is_victim else None)
    else:
        own = vars(first.schedule)
        infer = first.schedule._initialize_stage

        def fail(*args: Any) -> None:
            infer(*args)
            if is_victim:
                raise TypeError("losses must be lists")

        own["_initialize_stage"] = fail
        fail.__signature__ = inspect.signature(infer)  # type: ignore[attr-defined]
        text, seconds = first.fail(None)
        del own["_initialize_stage"]
    return text, seconds, differences(stock, first.train())


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_fails_around_its_inference(ranks: Any, victim: int, is_after: bool) -> None:
    check(
        ranks(3)(_fail_around_the_inference, victim, is_after=is_after),
        victim,
        "TypeError: losses must be",
    )


def _fail_on_inputs_of_a_later_step() -> tuple[str, float, list[str]]:
    case = bombed("F")
    stock = First(case)
    expected = [stock.train(0), stock.train(1)]
    ovpatch.apply("pipeline")
    first = First(case)
    found = [first.train(0)]
    text, seconds = first.fail(None, losses=() if dist.get_rank() == 1 else None)
    found.append(first.train(1))
    return text, seconds, differences(expected, found)


def test_wrong_inputs_of_a_later_step(ranks: Any) -> None:
    check(ranks(2)(_fail_on_inputs_of_a_later_step), 1, "TypeError: losses must be")


def _exit(victim: int) -> tuple[list[str], float]:
    """Leave the inference on one rank by an exception that ends a process, and try once more."""

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.leaves = Block(), False

        def forward(self, x: Tensor) -> Tensor:
            if self.leaves:
                raise SystemExit("the stage ends the process")
            y: Tensor = self.block(x)
            return y

    ovpatch.apply("pipeline")
    first = First(replace(bombed("F"), part=lambda _index: Leaving()))
    first.parts[0].leaves = dist.get_rank() == victim  # type: ignore[assignment]
    texts, begin = [], time.monotonic()
    for _ in range(2):
        try:
            texts.append(first.fail(None)[0])
        except SystemExit as left:
            texts.append(f"left: {left}")
    return texts, time.monotonic() - begin


def test_a_rank_that_leaves_the_inference_for_good(ranks: Any) -> None:
    for rank, (texts, seconds) in enumerate(ranks(3)(_exit, 1)):
        assert seconds < SOON_S
        assert texts[0].startswith("left: " if rank == 1 else "PipelineRankError"), texts
        for text in texts[rank == 1 :]:
            assert (
                "rank 1 failed during torch's inference of shapes: SystemExit: the stage ends the process"
                in text
            )


def _leave_a_vote() -> list[str]:
    """Decide twice; rank 1 leaves after rank 0 has decided by rank 1's announcement."""
    assert dist.group.WORLD is not None
    vote = Vote(dist.group.WORLD, "test")
    if dist.get_rank():
        vote.announce("the reason")
        signs.await_others("decided")
        vote.leave("the reason")
        signs.give("left")
        return []
    while not vote.read():
        time.sleep(0.001)
    decisions = [vote.take(vote.read())]
    signs.give("decided")
    signs.await_others("left")
    return [*decisions, vote.take(""), vote.take("")]


def test_a_rank_that_leaves_after_its_announcement(ranks: Any) -> None:
    assert ranks(2)(_leave_a_vote)[0] == ["the reason"] * 3


def _fail_in_a_grid(kind: str, victims: Sequence[int]) -> tuple[str, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(module: nn.Module) -> nn.Module:
        if kind == "ddp":
            return DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        if kind == "fsdp":
            return _shard(module, mesh["dp"])
        return (
            module
            if mesh.get_local_rank("pp")
            else _shard(module, mesh["dp"], reshard_after_forward=False)
        )

    case = replace(bombed("F"), wrap=wrap)
    group = mesh["pp"].get_group()
    stock = First(case, group).train()
    ovpatch.apply("pipeline")
    first = First(case, group)
    text, seconds = first.fail(0 if dist.get_rank() in victims else None)
    return text, seconds, differences(stock, first.train())


def _shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    fully_shard(module.blocks[0], mesh=mesh, **options)  # type: ignore[index, arg-type]
    return fully_shard(module, mesh=mesh, **options)  # type: ignore[return-value]


# Ranks of stages 0 and 1, in replicas 0 and 1.
@pytest.mark.parametrize("victim", [0, 3])
def test_the_other_replicas_raise_a_failure(ranks: Any, victim: int) -> None:
    check(
        ranks(4)(_fail_in_a_grid, "ddp", [victim]),
        victim,
        "OutOfMemoryError: out of memory, for a test",
    )


def test_a_stage_without_replicas_raises_a_failure(ranks: Any) -> None:
    check(
        ranks(4)(_fail_in_a_grid, "fsdp on the first stage", [2]),
        2,
        "OutOfMemoryError: out of memory, for a test",
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_in_fsdp_are_sharded_after_a_failure(ranks: Any, stage: int) -> None:
    # If only one replica failed, the other one would wait for its parameters.
    victims = [2 * stage, 2 * stage + 1]
    for rank, (text, seconds, wrong) in enumerate(ranks(4)(_fail_in_a_grid, "fsdp", victims)):
        assert not wrong, f"rank {rank}: {wrong[:4]}"
        assert seconds < SOON_S
        assert "out of memory, for a test" in text
        assert text.startswith("OutOfMemoryError" if rank in victims else "PipelineRankError"), text


def _count_keys() -> list[int]:
    """Return the number of keys in the store after each of some failed inferences and some good ones."""
    ovpatch.apply("pipeline")
    store, counts = group_store(dist.group.WORLD), []
    assert store is not None
    first = First(bombed("F"))
    for number in range(8):
        if number % 4 > 1 and INFERS_BACKWARDS:
            # Torch infers again after an evaluation.
            first.evaluate()
        if number < 4:
            first.fail(0 if dist.get_rank() else None)
        else:
            first.train()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_nothing_stays_in_the_store(ranks: Any) -> None:
    for counts in ranks(2)(_count_keys):
        assert counts[1:4] == [counts[1]] * 3, counts
        assert counts[5:] == [counts[5]] * 3, counts
        assert counts[-1] <= counts[1], counts


def _wait_too_long(limit: float) -> tuple[str, float, list[str]]:
    """Have rank 1 wait for the shapes of rank 0 for longer than the timeout of the group."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.is_late = Block(), False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_late:
                signs.await_others("waited")
            y: Tensor = self.block(x)
            return y

    group = dist.new_group(timeout=timedelta(seconds=limit))
    assert group is not None
    case = replace(bombed("F"), part=lambda _index: Late())
    stock = First(case, group).train()
    ovpatch.apply("pipeline")
    first = First(case, group)
    first.parts[0].is_late = dist.get_rank() == 0  # type: ignore[assignment]
    text, seconds = first.fail(None)
    signs.give("waited")
    first.parts[0].is_late = False  # type: ignore[assignment]
    return text, seconds, differences(stock, first.train())


def test_the_inference_obeys_the_timeout_of_the_group(ranks: Any) -> None:
    limit = round(patience.lengthen(2))
    error = (
        "RuntimeError: ovpatch: stage 1 waits for the shapes of stage 0, which have not come from "
        f"rank 0 within {limit} s."
    )
    check(ranks(2)(_wait_too_long, limit), 1, error)


def _count_forwards() -> list[int]:
    """Return the numbers of calls of modules in the first step of a schedule, in stock PyTorch and patched."""
    counts = []
    for patched in (False, True):
        if patched:
            ovpatch.apply("pipeline")
        for name in SCHEDULES:
            first = First(replace(Case(steps=1, microbatches=8), **SCHEDULES[name]))
            first.train()
            blocks = [
                module
                for part in first.parts
                for module in part.modules()
                if isinstance(module, Block)
            ]
            counts.append(sum(block.runs for block in blocks))
    return counts


def test_modules_are_called_as_often_as_in_stock_pytorch(ranks: Any) -> None:
    for counts in ranks(2)(_count_forwards):
        assert counts[:3] == counts[3:]
        assert counts[0] == 2 * (8 + 1), "two blocks, eight microbatches and the inference"

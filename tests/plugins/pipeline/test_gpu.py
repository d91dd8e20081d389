"""Pipelines over NCCL are bitwise stock's, and what only streams can get wrong.

Each test is one job of many cases. ``pytest -m gpu --share-gpu`` runs all ranks on one GPU.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_values
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.copy_messages import PointToPoint
from ovpatch.overlap.pipelining import copied_messages
from ovpatch.overlap.pipelining.edges import Slots
from ovpatch.overlap.pipelining.order_table import ORDERS
from ovpatch_plugins.pipeline.pipeline_report import list_schedules
from tests.plugins.pipeline.cases import (
    Case,
    counters,
    device,
    differences,
    feature_report,
    make_schedule,
    train,
)
from tests.plugins.pipeline.models import Block, Part
from tests.plugins.pipeline.test_failures import fail

SHAPE = (32, 256)
ALL_ORDERS = ("as-given", *ORDERS)


def _wide(_index: int) -> nn.Module:
    return Part(*(Block(width=SHAPE[1], hidden=512) for _ in range(2)))


class Sleep(nn.Module):
    """Keeps the device busy, for some milliseconds, in the forward of stages of odd index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.cycles = 5_000_000 * (index % 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.cycles and x.is_cuda:
            torch.cuda._sleep(self.cycles)
        return x


@contextlib.contextmanager
def _on_a_side_stream() -> Iterator[None]:
    if device().type == "cpu":
        yield
        return
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _cases(world: int) -> dict[str, tuple[Case, tuple[str, ...]]]:
    several: dict[str, Any] = {
        "microbatches": 2 * world,
        "chunks": 2,
        "shape": SHAPE,
        "part": _wide,
        "steps": 3,
    }
    one: dict[str, Any] = {**several, "microbatches": 2 * world + 1, "chunks": 1}
    late: Callable[[int], nn.Module] = lambda index: Part(Sleep(index), Block(width=SHAPE[1]))  # noqa: E731
    found: dict[str, tuple[Case, tuple[str, ...]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        found[f"1F1B {dtype}"] = Case(dtype=dtype, **one), ALL_ORDERS
        found[f"ZBV {dtype}"] = (
            Case("ScheduleZBVZeroBubble", vee=True, dtype=dtype, **several),
            ("as-given",),
        )
        found[f"interleaved {dtype}"] = (
            Case("ScheduleInterleaved1F1B", dtype=dtype, **several),
            ("as-given",),
        )
    found["GPipe"] = Case("ScheduleGPipe", **one), ("as-given", "zb-h1")
    found["interleaved zero bubble"] = (
        Case("ScheduleInterleavedZeroBubble", **several),
        ("as-given",),
    )
    found["DualPipeV"] = Case("ScheduleDualPipeV", vee=True, **several), ("as-given",)
    found["late senders"] = Case(**{**one, "part": late}), ("as-given", "zb-h2")
    found["side stream"] = Case(context=_on_a_side_stream, **one), ("zb-h1",)
    found["checkpoint"] = (
        Case(**{**one, "part": lambda _index: Part(Block(0.0, False, width=SHAPE[1]))}),
        ("zb-h1",),
    )
    return found


def _compare(
    case: Case, orders: tuple[str, ...], group: Any = None, seed: int = 0, transport: str = "c10d"
) -> dict[str, list[str]]:
    """Return what differs from stock, by order."""
    stock, found = train(case, group, seed), {}
    for order in orders:
        ovpatch.apply(
            "pipeline", options={"pipeline": {"schedule": order, "p2p_transport": transport}}
        )
        before = counters()
        found[order] = differences(stock, train(case, group, seed))
        after = counters()
        steps = after["steps"] - before["steps"]
        # With DistributedDataParallel stock computes the first step.
        if steps + after["stock_steps"] - before["stock_steps"] != case.steps or not steps:
            found[order].append(f"{steps} steps")
        copied = after["copied_messages"] - before["copied_messages"]
        if copied != (after["messages"] - before["messages"] if _copies(transport, group) else 0):
            found[order].append(f"{copied} messages by copy engines")
        if order.startswith("zb") and after["weight_grads"] == before["weight_grads"]:
            found[order].append("no weight gradient was deferred")
        ovpatch.revert()
    return found


def _copies(transport: str, group: Any) -> bool:
    """Tell whether copy engines carry the messages of a group: of auto, where its ranks have a GPU each."""
    if transport != "auto":
        return transport == "copies"
    uuids: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(uuids, str(torch.cuda.get_device_properties(device()).uuid), group=group)
    return len(set(uuids)) == len(uuids)


def _compare_all(transport: str = "c10d") -> dict[str, dict[str, list[str]]]:
    cases = _cases(dist.get_world_size())
    return {name: _compare(*case, transport=transport) for name, case in cases.items()}


def _assert_equal(by_rank: list[dict[str, dict[str, list[str]]]]) -> None:
    for rank, found in enumerate(by_rank):
        for name, orders in found.items():
            for order, changes in orders.items():
                assert not changes, f"rank {rank}, {name}, {order}: {changes[:4]}"


@pytest.mark.gpu(2)
def test_two_ranks(ranks: Any) -> None:
    _assert_equal(ranks(2)(_compare_all, backend="nccl", timeout=120))


@pytest.mark.gpu(2)
def test_two_ranks_by_copies(ranks: Any) -> None:
    _assert_equal(ranks(2)(_compare_all, "copies", backend="nccl", timeout=120))


def _compare_some() -> dict[str, dict[str, list[str]]]:
    cases = _cases(dist.get_world_size())
    return {
        name: _compare(*cases[name], transport="auto")
        for name in ("1F1B torch.float32", "GPipe", "late senders")
    }


@pytest.mark.gpu(2)
def test_what_auto_means(ranks: Any) -> None:
    _assert_equal(ranks(2)(_compare_some, backend="nccl", timeout=120))


def _lack_memory() -> tuple[dict[str, list[str]], list[str]]:
    """Have rank 1 find too little memory for slots, though the trial had enough."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("CUDA driver error: out of memory")

    with contextlib.ExitStack() as stack:
        if dist.get_rank():
            stack.enter_context(mock.patch.object(memory, "_allocate_local", refuse))
        # The trial of another test may be kept.
        stack.enter_context(mock.patch.object(copied_messages, "_try_copies", return_value=""))
        case, _ = _cases(dist.get_world_size())["1F1B torch.float32"]
        stock = train(case)
        ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
        wrong = differences(stock, train(case))
        return {"zb-h1": wrong}, list(list_schedules()[-1].transport)


@pytest.mark.gpu(2, own=True)
def test_without_memory_for_slots_messages_go_over_nccl(ranks: Any) -> None:
    for found, told in ranks(2)(_lack_memory, backend="nccl", timeout=120):
        assert found == {"zb-h1": []}
        assert "not by copy engines" in told[0]
        assert "MiB of symmetric memory" in told[0]


@pytest.mark.gpu(4)
def test_four_ranks(ranks: Any) -> None:
    _assert_equal(ranks(4)(_compare_all, backend="nccl", timeout=120))


@pytest.mark.gpu(4)
def test_four_ranks_by_copies(ranks: Any) -> None:
    _assert_equal(ranks(4)(_compare_all, "copies", backend="nccl", timeout=120))


def _exchange(repetitions: int) -> list[int]:
    """Send random messages both ways with ranks and streams that are late at random; return those that are wrong."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    edges = [(0, 1), (1, 0)]
    box = PointToPoint(dist.group.WORLD, device, edges, slots=2, slot_bytes=1 << 20, timeout_s=60.0)
    dist.barrier()
    assert not box.unheard()
    dist.barrier()
    late, same, wrong = random.Random(rank), random.Random(7), []
    side = (
        torch.cuda.Stream()
    )  # one: torch has 32, and would hand out those of the edges, which wait
    for repetition in range(repetitions):
        box.begin(str)
        sizes = [same.randint(0, 400_000) for _ in range(same.randint(1, 3))]
        if late.random() < 0.3:
            time.sleep(late.random() * 2e-3)
        if late.random() < 0.5:
            torch.cuda._sleep(int(late.random() * 2e6))
        works, given, got = [], [], []
        stream = side if late.random() < 0.3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in range(3):
                sent = [
                    torch.full((size,), float(repetition + number + rank), device=device)
                    for size in sizes
                ]
                works.append(box.send(sent, 1 - rank))
                given.append(sent)
                got.append([torch.full((size,), torch.nan, device=device) for size in sizes])
            receiving = [box.receive(tensors, 1 - rank) for tensors in got]
            for work in reversed(receiving):
                work.wait()
            for work, sent in zip(
                works, given, strict=True
            ):  # behind the receives, for which the peer may wait
                work.wait()
                for tensor in sent:
                    tensor.fill_(torch.nan)
            box.end()
            torch.cuda.current_stream().synchronize()
        for number, tensors in enumerate(got):
            expected = float(repetition + number + 1 - rank)
            wrong += [] if all(bool((one == expected).all()) for one in tensors) else [repetition]
    assert box.drain()
    return wrong


@pytest.mark.gpu(2)
def test_messages_of_late_ranks_and_streams(ranks: Any) -> None:
    assert ranks(2)(_exchange, 200, backend="nccl", timeout=120) == [[], []]


def _stay_away() -> list[str]:
    """Let rank 1 not come to the second step; rank 0 waits for it on its stream."""
    ovpatch.apply("pipeline", options={"pipeline": {"p2p_transport": "copies"}})
    schedule, _ = make_schedule(Case(shape=SHAPE, part=_wide))
    rows = torch.randn(6 * SHAPE[0], 2, SHAPE[1], device=device())
    inputs = (rows,) if dist.get_rank() == 0 else ()
    schedule.step(*inputs, target=rows)
    torch.cuda.synchronize()
    ((_, opened),) = group_values(Slots, dist.group.WORLD)
    opened[0][1].timeout_s = 0.5
    texts = []
    for _ in range(2 if dist.get_rank() == 0 else 0):
        try:
            schedule.step(*inputs, target=rows)
        except RuntimeError as error:
            texts.append(str(error))
    torch.cuda.synchronize()
    dist.barrier()
    return texts


@pytest.mark.gpu(2)
def test_a_stream_does_not_wait_without_end_for_a_rank_that_stays_away(ranks: Any) -> None:
    first, second = ranks(2)(_stay_away, backend="nccl", timeout=120)[0]
    assert "messages of a step have not come from peers" in first
    assert "start the job again" in second


def _replicated() -> dict[str, dict[str, list[str]]]:
    """Compare by both transports on one mesh, since a process can make only one (see the test)."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    group, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
    one: dict[str, Any] = {"microbatches": 5, "shape": SHAPE, "part": _wide, "steps": 3}

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=replicas)

    cases = {
        "1F1B": (Case(wrap=wrap, **one), ("as-given", "zb-h1", "zb-h2")),
        "1F1B bf16": (Case(wrap=wrap, dtype=torch.bfloat16, **one), ("zb-h1",)),
    }
    seed = mesh.get_local_rank("dp")
    return {
        f"{name}, {transport}": _compare(case, orders, group, seed, transport)
        for transport in ("c10d", "copies")
        for name, (case, orders) in cases.items()
    }


@pytest.mark.gpu(4)
def test_two_replicas_of_two_stages(ranks: Any) -> None:
    # torch 2.11 dies where a process splits NCCL's group a second time, so the processes are new.
    ranks.close()
    _assert_equal(ranks(4)(_replicated, backend="nccl", timeout=120))


def _fail_everywhere(transport: str) -> list[tuple[str, int, list[str], str]]:
    """The failing rank's host is late, and those of the others are ahead of their devices."""
    found = []
    for where, schedule in (
        ("F", "Schedule1F1B"),
        ("B", "Schedule1F1B"),
        ("F", "ScheduleZBVZeroBubble"),
    ):
        victims = list(range(dist.get_world_size()))
        results = fail(
            where,
            [(one, 1) for one in victims],
            "zb-h1",
            schedule,
            delay_s=0.2,
            p2p_transport=transport,
        )
        found += [
            (f"{where} of {schedule}", victim, *result)
            for victim, result in zip(victims, results, strict=True)
        ]
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["c10d", "copies"])
def test_a_failing_rank_is_named_on_all(ranks: Any, transport: str) -> None:
    for rank, found in enumerate(ranks(2)(_fail_everywhere, transport, backend="nccl", timeout=60)):
        for name, victim, wrong, text in found:
            assert not wrong, f"rank {rank}, {name} on rank {victim}: {wrong[:4]}"
            if rank == victim:
                assert "out of memory, for a test" in text
            elif text or name.startswith("F"):  # behind a B, a rank may have its step
                assert text.startswith("PipelineRankError"), (
                    f"rank {rank}, {name} on rank {victim}: {text!r}"
                )
                assert f"rank {victim} failed in " in text


def _watch() -> tuple[list[int], str]:
    """Return the memory behind each step, and the remarks."""
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    case = Case(
        microbatches=6, shape=SHAPE, part=lambda index: Part(Sleep(1), Block(width=SHAPE[1]))
    )
    schedule, (part,) = make_schedule(case)
    rows = torch.randn(6 * SHAPE[0], 2, SHAPE[1], device=device())
    memory = []
    for _ in range(9):
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows, return_outputs=False)
        torch.cuda.synchronize()
        for param in part.parameters():
            param.grad = None
        memory.append(torch.cuda.memory_allocated())
    return memory, " ".join(feature_report().remarks)


@pytest.mark.gpu(2)
def test_memory_is_freed_and_costs_are_the_devices(ranks: Any) -> None:
    for rank, (held, remarks) in enumerate(ranks(2)(_watch, backend="nccl", timeout=60)):
        assert len(set(held[2:])) == 1, held
        forward = float(
            remarks.split(f"stage {rank}: F ")[-1].split(",")[0]
        )  # workers have run others before
        assert forward > 2, remarks  # milliseconds; issuing it takes none
        assert "% of a step measured" in remarks

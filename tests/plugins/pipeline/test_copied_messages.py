"""Pipelines whose messages go through slots of the receivers' memory, among processes that share memory on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ovpatch
from ovpatch.overlap.copy_engine import point_to_point
from ovpatch.overlap.copy_engine.point_to_point import PointToPoint, round_up
from ovpatch.overlap.symm_mem import memory
from ovpatch_plugins.pipeline import takeover, transport
from tests.plugins.pipeline.cases import Case, Outcome, differences, make_schedule, train, train_both
from tests.plugins.pipeline.models import ROWS, WIDTH
from tests.plugins.pipeline.test_failures import fail
from tests.support import windows

COPIES = {"p2p_transport": "copies"}


@contextlib.contextmanager
def copying(*, to_peers: bool = True) -> Iterator[list[PointToPoint]]:
    """Let processes on a CPU copy to each other's memory; yield what is made for that."""
    made: list[PointToPoint] = []

    def make(*args: Any, **kwargs: Any) -> PointToPoint:
        made.append(PointToPoint(*args, allocate=windows.allocate, **kwargs))
        return made[-1]

    with (
        mock.patch.object(memory, "unsupported_reason", return_value=""),
        mock.patch.object(point_to_point, "PointToPoint", make),
        mock.patch.object(windows.HostDriver, "writes_to_peers", to_peers),
    ):
        yield made


def _compare(to_peers: bool) -> dict[str, Outcome]:
    world, several = dist.get_world_size(), {"microbatches": 2 * dist.get_world_size(), "chunks": 2}
    cases: dict[str, tuple[Case, str]] = {
        "1F1B": (Case(microbatches=2 * world + 1), "as-given"),
        "ZB-H1": (Case(dtype=torch.bfloat16), "zb-h1"),
        "ZB-H2": (Case(), "zb-h2"),
        "GPipe": (Case("ScheduleGPipe"), "as-given"),
        "V": (Case("ScheduleZBVZeroBubble", vee=True, **several), "as-given"),
        "interleaved": (Case("ScheduleInterleaved1F1B", **several), "as-given"),
        "loop": (Case("ScheduleLoopedBFS", **several), "as-given"),
    }
    with copying(to_peers=to_peers):
        return {name: train_both(case, order, **COPIES) for name, (case, order) in cases.items()}


@pytest.mark.parametrize(("world", "to_peers"), [(2, True), (4, False)])
def test_every_order_gives_stocks_bits(ranks: Any, world: int, to_peers: bool) -> None:
    for rank, found in enumerate(ranks(world)(_compare, to_peers)):
        for name, outcome in found.items():
            assert not outcome.differences, f"rank {rank}, {name}: {outcome.differences[:4]}"
            assert outcome.counters["copied_messages"] == outcome.counters["messages"] > 0, name
            assert any("carried by copy engines" in text for text in outcome.remarks)


def _share() -> tuple[list[str], list[int], bool]:
    """Train pipelines one after the other, the second of which has larger messages."""
    cases = [Case(), Case(shape=(3 * ROWS, WIDTH)), Case()]
    stock = [train(case) for case in cases]
    with copying() as made:
        ovpatch.apply("pipeline", options={"pipeline": COPIES})
        wrong = differences(stock, [train(case) for case in cases])
        ovpatch.revert()
        return wrong, [one.slot_bytes for one in made], all(one._closed.is_set() for one in made)


def test_schedules_of_a_group_share_slots(ranks: Any) -> None:
    small, large = (round_up(factor * ROWS * 2 * WIDTH * 4) for factor in (1, 3))
    assert ranks(2)(_share) == [([], [small, large], True)] * 2


def _cut() -> list[str]:
    """Train with slots that hold a third of a message."""
    case = Case(microbatches=3)
    stock = train(case)
    with copying() as made:
        make = point_to_point.PointToPoint

        def make_small(*args: Any, slot_bytes: int, slots: int, **kwargs: Any) -> PointToPoint:
            return make(*args, slot_bytes=slot_bytes // 3, slots=3 * slots, **kwargs)

        with mock.patch.object(point_to_point, "PointToPoint", make_small):
            ovpatch.apply("pipeline", options={"pipeline": COPIES})
            wrong = differences(stock, train(case))
            ovpatch.revert()
        assert made[0]._in[1 - dist.get_rank()].number == 3 * case.microbatches * case.steps
    return wrong


def test_a_message_may_be_larger_than_a_slot(ranks: Any) -> None:
    assert ranks(2)(_cut) == [[]] * 2


def _reserve() -> tuple[list[int], list[float]]:
    """Send a message, and one more once an order has come that needs more slots."""
    rank, found = dist.get_rank(), torch.zeros(2)
    with copying() as made:
        messages = transport.CopiedMessages(dist.group.WORLD, torch.device("cpu"), [(0, 1)], 2)
        for number, slots in enumerate((2, 3)):
            messages.reserve(slots)
            assert not messages.is_open
            messages.open(lambda align: 100)
            messages.start_step()
            if rank == 0:
                messages.send([torch.ones(1) + number], 1)
            else:
                messages.wait_for(messages.receive([found[number : number + 1]], 0))
            messages.finish()
        messages.reserve(2)
        assert messages.is_open
        transport.close_edges()
        return [one.slots for one in made], found.tolist()


def test_an_order_that_needs_more_slots_gets_them(ranks: Any) -> None:
    assert ranks(2)(_reserve) == [([2, 3], [0.0, 0.0]), ([2, 3], [1.0, 2.0])]


def _fail() -> list[tuple[str, int, list[str], str]]:
    found, victims = [], list(range(dist.get_world_size()))
    with copying():
        for where, schedule in (("F", "Schedule1F1B"), ("B", "ScheduleZBVZeroBubble")):
            results = fail(where, victims, "zb-h1", schedule, calls=(0, 3), **COPIES)
            pairs = [(victim, left) for victim in victims for left in (0, 3)]
            found += [(where, victim, *result) for (victim, _), result in zip(pairs, results, strict=True)]
    return found


def test_a_failing_rank_is_named_and_the_next_steps_are_right(ranks: Any) -> None:
    for rank, found in enumerate(ranks(2)(_fail)):
        for where, victim, wrong, text in found:
            assert not wrong, f"rank {rank}, {where} on rank {victim}: {wrong[:4]}"
            if rank == victim:
                assert "out of memory, for a test" in text
            elif text or where == "F":
                assert text.startswith("PipelineRankError"), text
                assert f"rank {victim} failed in " in text


def _stay_away() -> list[str]:
    """Let rank 1 not come to the second step."""
    texts: list[str] = []
    with copying() as made, mock.patch.object(point_to_point, "_LOOK_S", 0.02):
        ovpatch.apply("pipeline", options={"pipeline": COPIES})
        schedule, _ = make_schedule(Case())
        rows = torch.randn(6 * ROWS, 2, WIDTH)
        inputs = (rows,) if dist.get_rank() == 0 else ()
        schedule.step(*inputs, target=rows)
        made[0].timeout_s = 0.2
        for _ in range(2 if dist.get_rank() == 0 else 0):
            try:
                schedule.step(*inputs, target=rows)
            except RuntimeError as error:
                texts.append(str(error))
        dist.barrier()
        if dist.get_rank():
            engine = takeover._find_record(schedule).engine
            engine._failures.start_step(engine._transport.step + 1)
            texts.append(engine._failures.read())
        ovpatch.revert()
    return texts


def test_a_rank_that_stays_away_is_not_waited_for_without_end(ranks: Any) -> None:
    (first, second), (told,) = ranks(2)(_stay_away)
    assert "messages of a step have not come from other ranks" in first
    assert "within 0.2 s" in first
    assert "start the job again" in second
    assert told.startswith("rank 0 stopped: messages of a step"), "before rank 0 sends what is none"


def _interrupt() -> str:
    """End a step by Ctrl-C on all ranks, and begin another."""
    with copying():
        ovpatch.apply("pipeline", options={"pipeline": COPIES})
        schedule, (part,) = make_schedule(Case())
        rows = torch.randn(6 * ROWS, 2, WIDTH)
        inputs = (rows,) if dist.get_rank() == 0 else ()
        schedule.step(*inputs, target=rows)
        forwards = [part(rows[:ROWS])] * (1 - dist.get_rank())  # rank 1 has got a message when it is interrupted
        forward = mock.Mock(side_effect=[*forwards, KeyboardInterrupt()])
        with mock.patch.object(part, "forward", forward), contextlib.suppress(KeyboardInterrupt):
            schedule.step(*inputs, target=rows)
        try:
            schedule.step(*inputs, target=rows)
        except RuntimeError as error:
            return str(error)
    return ""


def test_after_half_a_step_there_are_no_more(ranks: Any) -> None:
    for text in ranks(2)(_interrupt):
        assert "interrupted in the middle of a step" in text
        assert text.endswith("Start the job again")


def _refuse(**options: Any) -> str:
    ovpatch.apply("pipeline", options={"pipeline": {**COPIES, **options}})
    schedule, _ = make_schedule(Case())
    rows = torch.randn(6 * ROWS, 2, WIDTH)
    try:
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "tensors are on cpu, not on CUDA devices"), ({"variable_seq_lengths": True}, "variable_seq_lengths is on")],
)
def test_where_there_are_no_copy_engines_is_an_error(ranks: Any, options: Any, reason: str) -> None:
    for text in ranks(2)(_refuse, **options):
        assert reason in text
        assert text.endswith("Set OVPATCH_PIPELINE_P2P_TRANSPORT=c10d on all ranks.")


def test_one_queue_for_all_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in transport._reason_against_copies(torch.device("cuda", 0))


def _send_strided() -> list[bool]:
    """Send tensors of other strides than those that they are received into."""
    rank, group, device = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    sent = [torch.randn(3, 5).t(), torch.randn(2, 4, 3, 3), torch.randn(4, dtype=torch.complex64), torch.empty(0, 3)]
    got = [torch.empty(5, 3), torch.empty(2, 4, 3, 3).to(memory_format=torch.channels_last)]
    got += [torch.empty(8, dtype=torch.complex64)[::2], torch.empty(0, 3).requires_grad_()]
    with copying():
        messages = transport.CopiedMessages(group, device, [(0, 1)], 2)
        messages.open(lambda align: 1000)
        messages.start_step()
        if rank == 0:
            messages.send(sent, 1)
        else:
            messages.wait_for(messages.receive(got, 0))
        messages.finish()
        dist.broadcast_object_list(found := [sent], 0)
        transport.close_edges()
    return [torch.equal(one, other) for one, other in zip(found[0], got, strict=True)] if rank else []


def test_strides_of_sender_and_receiver_may_differ(ranks: Any) -> None:
    assert ranks(2)(_send_strided)[1] == [True] * 4

"""Messages of pipelines go through slots of the receivers' memory, among processes that share memory on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh

import ovpatch
from ovpatch.overlap.comm.consensus import check_consistent
from ovpatch.overlap.comm.lifetimes import attached_values
from ovpatch.overlap.kernels import copy_messages as point_to_point
from ovpatch.overlap.kernels import copy_window as window
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.copy_messages import PointToPoint, round_up
from ovpatch.overlap.pipelining import copied_messages
from ovpatch.overlap.pipelining.edges import close_edges
from ovpatch_plugins.pipeline import pipeline_attach
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.pipeline_report import list_schedules
from tests.plugins.pipeline.cases import (
    Case,
    Outcome,
    differences,
    make_schedule,
    train,
    train_both,
)
from tests.plugins.pipeline.models import ROWS, WIDTH
from tests.plugins.pipeline.test_bidirectional import Ways
from tests.plugins.pipeline.test_bidirectional import _compare as compare_both_ways
from tests.plugins.pipeline.test_data_parallel import SETTINGS
from tests.plugins.pipeline.test_failures import fail
from tests.plugins.pipeline.test_weight_stash import _compare as compare_stashed
from tests.support import windows
from tests.support.rarely import ALL_CASES

COPIES = {"p2p_transport": "copies"}


@contextlib.contextmanager
def copying(*, to_peers: bool = True) -> Iterator[list[PointToPoint]]:
    """Let processes on a CPU copy to each other's memory; yield the transports that they make."""
    made: list[PointToPoint] = []

    def make(*args: Any, **kwargs: Any) -> PointToPoint:
        made.append(PointToPoint(*args, allocate=windows.allocate, **kwargs))
        return made[-1]

    with (
        mock.patch.object(memory, "unsupported_reason", return_value=""),
        mock.patch.object(window, "allocate_window", windows.allocate),
        mock.patch.object(point_to_point, "PointToPoint", make),
        mock.patch.object(windows.HostDriver, "writes_to_peers", to_peers),
    ):
        yield made


def _compare(to_peers: bool) -> dict[str, Outcome]:
    world, several = dist.get_world_size(), {"microbatches": 2 * dist.get_world_size(), "chunks": 2}
    cases: dict[str, tuple[Case, str]] = {
        "1F1B": (Case(microbatches=2 * world + 1), "as-given"),
        "fewer microbatches than ranks": (Case("ScheduleGPipe", microbatches=1), "as-given"),
        "ZB-H1": (Case(dtype=torch.bfloat16), "zb-h1"),
        "ZB-H2": (Case(), "zb-h2"),
        "GPipe": (Case("ScheduleGPipe"), "as-given"),
        "V": (Case("ScheduleZBVZeroBubble", vee=True, **several), "as-given"),
        "interleaved": (Case("ScheduleInterleaved1F1B", **several), "as-given"),
        "loop": (Case("ScheduleLoopedBFS", **several), "as-given"),
    }
    if world > 2 and not ALL_CASES:
        # The omitted orders have messages like those of the remaining ones.
        cases = {
            name: case for name, case in cases.items() if name not in ("ZB-H1", "GPipe", "loop")
        }
    # With copy engines, auto means copies.
    options = COPIES if to_peers else {}
    with copying(to_peers=to_peers):
        return {name: train_both(case, order, **options) for name, (case, order) in cases.items()}


@pytest.mark.parametrize(("world", "to_peers"), [(2, True), (4, False)])
def test_every_order_has_the_bits_of_torch(ranks: Any, world: int, to_peers: bool) -> None:
    for rank, found in enumerate(ranks(world)(_compare, to_peers)):
        for name, outcome in found.items():
            assert not outcome.differences, f"rank {rank}, {name}: {outcome.differences[:4]}"
            assert outcome.counters["copied_messages"] == outcome.counters["messages"] > 0, name
            assert any("carried by copy engines" in text for text in outcome.remarks)


def _share() -> tuple[list[str], list[int], bool]:
    """Train three pipelines sequentially; the second one has larger messages."""
    cases = [Case(), Case(shape=(3 * ROWS, WIDTH)), Case()]
    stock = [train(case) for case in cases]
    with copying() as made:
        ovpatch.apply("pipeline", options={"pipeline": COPIES})
        wrong = differences(stock, [train(case) for case in cases])
        ovpatch.revert()
        for transport in made:
            transport._watch.join(60)
        return (
            wrong,
            [transport.slot_bytes for transport in made],
            not any(transport._watch.is_alive() for transport in made),
        )


def test_schedules_of_a_group_share_slots(ranks: Any) -> None:
    small, large = (round_up(factor * ROWS * 2 * WIDTH * 4) for factor in (1, 3))
    assert ranks(2)(_share) == [([], [small, large], True)] * 2


def _take_turns() -> tuple[list[str], int]:
    """Alternate steps of two schedules with evaluations; return the differences and the number of transports made."""

    def run() -> list[Any]:
        torch.manual_seed(3)
        large = Case("ScheduleGPipe", microbatches=2, shape=(2 * ROWS, WIDTH))
        pairs = [(case, *make_schedule(case)) for case in (Case(), large)]
        found: list[Any] = []
        for _ in range(3):
            for case, schedule, parts in pairs:
                rows = torch.randn(case.shape[0] * case.microbatches, 2, WIDTH)
                inputs = (rows,) if dist.get_rank() == 0 else ()
                found.append(schedule.step(*inputs, target=rows, losses=(losses := [])))
                found += [[loss.detach() for loss in losses], schedule.eval(*inputs, target=rows)]
                found.append([param.grad.clone() for param in parts[0].parameters()])
        return found

    stock = run()
    with copying() as made:
        ovpatch.apply("pipeline")
        before = COUNTERS.messages - COUNTERS.copied_messages
        wrong = differences(stock, run())
        assert COUNTERS.messages - COUNTERS.copied_messages == before
        ovpatch.revert()
        return wrong, len(made)


def test_schedules_and_evaluations_take_turns(ranks: Any) -> None:
    assert ranks(2)(_take_turns) == [([], 2)] * 2


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
    """Send a message, and another one after an order that needs more slots has come."""
    rank, found = dist.get_rank(), torch.zeros(2)
    with copying() as made:
        messages = copied_messages.CopiedMessages(
            dist.group.WORLD, torch.device("cpu"), [(0, 1)], 2
        )
        for number, slots in enumerate((2, 3)):
            messages.reserve(slots)
            assert not messages.is_open
            messages.open(lambda align: 100)
            messages.start_step()
            if rank == 0:
                messages.send([torch.ones(1) + number], 1)
            else:
                messages._wait_for(messages.receive([found[number : number + 1]], 0))
            messages.finish()
        messages.reserve(2)
        assert messages.is_open
        close_edges()
        return [transport.slots for transport in made], found.tolist()


def test_an_order_that_needs_more_slots_gets_them(ranks: Any) -> None:
    assert ranks(2)(_reserve) == [([2, 3], [0.0, 0.0]), ([2, 3], [1.0, 2.0])]


def _fail() -> list[tuple[str, int, list[str], str]]:
    found, pairs = (
        [],
        [(victim, left) for victim in range(dist.get_world_size()) for left in (0, 3)],
    )
    with copying():
        for where, schedule in (("F", "Schedule1F1B"), ("B", "ScheduleZBVZeroBubble")):
            results = fail(where, pairs, "zb-h1", schedule, **COPIES)
            found += [
                (where, victim, *result) for (victim, _), result in zip(pairs, results, strict=True)
            ]
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


def _miss_a_step() -> list[str]:
    """Have rank 1 miss the second step."""
    texts: list[str] = []
    with copying() as made, mock.patch.object(point_to_point, "_WATCH_INTERVAL_S", 0.02):
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
            engine = attached_values(schedule)[pipeline_attach._ATTACHED].engine
            engine._failures.step = engine.messages._steps.count + 1
            texts.append(engine._failures.read())
        ovpatch.revert()
    return texts


def test_a_missing_rank_is_not_waited_for_without_end(ranks: Any) -> None:
    (first, second), (reason,) = ranks(2)(_miss_a_step)
    assert "messages of a step have not come from peers" in first
    assert "within 0.2 s" in first
    assert "start the job again" in second
    assert reason.startswith("rank 0 stopped: messages of a step"), (
        "the failure must be known before rank 0 sends wrong messages"
    )


def _interrupt() -> str:
    """End a step by Ctrl-C on all ranks, and start another one."""
    with copying():
        ovpatch.apply("pipeline", options={"pipeline": COPIES})
        schedule, (part,) = make_schedule(Case())
        rows = torch.randn(6 * ROWS, 2, WIDTH)
        inputs = (rows,) if dist.get_rank() == 0 else ()
        schedule.step(*inputs, target=rows)
        # Rank 1 has received a message when it is interrupted.
        forwards = [part(rows[:ROWS])] * (1 - dist.get_rank())
        forward = mock.Mock(side_effect=[*forwards, KeyboardInterrupt()])
        with mock.patch.object(part, "forward", forward), contextlib.suppress(KeyboardInterrupt):
            schedule.step(*inputs, target=rows)
        try:
            schedule.step(*inputs, target=rows)
        except RuntimeError as error:
            return str(error)
    return ""


def test_no_step_follows_an_interrupted_one(ranks: Any) -> None:
    for text in ranks(2)(_interrupt):
        assert "interrupted in the middle of a step" in text
        assert text.endswith("Start the job again")


def _replicate(name: str) -> tuple[list[str], int, int]:
    """Train pipelines of two ranks in two replicas."""
    wrap, arguments, more, features = SETTINGS[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    case, group, seed = (
        Case(wrap=wrap(mesh["dp"], **arguments), **more),
        mesh["pp"].get_group(),
        mesh["dp"].get_rank(),
    )
    for feature in features:
        ovpatch.apply(feature)
    stock = train(case, group, seed)
    ovpatch.revert()
    with copying():
        ovpatch.apply("pipeline", *features, options={"pipeline": {"schedule": "zb-h1"}})
        before = COUNTERS.messages, COUNTERS.copied_messages
        wrong = differences(stock, train(case, group, seed))
        ovpatch.revert()
    return wrong, COUNTERS.messages - before[0], COUNTERS.copied_messages - before[1]


@pytest.mark.parametrize("name", ["our ddp", "fsdp, loop"])
def test_replicas(ranks: Any, name: str) -> None:
    for wrong, messages, copied in ranks(4)(_replicate, name, timeout=120):
        assert not wrong, wrong[:4]
        assert copied == messages > 0


def _stash() -> tuple[Any, int, int]:
    before = COUNTERS.messages, COUNTERS.copied_messages
    with copying():
        found = compare_stashed(["plain"])["plain"]
        return found, COUNTERS.messages - before[0], COUNTERS.copied_messages - before[1]


def test_stashed_weights(ranks: Any) -> None:
    for (wrong, *_), messages, copied in ranks(2)(_stash):
        assert not wrong, wrong[:4]
        assert copied == messages > 0


def _run_both_ways() -> tuple[list[str], int, int]:
    before = COUNTERS.messages, COUNTERS.copied_messages
    with copying():
        wrong = compare_both_ways(Ways(patched={"forward_doubling": True}))
        return wrong, COUNTERS.messages - before[0], COUNTERS.copied_messages - before[1]


@pytest.mark.parametrize("world", [2, 4])
def test_two_pipelines_in_opposite_directions(ranks: Any, world: int) -> None:
    for wrong, messages, copied in ranks(world)(_run_both_ways, timeout=120):
        assert not wrong, wrong[:4]
        assert copied == messages > 0


# --- the transport that auto chooses ---


def _fall_back(where: str) -> tuple[Outcome, int, list[str]]:
    """Train if rank 1 alone finds no copy engines: in its own check, at a trial, or when slots are made."""
    refused = RuntimeError("refused on one rank, for a test")
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(copying())
        if where == "checked":
            stack.enter_context(mock.patch.object(memory, "unsupported_reason", check_all_ranks))
            stack.enter_context(
                mock.patch.object(memory, "memory_unsupported_reason", object_on_rank_1)
            )
        else:
            module, name = {
                "tried": (window, "allocate_window"),
                "made": (point_to_point, "PointToPoint"),
            }[where]
            if dist.get_rank() == 1 and where == "tried":
                stack.enter_context(
                    mock.patch.object(module, name, _refuse_after(window.allocate_window, refused))
                )
            elif dist.get_rank() == 1:
                stack.enter_context(
                    mock.patch.object(
                        module, name, _refuse_after(point_to_point.PointToPoint, refused)
                    )
                )
        return train_both(Case(steps=3), "zb-h1"), len(made), list(list_schedules()[-1].transport)


def check_all_ranks(group: Any, device: torch.device, check: Any, *, shares_devices: bool) -> str:
    """Replace :func:`memory.unsupported_reason` and use only the reason that a rank finds by itself."""
    assert not shares_devices
    return check_consistent(group, "a test", {}, objection=check(device))


def object_on_rank_1(_device: torch.device) -> str:
    """Replace :func:`memory.memory_unsupported_reason`."""
    return "refused on one rank, for a test" if dist.get_rank() == 1 else ""


def _refuse_after(make: Any, error: RuntimeError) -> Any:
    """Return a function that fails once all ranks have allocated."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        make(*args, **kwargs)
        raise error

    return refuse


@pytest.mark.parametrize("where", ["checked", "tried", "made"])
def test_c10d_carries_messages_on_all_ranks_if_one_has_no_copy_engines(
    ranks: Any, where: str
) -> None:
    for outcome, made, reasons in ranks(2)(_fall_back, where):
        assert not outcome.differences, outcome.differences[:4]
        assert outcome.counters["copied_messages"] == 0 < outcome.counters["messages"]
        assert made == (where == "made")
        assert len(reasons) == 1, reasons
        assert reasons[0] in outcome.remarks
        assert reasons[0].startswith(
            "messages are carried by torch.distributed, not by copy engines: "
        ), reasons
        assert "refused on one rank, for a test" in reasons[0], reasons
        assert reasons[0].rstrip(")").endswith("(rank 1"), reasons


def _list_transport_reasons(**options: Any) -> list[str]:
    train_both(Case(), **options)
    return list(list_schedules()[-1].transport)


def test_auto_means_c10d_on_a_cpu(ranks: Any) -> None:
    for (reason,) in ranks(2)(_list_transport_reasons):
        assert reason.endswith(
            "not by copy engines: tensors are on cpu, not on CUDA devices (rank 0, 1)"
        )
    for (reason,) in ranks(2)(_list_transport_reasons, variable_seq_lengths=True):
        assert "not by copy engines: variable_seq_lengths is on" in reason
    assert ranks(2)(_list_transport_reasons, p2p_transport="c10d") == [[], []]


def test_stages_on_several_devices_and_gloo_are_refused() -> None:
    first, second = (torch.device("cuda", index) for index in range(2))
    with (
        mock.patch.object(copied_messages, "blocks_host", return_value=True),
        mock.patch.object(memory, "memory_unsupported_reason", return_value=""),
    ):
        assert "on several devices" in copied_messages._find_local_reason(
            dist.group.WORLD, [first, second], first
        )
        assert "is gloo" in copied_messages._find_local_reason(
            dist.group.WORLD, [first, first], first
        )


def _refuse(**options: Any) -> str:
    ovpatch.apply("pipeline", options={"pipeline": {**COPIES, **options}})
    schedule, _ = make_schedule(Case())
    rows = torch.randn(6 * ROWS, 2, WIDTH)
    with pytest.raises(ovpatch.OptionError) as error:
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
    return str(error.value)


# With the remedy auto, torch.distributed carries the messages in both cases: see test_auto_means_c10d_on_a_cpu.
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "tensors are on cpu, not on CUDA devices (rank 0, 1)"),
        (
            {"variable_seq_lengths": True},
            "variable_seq_lengths is on, and slots are made for messages of one size",
        ),
    ],
)
def test_copies_without_copy_engines_are_an_error(ranks: Any, options: Any, reason: str) -> None:
    for text in ranks(2)(_refuse, **options):
        assert text == (
            "ovpatch: option p2p_transport=copies of feature 'pipeline' cannot act here: "
            f"{reason}. Set "
            "OVPATCH_PIPELINE_P2P_TRANSPORT=auto on all ranks, or remove the variable and the "
            "argument of that name."
        )


def test_one_queue_for_all_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with (
        mock.patch.object(copied_messages, "blocks_host", return_value=False),
        mock.patch.object(memory, "memory_unsupported_reason", return_value=""),
    ):
        device = torch.device("cuda", 0)
        reason = copied_messages._find_local_reason(dist.group.WORLD, [device], device)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in reason


def _send_strided() -> list[bool]:
    """Send tensors whose strides differ from the strides of the tensors that receive them."""
    rank, group, device = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    sent = [
        torch.randn(3, 5).t(),
        torch.randn(2, 4, 3, 3),
        torch.randn(4, dtype=torch.complex64),
        torch.empty(0, 3),
    ]
    got = [torch.empty(5, 3), torch.empty(2, 4, 3, 3).to(memory_format=torch.channels_last)]
    got += [torch.empty(8, dtype=torch.complex64)[::2], torch.empty(0, 3).requires_grad_()]
    if rank == 0:
        # A functional collective returns such a tensor.
        sent.append(AsyncCollectiveTensor(torch.arange(3.0)))
        assert not sent[-1].data_ptr()
    else:
        got.append(torch.empty(3))
    with copying():
        messages = copied_messages.CopiedMessages(group, device, [(0, 1)], 2)
        messages.open(lambda align: 1000)
        messages.start_step()
        if rank == 0:
            messages.send(sent, 1)
        else:
            messages._wait_for(messages.receive(got, 0))
        messages.finish()
        dist.broadcast_object_list(found := [[tensor + 0 for tensor in sent]], 0)
        close_edges()
    if not rank:
        return []
    return [torch.equal(wanted, read) for wanted, read in zip(found[0], got, strict=True)]


def test_strides_of_sender_and_receiver_may_differ(ranks: Any) -> None:
    assert ranks(2)(_send_strided)[1] == [True] * 5

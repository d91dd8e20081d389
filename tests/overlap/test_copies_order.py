"""Streams of several GPUs, simulated in one process in random orders. Copies must be right in every order.

A simulated stream is a queue of steps. The simulation repeatedly draws a stream whose first step need not wait, and
runs that step. Some streams are drawn less often than others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ovpatch.overlap.kernels import copy_collectives as collectives
from ovpatch.overlap.kernels import copy_messages as point_to_point
from ovpatch.overlap.kernels import copy_window as window
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch.overlap.kernels.copy_messages import PointToPoint
from ovpatch.overlap.kernels.copy_window import BYTES, Addend, Batch, Span, StreamBarrier, Window
from tests.support import windows

# In bytes. The slot is a little larger than a piece, so copies need many rounds.
SLOT = 2 * 128 * 2


class Stream:
    """A queue of steps, each of which may have to wait."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        del priority
        steps: Steps = deque()
        self.steps = queues.setdefault(device.index, steps) if sharing["queue"] else steps
        self.cuda_stream = self
        streams.append(self)

    def query(self) -> bool:
        return not self.steps

    def add(self, step: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.steps.append((ready, step))

    def wait_event(self, event: Event) -> None:
        recorded = event.recorded
        self.add(lambda: None, lambda: all(recorded))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)


class Event:
    def __init__(self) -> None:
        self.recorded: list[bool] = []

    def record(self, stream: Stream) -> None:
        done = self.recorded = [False]
        stream.add(lambda: done.__setitem__(0, True))

    def query(self) -> bool:
        return all(self.recorded)


class Driver:
    """Writes of numbers, waits for numbers, and copies on a stream, at addresses of this process."""

    def __init__(self) -> None:
        self.writes_to_peers = writing["to peers"]

    def write(self, address: int, number: int, stream: Stream) -> None:
        stream.add(lambda: setattr(ctypes.c_uint32.from_address(address), "value", number))

    def wait(self, address: int, number: int, stream: Stream) -> None:
        found = ctypes.c_uint32.from_address(address)
        stream.add(lambda: None, lambda: ctypes.c_int32(found.value - number).value >= 0)

    def copy(self, batch: Batch, stream: Stream) -> None:
        for move in draw.sample([*zip(*batch, strict=True)], len(batch.to)):
            stream.add(lambda move=move: ctypes.memmove(*move))


Steps = deque[tuple[Callable[[], bool], Callable[[], Any]]]

streams: list[Stream] = []
# The queues by device.
queues: dict[int, Steps] = {}
# Whether all streams of a device share a queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1.
sharing = {"queue": False}
writing = {"to peers": True}
current: list[Any] = [None]
draw = random.Random()


@contextmanager
def stream(entered: Stream) -> Iterator[None]:
    before, current[0] = current[0], entered
    try:
        yield
    finally:
        current[0] = before


def play(seed: int) -> None:
    """Run all streams to their ends."""
    order = random.Random(seed)
    weights = {id(queue): order.choice([1, 30]) for queue in streams}
    while any(queue.steps for queue in streams):
        free = [queue for queue in streams if queue.steps and queue.steps[0][0]()]
        assert free, "all streams wait"
        (drawn,) = order.choices(free, [weights[id(queue)] for queue in free])
        drawn.steps.popleft()[1]()


@pytest.fixture(autouse=True, params=[True, False], ids=["written", "copied"])
def played(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setitem(writing, "to peers", request.param)
    cuda = SimpleNamespace(
        Stream=Stream, Event=Event, stream=stream, current_stream=lambda _: current[0]
    )
    cuda._is_in_bad_fork, cuda.device = lambda: False, contextlib.nullcontext
    cuda.synchronize = lambda _: None
    monkeypatch.setattr(window, "torch", SimpleNamespace(cuda=cuda, int32=torch.int32))
    monkeypatch.setattr(point_to_point, "torch", SimpleNamespace(cuda=cuda))

    add = collectives.add_slots

    def add_slots(
        slots: list[Span | None], addends: list[Addend], scale: float, stream: Stream
    ) -> None:
        stream.add(lambda: add(slots, addends, scale, 0))

    monkeypatch.setattr(collectives, "add_slots", add_slots)


def windows_of(world: int, number: int) -> list[Window]:
    """Return the windows of all ranks, whose barriers have already reached a number."""
    memories = [torch.zeros(2 * SLOT + BYTES, dtype=torch.uint8) for _ in range(world)]
    signals = [memory[2 * SLOT :] for memory in memories]
    found = []
    for rank in range(world):
        meeting = StreamBarrier(Driver(), signals, rank)
        meeting._number = number
        for signal in signals:
            signal.view(torch.int32)[32 * rank] = number - (number >> 31 << 32)
        found.append(Window([memory[: 2 * SLOT] for memory in memories], meeting, Driver().copy))
    return found


def engine_of(rank: int, window: Window) -> Engine:
    group: Any = SimpleNamespace(size=lambda: len(window.ranks), rank=lambda: rank)
    return Engine(group, torch.device("cuda", rank), allocate=lambda *_: window, slot_bytes=SLOT)


def train(world: int, seed: int, number: int) -> None:
    streams.clear()
    queues.clear()
    draw.seed(seed)
    engine = [engine_of(rank, window) for rank, window in enumerate(windows_of(world, number))]
    mains = [[Stream(torch.device("cuda", rank)) for _ in range(2)] for rank in range(world)]
    checks = []
    for _ in range(draw.randint(2, 5)):
        sizes = [
            draw.choice([0, 1, 40, 64, 129, draw.randint(1, 200)])
            for _ in range(draw.randint(1, 3))
        ]
        gathers, which, who = draw.random() < 0.5, draw.randint(0, 1), draw.choice([0, 0, 1, None])
        inside = gathers and draw.random() < 0.5
        given = [
            [torch.randn(size * (1 if gathers else world)) for size in sizes] for _ in range(world)
        ]
        for rank in range(world):
            with stream(mains[rank][which]):
                waits = None if who is None else mains[rank][which ^ who]
                checks.append(call(engine[rank], rank, given, sizes, gathers, inside, waits))
    play(seed)
    assert all(check() for check in checks)


def call(
    engine: Engine,
    rank: int,
    given: list[list[Tensor]],
    sizes: list[int],
    gathers: bool,
    inside: bool,
    waits: Stream | None,
) -> Callable[[], bool]:
    """Move tensors that the current stream computes before the call and overwrites after it.

    Args:
        engine: The engine of this rank.
        rank: The rank.
        given: The values of all ranks.
        sizes: The sizes of the parts.
        gathers: Whether the call is a gather, and not a reduce-scatter.
        inside: Whether the parts are views of the outputs of the gather.
        waits: The stream that waits for the call. None: no stream waits.

    Returns:
        A function that checks the results.
    """
    world = len(given)
    outputs = [torch.full((size * world if gathers else size,), torch.nan) for size in sizes]
    inputs = [torch.full_like(tensor, torch.nan) for tensor in given[rank]]
    if inside:
        inputs = [output.view(world, -1)[rank] for output in outputs]
    results: list[Tensor] = []
    for tensor, value in zip(inputs, given[rank], strict=True):
        current[0].add(lambda tensor=tensor, value=value: tensor.copy_(value))
    works = (
        engine.gather(outputs, inputs)
        if gathers
        else engine.scatter(outputs, inputs, average=False)
    )
    for work in works if waits is not None else ():
        with stream(waits):
            work.wait()
        del work
    del works
    current[0].add(lambda: results.extend(output.clone() for output in outputs))
    for tensor in (*inputs, *outputs):
        current[0].add(lambda tensor=tensor: tensor.fill_(torch.inf))

    def check() -> bool:
        if gathers:
            expected = [torch.cat([tensors[i] for tensors in given]) for i in range(len(sizes))]
        else:
            parts = [
                [tensors[i].view(world, -1)[rank] for tensors in given] for i in range(len(sizes))
            ]
            expected = [sum(terms[1:], terms[0]) for terms in parts]
        return all(map(torch.equal, results, expected))

    return check


@pytest.mark.parametrize(("world", "shared"), [(2, False), (3, False), (3, True)])
def test_any_order_of_steps_moves_the_same(
    world: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sharing, "queue", shared)
    for seed in range(60):
        train(world, seed, number=0)


def test_numbers_of_stream_barriers_wrap() -> None:
    for seed in range(10):
        train(2, seed, number=0xFFFFFFFE)
        train(2, seed, number=0x7FFFFFFE)


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_ranks_whose_memory_cannot_be_used_are_found(lost: int | None) -> None:
    streams.clear()
    memories = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(3)]
    seen_by_one = [
        torch.zeros_like(memory) if rank == lost else memory for rank, memory in enumerate(memories)
    ]
    meetings = [
        StreamBarrier(Driver(), seen_by_one if rank == 1 else memories, rank) for rank in range(3)
    ]
    for meeting in meetings:
        meeting.try_out(Stream(torch.device("cuda", 0)))
    play(0)

    for meeting in meetings:
        meeting._driver = SimpleNamespace(copy=windows.copy)
    found = [meeting.unheard(0) for meeting in meetings]
    assert found[1] == ([] if lost is None else [lost])
    assert [rank for rank in (0, 2) if found[rank]] == ([] if lost is None else [lost])
    assert lost is None or found[lost] == [1], "the peer receives nothing either"


def test_no_rank_waits_forever_for_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    streams.clear()
    here, missing = (engine_of(rank, window) for rank, window in enumerate(windows_of(2, 0)))
    output, part = torch.zeros(2), torch.ones(1)
    with stream(Stream(torch.device("cuda", 0))):
        here.gather([output], [part])
    assert missing.drain(timeout_s=0)
    with pytest.raises(AssertionError, match="all streams wait"):
        play(0)
    begin = time.monotonic()
    assert not here.drain(timeout_s=0.05)  # expires
    assert time.monotonic() - begin < 50
    monkeypatch.setattr(window.torch.cuda, "_is_in_bad_fork", lambda: True)
    assert here.drain(timeout_s=60), "a fork has no copies in flight"


def test_after_an_interrupted_call_further_calls_raise() -> None:
    streams.clear()
    engine = engine_of(0, windows_of(2, 0)[0])
    laid_out = engine._window.copy

    def interrupted(batch: Batch, stream: Stream) -> None:
        object.__setattr__(engine._window, "copy", laid_out)
        raise KeyboardInterrupt

    object.__setattr__(engine._window, "copy", interrupted)
    with stream(Stream(torch.device("cuda", 0))):
        with pytest.raises(KeyboardInterrupt):
            engine.gather([torch.zeros(2)], [torch.ones(1)])
        for call, output_numel, input_numel in (
            (engine.gather, 2, 1),
            (functools.partial(engine.scatter, average=False), 1, 2),
        ):
            with pytest.raises(RuntimeError, match=r"in the middle of a call.*Restart all ranks"):
                call([torch.zeros(output_numel)], [torch.zeros(input_numel)])
        engine.failed_everywhere()
        engine.gather([torch.zeros(2)], [torch.ones(1)])


# --- messages between two ranks ---


def mailboxes(world: int, slots: int, slot_bytes: int) -> list[PointToPoint]:
    """Return the ends of all edges, by rank."""
    memories: list[Tensor] = []

    def allocate(size: int, group: Any, device: torch.device) -> Window:
        memories.extend(
            torch.full((size,), 255, dtype=torch.uint8) for _ in range(world - len(memories))
        )
        return Window(memories, lambda _: None, Driver().copy, driver=Driver())

    edges = [(a, b) for a in range(world) for b in range(world) if a != b]
    groups: list[Any] = [
        SimpleNamespace(size=lambda: world, rank=lambda rank=rank: rank) for rank in range(world)
    ]
    found = []
    for rank, group in enumerate(groups):
        given: dict[str, Any] = {
            "slots": slots,
            "slot_bytes": slot_bytes,
            "timeout_s": 1000.0,
            "allocate": allocate,
        }
        found.append(PointToPoint(group, torch.device("cuda", rank), edges, **given))
        # This ends the watching thread, because the tests call look() themselves.
        found[-1]._closed.put(None)
    return found


def exchange(world: int, seed: int, *, shared: bool, number: int = 0) -> None:
    """Send random messages, which receivers read in the order in which they were sent.

    If each stream has its own queue, a receiver may read messages later, and the last one first.
    """
    streams.clear()
    queues.clear()
    draw.seed(seed)
    slots = draw.randint(1, 3)
    boxes = mailboxes(world, slots, draw.choice([128, 256, 1024]))
    for box in boxes:
        for edge in (*box._in.values(), *box._out.values()):
            edge._count = edge.number = number
        numbers = box._window.ranks[box._rank][: box._slots_offset].view(torch.int32)
        numbers.fill_(number - (number >> 31 << 32))
    mains = [Stream(torch.device("cuda", rank)) for rank in range(world)]
    unread: list[tuple[int, Any, list[Tensor], int, Any, list[Tensor], list[Tensor]]] = []
    checks: list[tuple[list[Tensor], list[Tensor]]] = []
    # Handles of sends keep the memory of their messages.
    kept: list[Any] = []

    def read(
        receiver: int,
        receiving: Any,
        got: list[Tensor],
        sender: int,
        sending: Any,
        sent: list[Tensor],
        values: Any,
    ) -> None:
        found: list[Tensor] = []
        with stream(mains[receiver]):
            receiving.wait()
            current[0].add(lambda: found.extend(tensor.clone() for tensor in got))
        if draw.random() < 0.5:
            kept.append(sending)
        else:
            with stream(mains[sender]):
                sending.wait()
                current[0].add(lambda: [tensor.fill_(torch.inf) for tensor in sent])
        checks.append((found, values))

    # The number of elements. With a shared queue, all pieces of a message must have slots.
    most = 1024 // 4 if not shared else slots * boxes[0].slot_bytes // 4 // 2
    for box in boxes:
        box.begin(str)
    for _ in range(draw.randint(1, 12)):
        sender, receiver = draw.sample(range(world), 2)
        sizes = [
            draw.choice([0, 1, draw.randint(1, max(1, most // 2))])
            for _ in range(draw.randint(1, 2))
        ]
        values = [torch.randn(size) for size in sizes]
        sent, got = ([torch.full_like(value, torch.nan) for value in values] for _ in range(2))
        with stream(mains[sender]):
            current[0].add(
                lambda sent=sent, values=values: [
                    a.copy_(b) for a, b in zip(sent, values, strict=True)
                ]
            )
            sending = boxes[sender].send(sent, receiver)
        receiving = boxes[receiver].receive(got, sender)
        unread.append((receiver, receiving, got, sender, sending, sent, values))
        while unread and (shared or draw.random() < 0.6):
            read(*unread.pop(-1 if draw.random() < 0.5 else 0))
    for message in unread:
        read(*message)
    for box, main in zip(boxes, mains, strict=True):
        with stream(main):
            box.end()
    play(seed)
    for found, expected in checks:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(box._streams.is_idle() for box in boxes)


@pytest.mark.parametrize(("world", "shared"), [(2, False), (3, False), (2, True), (3, True)])
def test_messages_arrive_in_any_order_of_steps(
    world: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sharing, "queue", shared)
    for seed in range(60):
        exchange(world, seed, shared=shared)


def test_numbers_of_messages_wrap() -> None:
    for seed in range(10):
        exchange(2, seed, shared=False, number=0xFFFFFFFE)
        exchange(2, seed, shared=False, number=0x7FFFFFFE)


def test_streams_do_not_wait_forever_for_messages_of_a_missing_rank() -> None:
    streams.clear()
    here, _ = mailboxes(2, slots=1, slot_bytes=128)
    failures: list[str] = []
    here.begin(failures.append)
    main = Stream(torch.device("cuda", 0))
    tensor = torch.ones(2)
    with stream(main):
        # The second send finds no free slot.
        for _ in range(2):
            here.send([tensor], 1)
        here.receive([tensor], 1).wait()
    with pytest.raises(AssertionError, match="all streams wait"):
        play(0)
    here.look()
    assert not failures
    assert not here.failure
    here.timeout_s = here._deadline = 0.0
    with stream(main):
        assert not here.drain()
    here.look()
    play(0)
    assert here._streams.is_idle()
    assert failures == [here.failure]
    for call in (lambda: here.begin(str), lambda: here.send([], 1), here.receive([], 1).wait):
        with pytest.raises(
            RuntimeError, match=r"messages of a step have not come.*start the job again"
        ):
            call()


def test_the_timeout_starts_at_the_last_message_and_acts_only_while_a_stream_waits() -> None:
    streams.clear()
    here, _ = mailboxes(2, slots=1, slot_bytes=128)
    here.begin(str)
    here._deadline = 0.0
    here.look()
    assert not here.failure, "a step that computes for long is not late"
    with stream(Stream(torch.device("cuda", 0))):
        here.send([torch.ones(2)], 1)
        assert here._deadline > time.monotonic()
        # The second send finds no free slot.
        here.send([torch.ones(2)], 1)
    with pytest.raises(AssertionError, match="all streams wait"):
        play(0)
    here._deadline = 1.0
    here.look()
    assert here.failure
    play(0)

"""A rank's program: the messages of each computation, and the cost of building it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ovpatch.overlap.pipelining import ir as program_module
from ovpatch.overlap.pipelining.ir import (
    Action,
    Kind,
    Placement,
    Program,
    Receive,
    Schedule,
    find_source,
    list_messages,
    make_program,
)
from ovpatch.overlap.pipelining.order_table import ORDERS
from ovpatch.overlap.pipelining.orders import (
    build_bidirectional_order,
    build_order,
    build_placement,
    build_vee_order,
)


def _shuffle(schedule: Schedule, seed: int) -> Schedule:
    """Return orders that read messages of an edge in another sequence than they send them."""
    draw = random.Random(seed)
    changed = [list(order) for order in schedule]
    for order in changed:
        for _ in range(len(order)):
            place = draw.randrange(len(order) - 1)
            if order[place].kind is order[place + 1].kind:
                order[place], order[place + 1] = order[place + 1], order[place]
    return changed


def _list_schedules() -> list[tuple[Schedule, Placement]]:
    straight, vee = build_placement("straight", ranks=3), build_placement("vee", ranks=3, chunks=2)
    found: list[tuple[Schedule, Placement]] = [
        (build_order(name, ranks=3, microbatches=count), straight)
        for name in ORDERS
        for count in (1, 2, 7)
    ]
    found.append((build_vee_order(ranks=3, microbatches=7), vee))
    found.append(
        (
            build_bidirectional_order(ranks=4, microbatches=8),
            build_placement("bidirectional", ranks=4),
        )
    )
    return found + [
        (_shuffle(schedule, seed), placement) for seed, (schedule, placement) in enumerate(found)
    ]


def _find_posts(
    program: Program, messages: dict[tuple[int, int], list[Action]], ahead: int
) -> list[list[Receive]]:
    """Return the receives to start before each computation, by a search of all later receives each time."""
    steps, started = program.steps, set[Receive]()
    readers = {
        step.receive: number for number, step in enumerate(steps) if step.receive is not None
    }
    found = []
    for number, step in enumerate(steps):
        later = sorted(place for place in readers.values() if place >= number)
        due = later[: ahead + (step.receive is not None)]
        posts: list[Receive] = []
        for (_, receiver), sent in sorted(messages.items()):
            queue = (
                [_find_receive(steps, action) for action in sent]
                if receiver == program.rank
                else []
            )
            last = max(
                (place for place, receive in enumerate(queue) if readers[receive] in due),
                default=-1,
            )
            posts += [receive for receive in queue[: last + 1] if receive not in started]
        started.update(posts)
        found.append(posts)
    return found


def _find_receive(steps: Any, message: Action) -> Receive:
    reader = message._replace(stage=message.stage + (1 if message.kind is Kind.F else -1))
    return next(
        step.receive for step in steps if step.receive is not None and step.receive.action == reader
    )


def _count_unread(
    program: Program, schedule: Schedule, placement: Placement
) -> list[dict[int, int]]:
    """Return the messages that the sender of each receive may not have read, by counting those it has read before."""
    messages, sent, found = list_messages(schedule, placement), [], []
    for step in program.steps:
        unread: dict[int, int] = {}
        if step.receive is not None:
            peer, source = step.receive.sender, find_source(step.action, placement)
            assert source is not None
            made = next(
                place for place, action in enumerate(schedule[peer]) if _is_same(action, source)
            )
            reads = [find_source(action, placement) for action in schedule[peer][: made + 1]]
            mine = [
                message for message in messages.get((program.rank, peer), []) if message in sent
            ]
            known = next(
                (place for place, message in enumerate(mine) if message not in reads), len(mine)
            )
            unread = {peer: len(mine) - known}
        found.append(unread)
        if step.receiver is not None:
            kind = Kind.F if step.action.kind is Kind.F else Kind.B
            sent.append(step.action._replace(kind=kind))
    return found


def _is_same(action: Action, message: Action) -> bool:
    kinds = (Kind.F,) if message.kind is Kind.F else (Kind.B, Kind.BW)
    return action.kind in kinds and action[1:] == message[1:]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_receives_and_unread_messages_agree_with_a_plain_search(ahead: int) -> None:
    for schedule, placement in _list_schedules():
        messages = list_messages(schedule, placement)
        for rank in range(len(schedule)):
            program = make_program(schedule, placement, rank, ahead=ahead)
            assert [step.posts for step in program.steps] == _find_posts(program, messages, ahead)
            assert [step.kept for step in program.steps] == _count_unread(
                program, schedule, placement
            )


def _count_instructions(call: Callable[[], object]) -> int:
    """Return the number of instructions of the program's module that a call executes."""
    count = 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != program_module.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2"])
def test_a_program_is_built_in_linear_time(name: str) -> None:
    def build(microbatches: int) -> int:
        schedule = build_order(name, ranks=3, microbatches=microbatches)
        return _count_instructions(lambda: make_program(schedule, range(3), 1, ahead=2))

    build(32)  # Python 3.12 traces no opcodes of a function that it traces for the first time.
    few, many = build(32), build(128)
    assert many < 4.4 * few, "four times the microbatches take about four times the instructions"

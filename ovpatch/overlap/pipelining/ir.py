"""The terms of a pipeline schedule: actions, orders, placements, and the program of a rank.

A *schedule* is one *order* per rank: a list of *actions* ``stage·kind·microbatch`` (``0F3``; kinds F, B = input
gradient, W = weight gradient, BW = both). Orders hold computations only. A *placement* is a sequence with the rank of
each stage. ``make_program(schedule, placement, rank)`` derives the *program* of one rank: *steps*, each an action plus
the messages to receive before it and to send after it. So no order can name a transfer that its peer does not expect.

All makers of orders (fixed, torch's, solved) produce these terms. All runners of orders (our engine, Megatron's loop,
the simulator) take them.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias


class Kind(enum.Enum):
    """The computations of one microbatch on one stage, by the letters of the zero-bubble paper.

    ``F`` is the forward, ``B`` the gradient of the stage's input alone, ``W`` the gradients of its weights that ``B``
    left for later. ``BW`` is a full backward. Torch calls a full backward ``B``, and calls ``B`` ``I``.
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


class Action(NamedTuple):
    """One computation.

    Attributes:
        kind: The kind of computation.
        stage: Index of the stage in the full pipeline.
        microbatch: Index of the microbatch in the step.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order: TypeAlias = Sequence[Action]
"""The actions of one rank, in the order in which it runs them."""

Schedule: TypeAlias = Sequence[Order]
"""The orders of all ranks of a pipeline, by rank."""

Placement: TypeAlias = Sequence[int]
"""The rank of each stage, by stage."""

_ACTION: Final = re.compile(r"(\d+)(F|BW|B|W)(\d+)")


class ScheduleError(ValueError):
    """The error of an order that breaks a rule; the message names the rule, the rank and the action."""


class BidirectionalPlacement(tuple[int, ...]):
    """The placement of two pipelines that run through the same ranks, one down and one up.

    Each has all stages of the model, so a rank holds one stage of each. With ``d`` ranks, stages ``0`` to ``d - 1`` go
    down and ``d`` to ``2 * d - 1`` up; stage ``d + s`` is a replica of stage ``s``.
    """

    @classmethod
    def of(cls, ranks: int) -> BidirectionalPlacement:
        """Return the placement on a number of ranks."""
        return cls((*range(ranks), *reversed(range(ranks))))


def count_stages(placement: Placement) -> int:
    """Return the stages of one pipeline."""
    return len(placement) // 2 if isinstance(placement, BidirectionalPlacement) else len(placement)


def find_source(action: Action, placement: Placement) -> Action | None:
    """Return the computation of another stage whose result an action reads, an F or a B; None if it reads none."""
    stages = count_stages(placement)
    if action.kind is Kind.F and action.stage % stages > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind in (Kind.B, Kind.BW) and action.stage % stages < stages - 1:
        return Action(Kind.B, action.stage + 1, action.microbatch)
    return None


def find_target(action: Action, placement: Placement) -> int | None:
    """Return the stage that reads the result of an action; None if no stage does."""
    stages = count_stages(placement)
    target = action.stage + (1 if action.kind is Kind.F else -1)
    is_there = (
        action.kind is not Kind.W
        and 0 <= target < len(placement)
        and target // stages == action.stage // stages
    )
    return target if is_there else None


def list_messages(schedule: Schedule, placement: Placement) -> dict[tuple[int, int], list[Action]]:
    """Return the messages of each directed edge ``(sender, receiver)`` in the order of the sender.

    The name of a message is the computation that makes it; for a full backward it is the B.
    """
    messages: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, order in enumerate(schedule):
        for action in order:
            target = find_target(action, placement)
            if target is not None and placement[target] != rank:
                kind = Kind.F if action.kind is Kind.F else Kind.B
                messages[rank, placement[target]].append(action._replace(kind=kind))
    return dict(messages)


# --- text ---


def write_orders(schedule: Schedule) -> list[str]:
    """Return orders as text, with a line for each rank."""
    return [" ".join(map(str, order)) for order in schedule]


def read_orders(lines: Sequence[str]) -> Schedule:
    """Return the orders that :func:`write_orders` wrote as lines.

    Raises:
        ScheduleError: A word is no action.
    """
    return [[_read_action(word) for word in line.split()] for line in lines]


def _read_action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise ScheduleError(f"{word} is no action. Write one as 0F3: stage, kind and microbatch.")
    return Action(Kind(found[2]), int(found[1]), int(found[3]))


# --- the program of a rank ---


@dataclass(frozen=True)
class Receive:
    """A message to receive.

    Attributes:
        action: The computation that reads it; its kind is F or B.
        sender: Rank of the sender.
    """

    action: Action
    sender: int


@dataclass
class Step:
    """A computation and its messages.

    Attributes:
        action: The computation.
        receive: The message that it reads, if another rank sends it.
        receiver: Rank that gets its result, if that is another rank.
        next_stage: Stage on this rank that gets its result, if one does.
        posts: Receives to start before it, in the order of their senders.
        kept: By receiver, the number of messages that may still be unread there once ``receive`` has arrived.
        is_last_backward: Whether it is the last B of its stage, in full or not.
        reduces: Whether it has the last weight gradients of its stage, so that they are reduced and scaled after it.
        unshards: Stages whose parameters are gathered before it.
        reshards: Stages whose parameters are sharded again before it.
    """

    action: Action
    receive: Receive | None = None
    receiver: int | None = None
    next_stage: int | None = None
    posts: list[Receive] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    is_last_backward: bool = False
    reduces: bool = False
    unshards: list[int] = field(default_factory=list)
    reshards: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """The steps of one rank.

    Attributes:
        rank: The rank.
        steps: Its steps.
        edges: Directed edges of the full pipeline with messages.
        peak_activations: Most microbatches that are between F and the last of their B and W at one time, over all
            stages of the rank.
        final_reshards: Stages whose parameters are sharded again at the end.
    """

    rank: int
    steps: Sequence[Step]
    edges: Sequence[tuple[int, int]]
    peak_activations: int
    final_reshards: Sequence[int] = ()


def make_program(
    schedule: Schedule,
    placement: Sequence[int],
    rank: int,
    *,
    ahead: int,
    shardings: Sequence[tuple[int, str, int]] = (),
) -> Program:
    """Return the program of a rank.

    Args:
        schedule: Orders of all ranks.
        placement: Rank of each stage.
        rank: The rank.
        ahead: Number of receives that start before the computation that precedes their reader.
        shardings: The unshards and reshards of the rank's stages, each with the index of the computation before which
            it happens, ``"UNSHARD"`` or ``"RESHARD"``, and the stage.
    """
    messages = list_messages(schedule, placement)
    steps = [_make_step(action, placement, rank) for action in schedule[rank]]
    _mark_reductions(steps)
    _post_receives(steps, messages, rank, ahead)
    _find_read(steps, schedule, placement, messages, rank)
    final = [stage for index, _, stage in shardings if index >= len(steps)]
    for index, name, stage in shardings:
        if index < len(steps):
            (steps[index].unshards if name == "UNSHARD" else steps[index].reshards).append(stage)
    return Program(rank, steps, sorted(messages), _count_activations(schedule[rank]), final)


def _message_of(action: Action) -> Action:
    return action._replace(kind=Kind.F if action.kind is Kind.F else Kind.B)


def _make_step(action: Action, placement: Sequence[int], rank: int) -> Step:
    step = Step(action)
    if action.kind is Kind.W:
        return step
    source = find_source(action, placement)
    if source is not None and placement[source.stage] != rank:
        step.receive = Receive(_message_of(action), placement[source.stage])
    target = find_target(action, placement)
    if target is not None:
        if placement[target] == rank:
            step.next_stage = target
        else:
            step.receiver = placement[target]
    return step


def _mark_reductions(steps: Sequence[Step]) -> None:
    backwards = {step.action.stage: step for step in steps if step.action.kind in (Kind.B, Kind.BW)}
    weights = {step.action.stage: step for step in steps if step.action.kind in (Kind.W, Kind.BW)}
    for step in backwards.values():
        step.is_last_backward = True
    for step in weights.values():
        step.reduces = True


def _post_receives(
    steps: Sequence[Step], messages: dict[tuple[int, int], list[Action]], rank: int, ahead: int
) -> None:
    """Start each receive ``ahead`` receiving computations before its reader, edges in the same order on all ranks."""
    receiving = [number for number, step in enumerate(steps) if step.receive is not None]
    queues: dict[int, list[Receive]] = {}
    for (sender, receiver), sent in messages.items():
        if receiver == rank:
            shift = {Kind.F: 1, Kind.B: -1}
            queues[sender] = [
                Receive(action._replace(stage=action.stage + shift[action.kind]), sender)
                for action in sent
            ]
    places = {receive: place for queue in queues.values() for place, receive in enumerate(queue)}
    # The number of posted receives by sender.
    posted: Counter[int] = Counter()
    # The first element of `receiving` that is not computed.
    first = 0
    for number, step in enumerate(steps):
        if first < len(receiving) and receiving[first] < number:
            first += 1
        # The next computation that receives does not count. A computation that reads nothing has no receive itself.
        limit = ahead + (step.receive is not None)
        until: Counter[int] = Counter()
        for reader in receiving[first : first + limit]:
            receive = steps[reader].receive
            assert receive is not None
            until[receive.sender] = max(until[receive.sender], places[receive] + 1)
        for sender in sorted(until):
            step.posts += queues[sender][posted[sender] : until[sender]]
            posted[sender] = max(posted[sender], until[sender])


def _find_read(
    steps: Sequence[Step],
    schedule: Schedule,
    placement: Sequence[int],
    messages: dict[tuple[int, int], list[Action]],
    rank: int,
) -> None:
    """Note the messages that were surely read when a message comes back that their receiver made afterwards."""
    made_at = {
        _message_of(action): number
        for order in schedule
        for number, action in enumerate(order)
        if action.kind is not Kind.W
    }
    # The number of messages sent so far, by receiver.
    sent: Counter[int] = Counter()
    # By receiver and message, the computation up to which that message and all earlier ones are read.
    read_at: defaultdict[int, list[int]] = defaultdict(list)
    for (sender, receiver), queue in messages.items():
        if sender == rank:
            for message in queue:
                reader = message._replace(
                    stage=message.stage + (1 if message.kind is Kind.F else -1)
                )
                before = read_at[receiver][-1] if read_at[receiver] else 0
                read_at[receiver].append(max(before, made_at[reader]))
    for step in steps:
        if step.receive is not None:
            peer = step.receive.sender
            source = find_source(step.action, placement)
            assert source is not None
            until = made_at[_message_of(source)]
            step.kept = {peer: sent[peer] - bisect_right(read_at[peer], until, hi=sent[peer])}
        if step.receiver is not None:
            sent[step.receiver] += 1


def _count_activations(order: Sequence[Action]) -> int:
    """Return the most microbatches that wait for their last backward."""
    last = {(action.stage, action.microbatch): number for number, action in enumerate(order)}
    live = peak = 0
    for number, action in enumerate(order):
        live += action.kind is Kind.F
        peak = max(peak, live)
        live -= last[action.stage, action.microbatch] == number
    return peak

"""The rules that each order keeps, and the slots that its messages need."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from ovpatch.overlap.pipelining.ir import (
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    find_source,
    list_messages,
)


def check_schedule(
    schedule: Schedule,
    placement: Placement,
    *,
    stock: Schedule | None = None,
    keep_forward_order: bool = False,
    slots: int | None = None,
) -> None:
    """Check that a schedule computes each microbatch once, keeps the bits of stock PyTorch, and ends.

    Args:
        schedule: Orders by rank.
        placement: Rank of each stage.
        stock: Order whose bits are kept. Default: microbatches of a stage go in ascending order.
        keep_forward_order: Whether each rank runs its Fs in the sequence that ``stock`` has over all stages of the
            rank, because Fs draw random numbers.
        slots: Messages that a directed edge between two ranks holds between its sender and the action that reads them;
            None for any number. Messages of an edge arrive in the sender's order.

    Raises:
        ScheduleError: A rule is broken. The message names the first violation, in the order of the rules: numbers,
            placement, each computation once, F before B before W, sequences of ``stock``, no deadlock.
    """
    if len(schedule) != max(placement, default=-1) + 1:
        raise ScheduleError(
            f"the schedule has {len(schedule)} ranks and the placement "
            f"{max(placement, default=-1) + 1}. Give an order to each rank."
        )
    if keep_forward_order and stock is None:
        raise ScheduleError(
            "the sequence of Fs to keep is unknown. Give the stock schedule with keep_forward_order."
        )
    if slots is not None and slots < 1:
        raise ScheduleError(f"{slots} slots hold no message. Give 1 or more, or None.")
    _check_each_once(schedule, placement)
    _check_dependencies(schedule)
    _check_sequences(schedule, stock, keep_forward_order)
    _check_progress(schedule, placement, slots)


def _check_each_once(schedule: Schedule, placement: Placement) -> None:
    # A full backward counts as one B and one W.
    counts: dict[Action, int] = defaultdict(int)
    microbatches = 1 + max(
        (action.microbatch for order in schedule for action in order), default=-1
    )
    for rank, order in enumerate(schedule):
        for action in order:
            if not 0 <= action.stage < len(placement) or placement[action.stage] != rank:
                known = 0 <= action.stage < len(placement)
                raise ScheduleError(
                    f"rank {rank}: {action} is of stage {action.stage}, which "
                    f"{f'rank {placement[action.stage]} holds' if known else 'does not exist'}. "
                    "Move it to the rank of its stage."
                )
            for kind in (Kind.B, Kind.W) if action.kind is Kind.BW else (action.kind,):
                counts[action._replace(kind=kind)] += 1
    for stage, rank in enumerate(placement):
        for microbatch in range(microbatches):
            for kind in (Kind.F, Kind.B, Kind.W):
                count = counts[Action(kind, stage, microbatch)]
                if count != 1:
                    raise ScheduleError(
                        f"rank {rank}: {kind.value} of stage {stage} and microbatch {microbatch} "
                        f"is there {count} times. Have each computation there once."
                    )


def _check_dependencies(schedule: Schedule) -> None:
    for rank, order in enumerate(schedule):
        # All computations of a stage are on one rank, so each order can be checked alone.
        done: set[Action] = set()
        for action in order:
            needed = (
                Kind.F
                if action.kind in (Kind.B, Kind.BW)
                else Kind.B
                if action.kind is Kind.W
                else None
            )
            if needed is not None and action._replace(kind=needed) not in done:
                raise ScheduleError(
                    f"rank {rank}: {action} runs before {action._replace(kind=needed)}. Run F "
                    "before B before W."
                )
            done.add(action)


def _check_sequences(schedule: Schedule, stock: Schedule | None, keep_forward_order: bool) -> None:
    # Gradients are sums over microbatches, and sums round by their order.
    expected = None if stock is None else _sequences(stock)
    for (rank, stage, kind), found in _sequences(schedule).items():
        wanted = sorted(found) if expected is None else expected.get((rank, stage, kind), [])
        if found != wanted:
            pairs = enumerate(zip(found, wanted, strict=False))
            index = next(
                (number for number, (actual, given) in pairs if actual != given), len(wanted)
            )
            instead = f", not {wanted[index]}" if index < len(wanted) else ""
            raise ScheduleError(
                f"rank {rank}: {kind.value} number {index} of stage {stage} is of microbatch "
                f"{found[index]}{instead}. Sums round by their order: keep the stock order of "
                "microbatches within each stage."
            )
    if not keep_forward_order or stock is None:
        return
    for rank, orders in enumerate(zip(schedule, stock, strict=True)):
        actual, given = ([action for action in order if action.kind is Kind.F] for order in orders)
        for action, expected_action in zip(actual, given, strict=True):
            if action != expected_action:
                raise ScheduleError(
                    f"rank {rank}: {action} runs where stock runs {expected_action}, and Fs draw random "
                    "numbers. Keep the stock sequence of Fs on each rank."
                )


def _sequences(schedule: Schedule) -> dict[tuple[int, int, Kind], list[int]]:
    """Return the microbatches by rank, stage and kind in their order; a full backward counts as B and as W."""
    found: dict[tuple[int, int, Kind], list[int]] = defaultdict(list)
    for rank, order in enumerate(schedule):
        for action in order:
            for kind in (Kind.B, Kind.W) if action.kind is Kind.BW else (action.kind,):
                found[rank, action.stage, kind].append(action.microbatch)
    return found


def _check_progress(schedule: Schedule, placement: Placement, slots: int | None) -> None:
    """Run all orders without costs: a rank waits for its message, and a message waits for a slot of its edge."""
    positions = [0] * len(schedule)
    numbers: dict[Action, tuple[tuple[int, int], int]] = {
        message: (edge, number)
        for edge, messages in list_messages(schedule, placement).items()
        for number, message in enumerate(messages)
    }
    # Results that exist, and by edge the messages that were read and the first one that was not.
    made: set[Action] = set()
    read: dict[tuple[int, int], set[int]] = defaultdict(set)
    first_unread: dict[tuple[int, int], int] = defaultdict(int)

    def arrives(action: Action) -> bool:
        source = find_source(action, placement)
        if source is None or source not in made:
            return source is None
        if slots is None or source not in numbers:
            return True
        edge, number = numbers[source]
        # Slot ``number % slots`` is free once the receiver has read all messages up to ``number - slots``.
        return number - first_unread[edge] < slots

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule):
            while positions[rank] < len(order) and arrives(order[positions[rank]]):
                action = order[positions[rank]]
                positions[rank] += 1
                moved = True
                if action.kind is not Kind.W:
                    made.add(action._replace(kind=Kind.B) if action.kind is Kind.BW else action)
                source = find_source(action, placement)
                if source in numbers:
                    edge, number = numbers[source]
                    read[edge].add(number)
                    while first_unread[edge] in read[edge]:
                        first_unread[edge] += 1
    for rank, order in enumerate(schedule):
        if positions[rank] < len(order):
            action = order[positions[rank]]
            source = find_source(action, placement)
            known = slots is not None and source in made
            why = (
                f"all {slots} slots of the edge hold later messages"
                if known
                else f"{source} waits as well"
            )
            raise ScheduleError(
                f"rank {rank}: deadlock, {action} waits for {source}, and {why}. "
                f"{'Give the edge more slots.' if known else 'Move it after the actions that its source waits for.'}"
            )


def count_slots(schedule: Schedule, placement: Placement) -> int:
    """Return the fewest slots of an edge with which all ranks end, even if a rank stops until its message has a slot.

    A rank takes messages of an edge out of their slots in the sender's order, each before the computation that reads it
    or a later one.
    """
    return next(slots for slots in itertools.count(1) if _ends_with(schedule, placement, slots))


def _ends_with(schedule: Schedule, placement: Placement, slots: int) -> bool:
    numbers = {
        message: (edge, number)
        for edge, messages in list_messages(schedule, placement).items()
        for number, message in enumerate(messages)
    }
    positions = [0] * len(schedule)
    sent: Counter[tuple[int, int]] = Counter()
    # By edge, the number of messages that the receiver has taken out of their slots.
    taken: Counter[tuple[int, int]] = Counter()

    def runs(action: Action) -> bool:
        """Take the input of an action, and return whether it ends."""
        source = find_source(action, placement)
        if source in numbers:
            edge, number = numbers[source]
            if sent[edge] <= number:
                return False
            taken[edge] = max(taken[edge], number + 1)
        message = action._replace(kind=Kind.B) if action.kind is Kind.BW else action
        if message in numbers:
            edge, _ = numbers[message]
            if sent[edge] - taken[edge] >= slots:
                return False
            sent[edge] += 1
        return True

    moved = True
    while moved:
        before = sent.total(), taken.total(), sum(positions)
        for rank, order in enumerate(schedule):
            while positions[rank] < len(order) and runs(order[positions[rank]]):
                positions[rank] += 1
        moved = before != (sent.total(), taken.total(), sum(positions))
    return all(position == len(order) for position, order in zip(positions, schedule, strict=True))

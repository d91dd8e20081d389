"""Schedules made in one pass: from costs, memory and a few choices to the order of each rank.

The search of :mod:`ovpatch.planner.solver` starts from them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ovpatch.overlap.pipelining.ir import Action, Kind, Placement, Schedule, find_source
from ovpatch.planner.simulator import Costs, Footprint

Orders: TypeAlias = list[list[int]]
"""Numbers of operations (:class:`Operations`) by rank, in their order."""

KINDS: Final = (Kind.F, Kind.B, Kind.W)
# The relative rounding error of a sum of footprints.
_ROUNDING: Final = 1e-9


class Operations:
    """All operations of a step by number, in plain lists, which the inner loops read.

    Operation ``(stage * 3 + kind) * microbatches + position`` is number ``position`` of its kind in its stage.
    Kinds are 0 for F, 1 for B and 2 for W.

    Attributes:
        actions: Action of each operation.
        rank: Its rank.
        duration: Its time.
        source: The operation of another stage that it reads; -1 if there is none.
        lag: Time of the transfer from ``source``.
        reader: The operation that has this operation as ``source``; -1 if there is none.
        needed: The operation of the same stage and microbatch that must be done before; -1 if there is none.
        change: The amount by which it changes the memory of its rank.
        sequence: Operations with the same value keep their order.
        limit: Memory limit of each rank.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        footprint: Footprint,
        limit: Sequence[float],
        *,
        stock: Schedule | None = None,
        keep_forward_order: bool = False,
    ) -> None:
        """Number the operations; the arguments are attributes of :class:`ovpatch.planner.solver.Problem`."""
        self.placement = placement
        self.microbatches = microbatches
        self.stages = len(placement)
        self.ranks = max(placement) + 1
        # A sum of footprints that exceeds the limit by rounding alone must fit.
        self.limit = [
            value + _ROUNDING * max(1.0, value) if math.isfinite(value) else value
            for value in limit
        ]
        microbatch_of = _sequences(self.stages, microbatches, stock)
        self.actions = [
            Action(kind, stage, microbatch)
            for stage in range(self.stages)
            for kind in KINDS
            for microbatch in microbatch_of[stage, kind]
        ]
        number = {action: index for index, action in enumerate(self.actions)}
        self.number = number
        self.rank = [placement[action.stage] for action in self.actions]
        self.duration = [costs.time_of(action) for action in self.actions]
        self.change = [footprint.change(action) for action in self.actions]
        self.source = [-1] * len(number)
        self.reader = [-1] * len(number)
        self.lag = [0.0] * len(number)
        self.needed = [-1] * len(number)
        self.sequence = [index // microbatches for index in range(len(number))]
        for index, action in enumerate(self.actions):
            source = find_source(action, placement)
            if source is not None:
                self.source[index] = number[source]
                self.reader[number[source]] = index
                self.lag[index] = costs.send_time(placement[source.stage], placement[action.stage])
            if action.kind is not Kind.F:
                self.needed[index] = number[
                    action._replace(kind=Kind.F if action.kind is Kind.B else Kind.B)
                ]
            elif keep_forward_order:
                # One sequence for all Fs of a rank; stages' sequences are not negative.
                self.sequence[index] = -1 - self.rank[index]
        # The Fs of each rank in the sequence to keep; None if their sequence is free.
        self.forwards: list[list[int]] | None = None
        if keep_forward_order and stock is not None:
            self.forwards = [
                [number[action] for action in order if action.kind is Kind.F] for order in stock
            ]

    def encode(self, schedule: Schedule) -> Orders:
        """Return the numbers of a schedule; a full backward becomes a B and a W."""
        orders: Orders = []
        for order in schedule:
            orders.append([])
            for action in order:
                for kind in (Kind.B, Kind.W) if action.kind is Kind.BW else (action.kind,):
                    orders[-1].append(self.number[action._replace(kind=kind)])
        return orders

    def decode(self, orders: Orders) -> Schedule:
        """Return the actions of numbers."""
        return [[self.actions[operation] for operation in order] for order in orders]

    def fits(self, orders: Orders) -> bool:
        """Return whether each rank stays within its memory."""
        for rank, order in enumerate(orders):
            held = 0.0
            for operation in order:
                held += self.change[operation]
                if held > self.limit[rank]:
                    return False
        return True


def _sequences(
    stages: int, microbatches: int, stock: Schedule | None
) -> dict[tuple[int, Kind], list[int]]:
    """Return the microbatches of each stage and kind in the given order; a full backward's W goes as its B."""
    found: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    for order in stock or ():
        for action in order:
            if action.kind is Kind.F or action.kind is Kind.B:
                found[action.stage, action.kind].append(action.microbatch)
            if action.kind is Kind.BW:
                found[action.stage, Kind.B].append(action.microbatch)
                found[action.stage, Kind.W].append(action.microbatch)
            if action.kind is Kind.W:
                found[action.stage, Kind.W].append(action.microbatch)
    keys = itertools.product(range(stages), KINDS)
    return {key: found[key] if stock is not None else list(range(microbatches)) for key in keys}


class _State:
    """Clocks, memory and progress of all ranks while a schedule is made."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        ranks = operations.ranks
        self.orders: Orders = [[] for _ in range(ranks)]
        self.clock = [0.0] * ranks
        self.held = [0.0] * ranks
        # The time that each rank has waited since its first operation.
        self.idle = [0.0] * ranks
        # The end of each operation; None if it has not run.
        self.end: list[float | None] = [None] * len(operations.actions)
        # The number of operations that have run, by stage * 3 + kind.
        self.done = [0] * (3 * operations.stages)

    def following(self, stage: int, kind: int) -> int:
        """Return the next operation of a kind; -1 if all are done."""
        done = self.done[stage * 3 + kind]
        microbatches = self.operations.microbatches
        return -1 if done == microbatches else (stage * 3 + kind) * microbatches + done

    def arrival(self, operation: int) -> float | None:
        """Return the time at which the input of an operation has arrived; None while that is unknown."""
        operations = self.operations
        needed = operations.needed[operation]
        if needed >= 0 and self.end[needed] is None:
            return None
        source = operations.source[operation]
        if source < 0:
            return 0.0
        end = self.end[source]
        return None if end is None else end + operations.lag[operation]

    def run(self, operation: int, arrival: float = 0.0) -> None:
        """Run an operation after its arrival; from a rank's first operation on, its waits count as idle."""
        operations = self.operations
        rank = operations.rank[operation]
        if arrival > self.clock[rank]:
            if self.orders[rank]:
                self.idle[rank] += arrival - self.clock[rank]
            self.clock[rank] = arrival
        self.clock[rank] += operations.duration[operation]
        self.held[rank] += operations.change[operation]
        self.end[operation] = self.clock[rank]
        self.done[operation // operations.microbatches] += 1
        self.orders[rank].append(operation)

    def prefers_hole(self, rank: int, hole: float) -> bool:
        """Return whether a rank may wait for ``hole`` without becoming the rank that waits most."""
        return hole <= max(self.idle) - self.idle[rank]


# --- the heuristic of the zero-bubble paper, one stage per rank ---


@dataclass(frozen=True)
class Choices:
    """The three choices of :func:`build_zero_bubble`.

    Attributes:
        protect_first: Whether warm-up never delays the first B.
        pause_forward: Whether a rank that is far ahead of the next may leave an F for later.
        fill_small_holes: Whether a W also runs in a hole that is too small for it if the rank has idled less
            than another rank.
    """

    protect_first: bool
    pause_forward: bool
    fill_small_holes: bool

    @classmethod
    def all(cls) -> Iterator[Choices]:
        """Yield the eight combinations."""
        for values in itertools.product((False, True), repeat=3):
            yield cls(*values)


def build_zero_bubble(operations: Operations, choices: Choices) -> Orders | None:
    """Return a schedule by the heuristic of Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.1.

    The heuristic needs one stage per rank. Warm-up Fs fill the time until the first B comes back. After that
    each round has at most one F and one B per stage, and Ws fill the holes.

    Returns:
        The orders, or None if the memory does not suffice.
    """
    return _ZeroBubble(operations, choices).build()


class _ZeroBubble(_State):
    def __init__(self, operations: Operations, choices: Choices) -> None:
        super().__init__(operations)
        self.choices = choices
        per_kind = operations.microbatches
        self.forward, self.backward, self.weight = (
            [
                operations.duration[(stage * 3 + kind) * per_kind]
                for stage in range(operations.stages)
            ]
            for kind in range(3)
        )
        # The memory that an F of each stage adds.
        self.grows = [operations.change[stage * 3 * per_kind] for stage in range(operations.stages)]

    def build(self) -> Orders | None:
        stages, microbatches = range(self.operations.stages), self.operations.microbatches
        if not all(self._place(stage, 0) for stage in stages):
            return None
        extras = [stage for stage, extra in enumerate(self._extras()) for _ in range(extra)]
        if not all(self._place(stage, 0) for stage in extras):
            return None
        if not all(self._place(stage, 1) for stage in reversed(stages)):
            return None
        for _ in range(1, microbatches):
            forwards = [stage for stage, wanted in enumerate(self._wanted()) if wanted]
            if not all(self._fill_and_place(stage, 0) for stage in forwards):
                return None
            if not all(self._fill_and_place(stage, 1) for stage in reversed(stages)):
                return None
        if any(self.done[stage * 3] < microbatches for stage in stages):
            return None
        for stage in stages:
            while (weight := self.following(stage, 2)) >= 0:
                self.run(weight)
        return self.orders

    def _place(self, stage: int, kind: int) -> bool:
        operation = self.following(stage, kind)
        arrival = self.arrival(operation)
        if (
            arrival is None
            or self.held[stage] + self.operations.change[operation] > self.operations.limit[stage]
        ):
            return False
        self.run(operation, arrival)
        return True

    def _pending(self, stage: int) -> int:
        return self.done[stage * 3 + 1] - self.done[stage * 3 + 2]

    def _fill_and_place(self, stage: int, kind: int) -> bool:
        """Run the Ws that make room or fit before an F or B arrives, then the F or B."""
        if stage == 0 and kind == 1 and self.following(0, 0) < 0:
            while self._pending(0):
                self.run(self.following(0, 2))
        operation = self.following(stage, kind)
        arrival = self.arrival(operation)
        if arrival is None:
            return False
        change, limit = self.operations.change[operation], self.operations.limit[stage]
        while self.held[stage] + change > limit:
            if not self._pending(stage):
                return False
            self.run(self.following(stage, 2))
        while self._pending(stage) and self.clock[stage] + self.weight[stage] <= arrival:
            self.run(self.following(stage, 2))
        hole = arrival - self.clock[stage]
        if (
            self._pending(stage)
            and hole > 0
            and (self.choices.fill_small_holes or not self.prefers_hole(stage, hole))
        ):
            self.run(self.following(stage, 2))
        return self._place(stage, kind)

    def _extras(self) -> list[int]:
        """Return the number of Fs that each stage runs between its first F and its first B."""
        operations = self.operations
        stages, microbatches = operations.stages, operations.microbatches
        extras = [0] * stages
        # The time at which the first B of the next stage ends.
        returned = self.clock[-1] + self.backward[-1]
        for stage in range(stages - 2, -1, -1):
            arrives = returned + operations.lag[(stage * 3 + 1) * microbatches]
            clock, held = self.clock[stage], self.held[stage]
            while (
                1 + extras[stage] < microbatches
                and held + self.grows[stage] <= operations.limit[stage]
            ):
                late = (
                    clock + self.forward[stage] > arrives
                    if self.choices.protect_first
                    else clock >= arrives
                )
                if late:
                    break
                extras[stage] += 1
                clock += self.forward[stage]
                held += self.grows[stage]
            returned = max(clock, arrives) + self.backward[stage]
        for stage in range(1, stages):
            if extras[stage - 1] + 1 < microbatches:
                extras[stage] = max(0, min(extras[stage], extras[stage - 1] - 1))
        return extras

    def _wanted(self) -> list[bool]:
        """Return whether each stage runs an F in this round; a stage does so only if all later stages do."""
        stages = self.operations.stages
        wanted = [self._wants(stage) for stage in range(stages)]
        for stage in range(stages - 2, -1, -1):
            wanted[stage] = wanted[stage] and wanted[stage + 1]
        return wanted

    def _wants(self, stage: int) -> bool:
        operations = self.operations
        if self.following(stage, 0) < 0:
            return False
        ahead = (
            stage + 1 < operations.stages and self.done[stage * 3] >= self.done[stage * 3 + 3] + 2
        )
        if not self.choices.pause_forward or not ahead:
            return True
        lag = operations.lag[(stage * 3 + 1) * operations.microbatches]
        earliest = self.clock[stage + 1] + self.forward[stage + 1] + self.backward[stage + 1] + lag
        if self.clock[stage] >= earliest:
            return False
        held, room = self.held[stage] + self.grows[stage], 0.0
        for number in range(self._pending(stage)):
            if held <= operations.limit[stage]:
                break
            weight = (stage * 3 + 2) * operations.microbatches + self.done[stage * 3 + 2] + number
            held += operations.change[weight]
            room += self.weight[stage]
        if self.clock[stage] + self.forward[stage] + room <= earliest:
            return True
        return not self.prefers_hole(stage, earliest - self.clock[stage])


# --- Ws between given Fs and Bs ---


def place_weights(
    operations: Operations, orders: Orders, *, fill_small_holes: bool
) -> Orders | None:
    """Return orders with the Fs and Bs of ``orders`` in their sequence; Ws fill waits or free memory.

    Args:
        operations: The operations.
        orders: Orders of Fs and Bs; Ws in them do not count.
        fill_small_holes: Whether a W also runs in a hole that is too small for it if the rank has idled less
            than another rank.

    Returns:
        The orders, or None if the memory does not suffice, or the orders deadlock.
    """
    return _WeightPlacement(operations, orders, fill_small_holes).build()


class _WeightPlacement(_State):
    def __init__(self, operations: Operations, orders: Orders, fill_small_holes: bool) -> None:
        super().__init__(operations)
        self.given = [
            [x for x in order if x // operations.microbatches % 3 < 2] for order in orders
        ]
        self.fill_small_holes = fill_small_holes
        # The stages of each rank whose W may run. The stage of the oldest B is last.
        self.pending: list[list[int]] = [[] for _ in orders]

    def build(self) -> Orders | None:
        positions = [0] * len(self.given)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.given):
                while positions[rank] < len(order):
                    operation = order[positions[rank]]
                    arrival = self.arrival(operation)
                    if arrival is None:
                        break
                    if not self._fill(rank, operation, arrival):
                        return None
                    self.run(operation, arrival)
                    stage, kind = divmod(operation // self.operations.microbatches, 3)
                    if kind == 1:
                        self.pending[rank].insert(0, stage)
                    positions[rank] += 1
                    moved = True
        if any(
            position < len(order) for position, order in zip(positions, self.given, strict=True)
        ):
            return None
        for rank, stages in enumerate(self.pending):
            while stages:
                self._run_weight(rank)
        return self.orders

    def _run_weight(self, rank: int) -> None:
        self.run(self.following(self.pending[rank].pop(), 2))

    def _fill(self, rank: int, operation: int, arrival: float) -> bool:
        operations, pending = self.operations, self.pending[rank]
        while self.held[rank] + operations.change[operation] > operations.limit[rank]:
            if not pending:
                return False
            self._run_weight(rank)
        while pending:
            hole = arrival - self.clock[rank]
            fits = operations.duration[self.following(pending[-1], 2)] <= hole
            if hole <= 0 or not (
                fits or self.fill_small_holes or not self.prefers_hole(rank, hole)
            ):
                break
            self._run_weight(rank)
        return True


# --- list scheduling, any placement ---


@dataclass(frozen=True)
class Priorities:
    """The rules by which :func:`build_list_schedule` chooses an operation.

    Attributes:
        alternate: Whether an F goes first after a B. Otherwise a B always goes first.
        fill_small_holes: Whether a W also runs in a hole that is too small for it if the rank has idled less
            than another rank.
        warmup: Most microbatches of the first stage of a rank whose B is not done, by rank.
        deep_first: Whether the later stage of a rank goes first. Otherwise the earlier stage does.
    """

    alternate: bool
    fill_small_holes: bool
    warmup: tuple[float, ...]
    deep_first: bool = True


def build_list_schedule(operations: Operations, priorities: Priorities) -> Orders | None:
    """Return a schedule that runs, on the rank that is free first, the best operation that has arrived.

    Returns:
        The orders, or None if the memory does not suffice for these priorities.
    """
    return _ListSchedule(operations, priorities).build()


class _ListSchedule(_State):
    def __init__(self, operations: Operations, priorities: Priorities) -> None:
        super().__init__(operations)
        self.priorities = priorities
        # The stages of each rank.
        self.local: list[list[int]] = [[] for _ in range(operations.ranks)]
        for stage, rank in enumerate(operations.placement):
            self.local[rank].append(stage)
        self.forwards_done = [0] * operations.ranks
        first = [
            operations.change[stage * 3 * operations.microbatches]
            for stage in range(operations.stages)
        ]
        # An F leaves room for the later stages of its rank, without which its microbatch would never end.
        self.reserve = [
            sum(first[later] for later in self.local[rank] if later > stage)
            for stage, rank in enumerate(operations.placement)
        ]
        # Whether the last F or B of each rank was a B.
        self.after_backward = [False] * operations.ranks

    def build(self) -> Orders | None:
        operations = self.operations
        queue = [(0.0, rank) for rank in range(operations.ranks)]
        heapq.heapify(queue)
        # Ranks without anything to run, until a peer runs an operation whose result they read.
        sleeping: set[int] = set()
        while queue:
            _, rank = heapq.heappop(queue)
            if rank in sleeping:
                continue
            operation, wake = self._choose(rank)
            if operation >= 0:
                self.run(operation, self.arrival(operation) or 0.0)
                kind = operation // operations.microbatches % 3
                if kind != 2:
                    self.after_backward[rank] = kind == 1
                self.forwards_done[rank] += kind == 0
                heapq.heappush(queue, (self.clock[rank], rank))
                reader = operations.reader[operation]
                if reader >= 0 and operations.rank[reader] in sleeping:
                    sleeping.discard(operations.rank[reader])
                    heapq.heappush(
                        queue, (self.clock[operations.rank[reader]], operations.rank[reader])
                    )
            elif math.isfinite(wake):
                if self.orders[rank]:
                    self.idle[rank] += wake - self.clock[rank]
                self.clock[rank] = wake
                heapq.heappush(queue, (wake, rank))
            else:
                sleeping.add(rank)
        return self.orders if all(done == operations.microbatches for done in self.done) else None

    def _choose(self, rank: int) -> tuple[int, float]:
        """Return the operation that a rank runs now, or -1, and the time at which the next input arrives."""
        clock, wake = self.clock[rank], math.inf
        best, best_key = -1, (-1, 0)
        prefers_forward = self.priorities.alternate and self.after_backward[rank]
        for stage in self.local[rank]:
            depth = stage if self.priorities.deep_first else -stage
            for kind in (0, 1):
                operation = self.following(stage, kind)
                if operation < 0 or (kind == 0 and not self._may_forward(rank, stage, operation)):
                    continue
                arrival = self.arrival(operation)
                if arrival is None:
                    continue
                if arrival > clock:
                    wake = min(wake, arrival)
                    continue
                key = (int((kind == 0) == prefers_forward), depth)
                if key > best_key:
                    best, best_key = operation, key
        pending = self._pending(rank)
        if best < 0:
            if pending < 0:
                return -1, wake
            hole = wake - clock
            fits = self.operations.duration[pending] <= hole
            if fits or self.priorities.fill_small_holes or not self.prefers_hole(rank, hole):
                return pending, wake
            return -1, wake
        # Without room for the best operation, a W must free memory first.
        if self.held[rank] + self.operations.change[best] > self.operations.limit[rank]:
            return pending, wake
        return best, wake

    def _pending(self, rank: int) -> int:
        """Return a W whose B is done, for the latest such stage; -1 if there is none."""
        for stage in reversed(self.local[rank]):
            if self.done[stage * 3 + 2] < self.done[stage * 3 + 1]:
                return self.following(stage, 2)
        return -1

    def _may_forward(self, rank: int, stage: int, operation: int) -> bool:
        operations = self.operations
        if (
            operations.forwards is not None
            and operations.forwards[rank][self.forwards_done[rank]] != operation
        ):
            return False
        in_flight = self.done[stage * 3] - self.done[stage * 3 + 1]
        if stage == self.local[rank][0] and in_flight >= self.priorities.warmup[rank]:
            return False
        room = (
            operations.limit[rank]
            - self.held[rank]
            - operations.change[operation]
            - self.reserve[stage]
        )
        if room >= 0:
            return True
        freed = sum(
            operations.change[(local * 3 + 2) * operations.microbatches]
            * (self.done[local * 3 + 1] - self.done[local * 3 + 2])
            for local in self.local[rank]
        )
        return room - freed >= 0

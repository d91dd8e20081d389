"""Simulated annealing of orders by small moves of single operations."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from ovpatch.planner.zero_bubble import Operations, Orders

SAME: Final = 1e-9
"""The relative difference of two sums of the same costs."""

# Temperatures at the start and the end, in units of a microbatch's time on the busiest rank.
_HOT: Final = 0.02
_COLD: Final = 0.0005
# The largest number of positions that one move shifts an operation.
_FARTHEST: Final = 4


class LocalSearch:
    """Orders that change by small moves, and the time of their step.

    A step that chains lasts as long as one round of the max-plus map from the clocks at which ranks begin
    to the clocks at which they end. For any vector of beginnings, the largest advance of a rank is an
    upper bound of that time, and for the vector of the steady state it is exact. So one step is simulated
    per evaluation, from the offsets that the best orders have in their steady state. If ranks meet in a
    barrier at the step's end, all offsets are 0.

    Args:
        operations: The operations of a step.
        orders: The orders to start from.
        chained: Whether steps follow each other without a barrier.

    Attributes:
        cost: Time of the step; infinite if the orders deadlock.
        offsets: Time at which each rank begins the step.
        evaluations: Number of simulated moves.
    """

    def __init__(self, operations: Operations, orders: Orders, chained: bool) -> None:
        self.operations = operations
        self.orders = [list(order) for order in orders]
        self.chained = chained
        self.offsets = [0.0] * operations.ranks
        self.evaluations = 0
        self.settle()

    def settle(self) -> None:
        """Evaluate the orders as they are, from the offsets of their steady state."""
        ranks = range(self.operations.ranks)
        self.cost = math.inf
        offsets = [0.0 for _ in ranks]
        # A few rounds reach the steady state of most orders.
        for _ in range(4 if self.chained else 1):
            self.offsets = offsets
            end = [-1.0] * len(self.operations.actions)
            clocks = list(offsets)
            self._tails = self._sum_tails()
            cost = self._run(end, [0 for _ in ranks], clocks, math.inf)
            if cost is None:
                self.cost = math.inf
                return
            first = [end[order[0]] - self.operations.duration[order[0]] for order in self.orders]
            before, self.cost = self.cost, cost
            self._keep(end)
            if self.chained and before == math.inf:
                # After the first round, the first Fs of the step show how far apart ranks begin.
                offsets = [start - min(first) for start in first]
            else:
                offsets = [clock - min(clocks) for clock in clocks]
            if abs(cost - before) <= SAME * cost:
                break

    def _keep(self, end: list[float]) -> None:
        # The end of each operation, by number and by rank.
        self._end = end
        self._ends = [[end[operation] for operation in order] for order in self.orders]
        # The memory that a rank holds after each of its operations.
        change = self.operations.change
        self._held = [
            list(itertools.accumulate(change[operation] for operation in order))
            for order in self.orders
        ]

    def _sum_tails(self) -> list[list[float]]:
        """Return the time that each rank still computes from each position on."""
        duration = self.operations.duration
        tails = []
        for order in self.orders:
            tail = list(
                itertools.accumulate(
                    (duration[operation] for operation in reversed(order)), initial=0.0
                )
            )
            tail.reverse()
            tails.append(tail)
        return tails

    def _run(
        self, end: list[float], positions: list[int], clocks: list[float], most: float
    ) -> float | None:
        """Run all ranks from their positions to their ends.

        Args:
            end: Ends of operations, -1 if unknown; filled in.
            positions: Position of each rank in its order; changed.
            clocks: Time at which each rank is free; changed.
            most: The run ends early once the step is longer.

        Returns:
            The time of the step, or None if it is longer than ``most`` or the orders deadlock.
        """
        operations = self.operations
        # Local variables, because this is the inner loop of the search.
        orders = self.orders
        duration = operations.duration
        source = operations.source
        lag = operations.lag
        reader = operations.reader
        rank_of = operations.rank
        offsets = self.offsets
        tails = self._tails
        ready = list(range(operations.ranks))
        while ready:
            rank = ready.pop()
            order, position, clock = orders[rank], positions[rank], clocks[rank]
            length = len(order)
            while position < length:
                operation = order[position]
                before = source[operation]
                if before >= 0:
                    arrival = end[before]
                    if arrival < 0.0:
                        break
                    arrival += lag[operation]
                    if arrival > clock:
                        clock = arrival
                clock += duration[operation]
                end[operation] = clock
                position += 1
                after = reader[operation]
                if after >= 0 and rank_of[after] != rank:
                    ready.append(rank_of[after])
            positions[rank], clocks[rank] = position, clock
            # The rank computes for at least the rest of its order, even if it never waits again.
            if clock + tails[rank][position] - offsets[rank] > most:
                return None
        if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
            return None
        return max(clock - offset for clock, offset in zip(clocks, offsets, strict=True))

    def anneal(
        self,
        effort: int,
        generator: random.Random,
        bound: float,
        report: Callable[[int, float], None],
    ) -> tuple[float, Orders]:
        """Move operations until the effort is spent or the bound is reached.

        Args:
            effort: Number of simulated operations.
            generator: Draws the moves.
            bound: A time that no order can be faster than.
            report: Called with the effort spent and the shortest step.

        Returns:
            The shortest step and its orders. This object keeps the orders of the last accepted move.
        """
        operations = self.operations
        best, found = self.cost, [list(order) for order in self.orders]
        if best == math.inf:
            return best, found
        unit = (
            max(sum(map(operations.duration.__getitem__, order)) for order in self.orders)
            / operations.microbatches
        )
        draw = generator.random
        spent, next_report = 0, 0
        while spent < effort and best > bound * (1 + SAME):
            if spent >= next_report:
                next_report = spent + max(1, effort // 10)
                report(spent, best)
            rank = int(draw() * operations.ranks)
            length = len(self.orders[rank])
            # The first operation of a rank, position 0, never moves.
            place = 1 + int(draw() * (length - 1))
            distance = 1 + int(draw() * _FARTHEST)
            target = place + distance if draw() < 0.5 else place - distance
            spent += 2
            if not 1 <= target < length:
                continue
            temperature = unit * _HOT * (_COLD / _HOT) ** (spent / effort)
            # A longer step is accepted with the probability exp(-increase / temperature).
            spent += self._try(
                rank, place, target, self.cost - temperature * math.log(draw() + 1e-12)
            )
            if self.cost < best * (1 - SAME):
                best, found = self.cost, [list(order) for order in self.orders]
        report(effort, best)
        return best, found

    def _try(self, rank: int, place: int, target: int, most: float) -> int:
        """Move an operation of a rank, unless the step gets longer than ``most``; return the effort spent."""
        operations = self.operations
        order = self.orders[rank]
        low, high = (place, target) if place < target else (target, place)
        old = order[low : high + 1]
        moved = order[place]
        if not self._may_pass(moved, old[1:] if place < target else old[:-1], place < target):
            return 0
        new = [*old[1:], moved] if place < target else [moved, *old[:-1]]
        held, limit = self._held[rank][low - 1], operations.limit[rank]
        for operation in new:
            held += operations.change[operation]
            if held > limit:
                return 0
        self.evaluations += 1
        order[low : high + 1] = new
        tail = self._tails[rank]
        old_tail = tail[low : high + 1]
        for index in range(high, low - 1, -1):
            tail[index] = tail[index + 1] + operations.duration[order[index]]
        # Operations that end before the first moved operation may start keep their times, on all ranks.
        since = self._ends[rank][low - 1]
        end, positions, clocks, spent = self._end[:], [], [], 0
        for peer, ends in enumerate(self._ends):
            position = low if peer == rank else bisect_right(ends, since)
            positions.append(position)
            clocks.append(ends[position - 1] if position else self.offsets[peer])
            rest = self.orders[peer][position:]
            spent += len(rest)
            for operation in rest:
                end[operation] = -1.0
        cost = self._run(end, positions, clocks, most)
        if cost is None or cost > most:
            order[low : high + 1] = old
            tail[low : high + 1] = old_tail
        else:
            self.cost = cost
            self._end = end
            self._ends = [[end[operation] for operation in line] for line in self.orders]
            self._held[rank] = list(itertools.accumulate(map(operations.change.__getitem__, order)))
        return spent

    def _may_pass(self, moved: int, passed: Sequence[int], later: bool) -> bool:
        """Return whether an operation may pass others of its rank.

        Operations of one sequence, and F, B and W of one microbatch, keep their order.
        """
        operations = self.operations
        sequence, needed, source = operations.sequence, operations.needed, operations.source
        for overtaken in passed:
            if sequence[overtaken] == sequence[moved]:
                return False
            first, second = (moved, overtaken) if later else (overtaken, moved)
            if needed[second] == first or source[second] == first:
                return False
        return True

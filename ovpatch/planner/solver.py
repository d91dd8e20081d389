"""A schedule solved from the costs of each stage and the memory of each rank.

The search starts from the best of the fixed orders and of the orders made in one pass
(:mod:`ovpatch.planner.zero_bubble`). Simulated annealing moves single operations from there. All ranks that
solve the same problem get the same schedule, because the effort is counted in simulated operations, not in
seconds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ovpatch.overlap.pipelining.ir import Action, Kind, Placement, Schedule, ScheduleError
from ovpatch.overlap.pipelining.order_table import ORDERS
from ovpatch.overlap.pipelining.orders import (
    build_order,
    build_vee_blocks,
    build_vee_order,
    split_backwards,
)
from ovpatch.planner.local_search import SAME, LocalSearch
from ovpatch.planner.simulator import Costs, Footprint, Simulation, peak_memory, simulate
from ovpatch.planner.zero_bubble import (
    Choices,
    Operations,
    Orders,
    Priorities,
    build_list_schedule,
    build_zero_bubble,
    place_weights,
)

EFFORT: Final = 3_000_000
"""The simulated operations of a search by default, which take one to two seconds of one core."""

# The share of the effort for list schedules. An operation costs more there.
_GRID_SHARE: Final = 0.04
# The share of the effort for each start; the rest is for the best result.
_FIRST_SHARE: Final = 0.15
_NAMED_AS_GIVEN: Final = "as given"


@dataclass(frozen=True)
class Problem:
    """A pipeline: its stages, their costs, and the limits of its schedule.

    Attributes:
        placement: Rank of each stage.
        microbatches: Microbatches in a step.
        costs: Times, by stage.
        memory_limit: Memory that each rank may hold, in the unit of ``footprint``; a number for all ranks, or
            a sequence with a number for each.
        footprint: Memory, by stage. Default: stages of one size that keep their activations until W.
        stock: The order as given. It is a candidate, and its sequence of microbatches within each stage is kept.
        keep_forward_order: Whether each rank keeps the sequence of Fs of ``stock``, because Fs draw random
            numbers.
        chained: Whether steps follow each other without a barrier.
        slots: Messages that an edge between two ranks holds; None for any number.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: float | Sequence[float] = math.inf
    footprint: Footprint | None = None
    stock: Schedule | None = None
    keep_forward_order: bool = False
    chained: bool = True
    slots: int | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return max(self.placement) + 1

    @property
    def limits(self) -> tuple[float, ...]:
        """Memory limit of each rank."""
        if isinstance(self.memory_limit, (int, float)):
            return (float(self.memory_limit),) * self.ranks
        return tuple(self.memory_limit)

    @property
    def held(self) -> Footprint:
        """The footprint, or its default."""
        if self.footprint is None:
            return Footprint.from_placement(self.placement)
        return self.footprint

    def simulate(self, schedule: Schedule) -> Simulation:
        """Simulate a schedule of this pipeline."""
        return simulate(
            schedule,
            self.placement,
            self.costs,
            footprint=self.footprint,
            slots=self.slots,
            chained=self.chained,
        )

    def fits(self, schedule: Schedule) -> bool:
        """Return whether each rank stays within its memory."""
        pairs = zip(schedule, self.limits, strict=True)
        return all(
            peak_memory(order, self.held) <= limit + SAME * max(1.0, limit)
            for order, limit in pairs
        )


@dataclass(frozen=True)
class Progress:
    """The state of a search.

    Attributes:
        done: Part of the effort that is spent, from 0 to 1.
        step: Shortest step so far, in the unit of the costs.
        origin: Origin of the best schedule, as in :class:`Solution`.
    """

    done: float
    step: float
    origin: str


@dataclass(frozen=True)
class Solution:
    """The best schedule that was found.

    Attributes:
        schedule: Orders by rank.
        simulation: Its time and memory.
        origin: The way in which it was found: a fixed order by name, ``as given``, ``one pass``, or ``search``.
        lower_bound: Time that no schedule of this placement is faster than, for any memory.
        fixed: Step of each fixed order that fits, by name, and of the order as given.
        evaluations: Schedules that were evaluated.
    """

    schedule: Schedule = field(repr=False)
    simulation: Simulation
    origin: str
    lower_bound: float
    fixed: Mapping[str, float]
    evaluations: int


def solve(
    problem: Problem,
    *,
    effort: int = EFFORT,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Return the best schedule that is found within an effort; it is never slower than a fixed order that fits.

    Args:
        problem: Placement, costs and memory.
        effort: Simulated operations. 0 takes the best of the fixed orders and the orders made in one pass.
        seed: The same seed gives the same schedule on each rank.
        progress: Called several times during the search.

    Raises:
        ScheduleError: The problem is contradictory, or no schedule fits into the memory.
    """
    _check(problem)
    return _Solver(problem, effort, seed, progress).solve()


def share_solutions(solved: Sequence[tuple[Problem, Solution]]) -> list[Solution]:
    """Return for each problem the shortest of all solutions that fit into its memory.

    A search may miss an order that it finds within a smaller limit. With the solutions shared, more memory never makes
    the step longer.

    Args:
        solved: Problems that differ in their memory limits alone, each with its solution.
    """
    solutions = [solution for _, solution in solved]
    return [
        min(
            [own, *(solution for solution in solutions if problem.fits(solution.schedule))],
            key=_read_step,
        )
        for problem, own in solved
    ]


def _read_step(solution: Solution) -> float:
    return solution.simulation.step


def _check(problem: Problem) -> None:
    stages = len(problem.placement)
    if problem.microbatches < 1 or not stages:
        raise ScheduleError(
            f"{stages} stages and {problem.microbatches} microbatches make no pipeline. Give 1 or "
            "more of both."
        )
    if sorted(set(problem.placement)) != list(range(problem.ranks)):
        raise ScheduleError(
            f"placement {tuple(problem.placement)} leaves out a rank. Give each rank a stage."
        )
    for name, numbers, wanted in (
        ("costs", problem.costs.forward, stages),
        ("footprints", problem.held.activations, stages),
        ("memory limits", problem.limits, problem.ranks),
    ):
        if len(numbers) != wanted:
            raise ScheduleError(
                f"there are {len(numbers)} {name} for {wanted} ranks or stages. Give one each."
            )
    if problem.keep_forward_order and problem.stock is None:
        raise ScheduleError(
            "the sequence of Fs to keep is unknown. Give the stock schedule with keep_forward_order."
        )


# --- bounds ---


def find_lower_bound(problem: Problem) -> float:
    """Return a time that no schedule of the placement is faster than, for any memory.

    If steps are chained, a rank's step lasts from the first F of its lowest stage until the last W of that
    stage. In between, the first microbatch goes up to any other rank, that rank runs all its Fs and Bs, and
    the last gradient comes back. If all ranks meet at the end of each step, the first microbatch arrives,
    and then the rank computes all its actions.
    """
    placement, costs, microbatches = problem.placement, problem.costs, problem.microbatches
    # The lowest stage of each rank. The rank's step begins with that stage's first F.
    lowest = [list(placement).index(rank) for rank in range(problem.ranks)]

    def sum_local(times: Sequence[float], rank: int) -> float:
        return microbatches * sum(
            time for time, owner in zip(times, placement, strict=True) if owner == rank
        )

    def way(times: Sequence[float], first: int, last: int, step: int) -> float:
        """Return the time of the stages from ``first`` up to ``last``, without ``last``, and of their transfers."""
        stages = range(first, last)
        edges = ((stage, stage + 1)[::step] for stage in stages)
        sends = sum(
            costs.send_time(placement[sender], placement[receiver]) for sender, receiver in edges
        )
        return sum(times[stage] for stage in stages) + sends

    bound = 0.0
    for rank, last in enumerate(lowest):
        forwards_backwards = sum_local(costs.forward, rank) + sum_local(costs.backward, rank)
        computing = forwards_backwards + sum_local(costs.weight, rank)
        if not problem.chained:
            bound = max(bound, way(costs.forward, 0, last, 1) + computing)
        bound = max(bound, computing)
        for first in (stage for stage in lowest if stage < last):
            there = way(costs.forward, first, last, 1)
            back = way(costs.backward, first, last, -1)
            bound = max(bound, there + forwards_backwards + back + costs.weight[first])
    return bound


# --- candidates ---


def _fixed_orders(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    """Yield fixed orders by name: as given, those of the placement, and one microbatch at a time."""
    placement, ranks, microbatches = list(problem.placement), problem.ranks, problem.microbatches
    if problem.stock is not None:
        yield _NAMED_AS_GIVEN, problem.stock
        yield f"{_NAMED_AS_GIVEN}, split", split_backwards(problem.stock)
    if placement == list(range(ranks)):
        for name in ORDERS:
            schedule = build_order(name, ranks=ranks, microbatches=microbatches)
            yield name, schedule
            if ORDERS[name].count_lag is None:
                yield f"{name}, split", split_backwards(schedule)
    if placement == [*range(ranks), *reversed(range(ranks))]:
        yield "zb-v", build_vee_order(ranks=ranks, microbatches=microbatches)
        for name in ("v-half", "v-min"):
            yield name, build_vee_blocks(name, ranks=ranks, microbatches=microbatches)
    # No order needs less memory than one microbatch at a time.
    single: list[list[Action]] = [[] for _ in range(ranks)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(placement):
            single[rank].append(Action(Kind.F, stage, microbatch))
        for stage, rank in reversed(list(enumerate(placement))):
            single[rank].append(Action(Kind.BW, stage, microbatch))
    yield "one at a time", single


def _priorities(ranks: int, microbatches: int) -> Iterator[Priorities]:
    """Yield priorities of list scheduling, the promising ones first."""
    # The numbers of warm-up microbatches that known orders have on their first rank, and some around
    # them.
    bases = sorted(
        {
            ranks,
            2 * ranks,
            2 * ranks - 1,
            ranks + 1,
            ranks + ranks // 2,
            3 * ranks,
            ranks - 1,
            ranks // 2,
        }
    )
    # Small pipelines get the same warm-ups from several bases.
    seen = set()
    for deep_first, slope, base in itertools.product(
        (True, False), (2, 1, 0), (*bases, microbatches)
    ):
        warmup = tuple(
            float(min(microbatches, max(1, base - slope * rank))) for rank in range(ranks)
        )
        if (deep_first, warmup) in seen:
            continue
        seen.add((deep_first, warmup))
        for alternate, small in itertools.product((False, True), (False, True)):
            yield Priorities(alternate, small, warmup, deep_first)


def _keeps_sequences(operations: Operations, orders: Orders) -> bool:
    """Return whether operations of one sequence come in their given order."""
    # The place of the latest operation of each sequence.
    last: dict[int, int] = {}
    places = {}
    if operations.forwards is not None:
        places = {
            operation: place
            for order in operations.forwards
            for place, operation in enumerate(order)
        }
    for order in orders:
        for operation in order:
            sequence = operations.sequence[operation]
            place = places.get(operation, operation)
            if last.get(sequence, -1) > place:
                return False
            last[sequence] = place
    return True


class _Solver:
    def __init__(
        self, problem: Problem, effort: int, seed: int, progress: Callable[[Progress], None] | None
    ) -> None:
        self.problem = problem
        self.effort = effort
        self.seed = seed
        self.progress = progress
        self.operations = Operations(
            problem.placement,
            problem.microbatches,
            problem.costs,
            problem.held,
            problem.limits,
            stock=problem.stock,
            keep_forward_order=problem.keep_forward_order,
        )
        self.bound = find_lower_bound(problem)
        # The steps of the fixed orders that fit, by name.
        self.fixed: dict[str, float] = {}
        # The step, the origin, the schedule and the simulation of the best schedule.
        self.best: tuple[float, str, Schedule, Simulation] | None = None
        self.evaluations = 0
        # The effort that annealing has used.
        self.spent = 0

    def solve(self) -> Solution:
        starts = self._starts()
        if self.best is None:
            raise ScheduleError(
                f"no schedule fits into a memory of {_list(self.problem.limits)}; "
                f"{self._describe_least_memory()}. Raise memory_limit."
            )
        if not self._is_done():
            self._search(starts)
        step, origin, schedule, simulation = self.best
        return Solution(
            schedule, simulation, origin, min(self.bound, step), self.fixed, self.evaluations
        )

    def _is_done(self) -> bool:
        return self.best is not None and self.best[0] <= self.bound * (1 + SAME)

    def _describe_least_memory(self) -> str:
        """Describe the memory of one microbatch at a time or, if sequences forbid that, of the order as given."""
        operations = self.operations
        orders = dict(_fixed_orders(self.problem))
        single = orders["one at a time"]
        if _keeps_sequences(operations, operations.encode(single)):
            return f"one microbatch at a time holds {self._list_peaks(single)}"
        given = self._list_peaks(orders[_NAMED_AS_GIVEN])
        return f"the order as given, whose sequence of microbatches is kept, holds {given}"

    def _list_peaks(self, schedule: Schedule) -> str:
        return _list([peak_memory(order, self.problem.held) for order in schedule])

    def _offer(self, name: str, schedule: Schedule) -> float:
        """Simulate a schedule and keep it if it is the best; return its step."""
        self.evaluations += 1
        try:
            simulation = self.problem.simulate(schedule)
        except ScheduleError:
            # The edges have too few slots for this order.
            return math.inf
        # Of equal schedules the first one stays, so the result does not depend on rounding.
        if self.best is None or simulation.step < self.best[0] * (1 - SAME):
            self.best = (simulation.step, name, schedule, simulation)
        return simulation.step

    def _starts(self) -> list[Orders]:
        """Offer all orders that need no search; return the best order of each way to make them, the best first."""
        operations = self.operations
        starts: list[tuple[float, int, Orders]] = []
        for number, way in enumerate((self._fixed(), self._by_paper(), self._by_list())):
            best: tuple[float, int, Orders] | None = None
            for orders in way:
                self.evaluations += 1
                cost = LocalSearch(operations, orders, self.problem.chained).cost
                if best is None or cost < best[0]:
                    best = (cost, number, orders)
            # Annealing from the same orders twice would waste a share of the effort.
            if best is not None and best[2] not in [orders for *_, orders in starts]:
                starts.append(best)
        starts.sort(key=lambda start: start[:2])
        for *_, orders in starts:
            self._offer("one pass", operations.decode(orders))
        return [orders for *_, orders in starts]

    def _fixed(self) -> Iterator[Orders]:
        """Offer the fixed orders; yield them and variants with other places of their Ws, if memory suffices."""
        operations = self.operations
        for name, schedule in _fixed_orders(self.problem):
            orders = operations.encode(schedule)
            if not _keeps_sequences(operations, orders):
                continue
            if self.problem.fits(schedule):
                self.fixed[name] = self._offer(name, schedule)
            # This check is separate, because a full backward may fit where a B and a W do not.
            if operations.fits(orders):
                yield orders
            for small in (False, True):
                placed = place_weights(operations, orders, fill_small_holes=small)
                if placed is not None:
                    yield placed

    def _by_paper(self) -> Iterator[Orders]:
        if list(self.problem.placement) == list(range(self.problem.ranks)):
            for choices in Choices.all():
                orders = build_zero_bubble(self.operations, choices)
                if orders is not None:
                    yield orders

    def _by_list(self) -> Iterator[Orders]:
        operations, problem = self.operations, self.problem
        # Even a small effort tries some priorities.
        most = max(8, int(max(self.effort, EFFORT // 4) * _GRID_SHARE / len(operations.actions)))
        for priorities in itertools.islice(_priorities(problem.ranks, problem.microbatches), most):
            orders = build_list_schedule(operations, priorities)
            if orders is not None and operations.fits(orders):
                yield orders

    def _search(self, starts: Sequence[Orders]) -> None:
        """Anneal from each start, then from the best result."""
        results = []
        for number, orders in enumerate(starts):
            results.append(self._anneal(orders, int(self.effort * _FIRST_SHARE), number))
            if self._is_done():
                return
        if results:
            best = min(enumerate(results), key=lambda result: (result[1][0], result[0]))[1][1]
            self._anneal(best, max(0, self.effort - self.spent), len(starts))

    def _anneal(self, orders: Orders, effort: int, number: int) -> tuple[float, Orders]:
        search = LocalSearch(self.operations, orders, self.problem.chained)
        # The effort of earlier searches, for the progress.
        spent = self.spent
        self.spent += effort

        def report(done: int, cost: float) -> None:
            if self.progress is not None and self.best is not None:
                best, origin = min((self.best[0], self.best[1]), (cost, "search"))
                share = min(1.0, (spent + done) / self.effort) if self.effort else 1.0
                self.progress(Progress(share, best, origin))

        cost, found = search.anneal(
            effort, random.Random(f"{self.seed}/{number}"), self.bound, report
        )
        self.evaluations += search.evaluations
        self._offer("search", self.operations.decode(found))
        return cost, found


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)

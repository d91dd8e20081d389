"""Event simulator of a pipeline: it computes the time of a step from a schedule and the costs of its actions.

Times are in any one unit, memory in units of the activations of one microbatch on one rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ovpatch.overlap.pipelining.ir import (
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    count_stages,
    find_source,
    list_messages,
)

# The largest number of simulated steps. Chained steps of most schedules repeat after a few; those of a rare
# schedule alternate.
_MAX_STEPS: Final = 32
# The relative difference up to which two sums of the same costs are equal.
_SAME: Final = 1e-9


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch's actions.

    Attributes:
        forward: Time of F, by stage.
        backward: Time of B, the gradient of the input alone, by stage.
        weight: Time of W, by stage. A full backward takes ``backward + weight``.
        send: Time of a transfer, for all edges or by edge ``(sender, receiver)``. Missing edges take no time.
        overhead: Time of a step in addition to computations and waits, by rank: calls of the engine, posting
            of messages, the scaling of gradients. It is spread over the rank's actions. Missing ranks have
            none.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float | Mapping[tuple[int, int], float] = 0.0
    overhead: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that all stages have costs."""
        if not len(self.forward) == len(self.backward) == len(self.weight):
            raise ScheduleError(
                "the numbers of costs for F, B and W differ. Give each stage one of each."
            )
        if min((*self.forward, *self.backward, *self.weight), default=0.0) < 0:
            raise ScheduleError("a cost is below 0. Give times of at least 0.")

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward: float,
        backward: float,
        weight: float,
        send: float | Mapping[tuple[int, int], float] = 0.0,
    ) -> Costs:
        """Return the same costs for each stage."""
        return cls((forward,) * stages, (backward,) * stages, (weight,) * stages, send)

    def time_of(self, action: Action) -> float:
        """Return the time that an action takes to compute."""
        if action.kind is Kind.F:
            return self.forward[action.stage]
        backward = 0.0 if action.kind is Kind.W else self.backward[action.stage]
        return backward if action.kind is Kind.B else backward + self.weight[action.stage]

    def send_time(self, sender: int, receiver: int) -> float:
        """Return the time of a transfer between two ranks; 0 on one rank."""
        if sender == receiver:
            return 0.0
        return (
            self.send.get((sender, receiver), 0.0) if isinstance(self.send, Mapping) else self.send
        )


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank that one microbatch holds.

    Attributes:
        activations: From the end of F to the end of B, by stage.
        deferred: From the end of B to the end of W, by stage.
    """

    activations: tuple[float, ...]
    deferred: tuple[float, ...]

    @classmethod
    def from_placement(cls, placement: Placement, deferred: float = 1.0) -> Footprint:
        """Return the footprint of stages of one size.

        In all stages that a pipeline has on a rank, a microbatch holds 1.

        Args:
            placement: Rank of each stage.
            deferred: The memory that B leaves, as a part of the memory that F leaves.
        """
        pipelines = len(placement) // count_stages(placement)
        held = tuple(pipelines / list(placement).count(rank) for rank in placement)
        return cls(held, tuple(part * deferred for part in held))

    def change(self, action: Action) -> float:
        """Return the amount by which an action changes the memory of its rank."""
        if action.kind is Kind.F:
            return self.activations[action.stage]
        if action.kind is Kind.B:
            return self.deferred[action.stage] - self.activations[action.stage]
        return -(self.activations if action.kind is Kind.BW else self.deferred)[action.stage]


class Timed(NamedTuple):
    """An action and the times at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The time and the memory of a simulated step.

    Attributes:
        step: Time of a step.
        timeline: Actions of one step, by rank; times count from the first action of the step.
        busy: Time that a rank computes in a step, by rank.
        peak_memory: Largest sum of footprints, by rank.
        peak_activations: Most microbatches between F and B, by rank; each of a rank's stages counts as a fraction.
        peak_deferred: Most microbatches between B and W, by rank.
    """

    step: float
    timeline: tuple[tuple[Timed, ...], ...] = field(repr=False)
    busy: tuple[float, ...]
    peak_memory: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_deferred: tuple[float, ...]

    @property
    def limit(self) -> float:
        """Time of a step without any wait, which is the time of the rank that computes most."""
        return max(self.busy, default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time that a rank waits in a step, by rank."""
        return tuple(self.step - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Part of the step that the busiest rank waits, from 0 to 1."""
        return 1.0 - self.limit / self.step if self.step else 0.0

    @property
    def excess(self) -> float:
        """The time by which the step is longer than :attr:`limit`, as a part of the limit."""
        return self.step / self.limit - 1.0 if self.limit else 0.0


def simulate(
    schedule: Schedule,
    placement: Placement,
    costs: Costs,
    *,
    footprint: Footprint | None = None,
    slots: int | None = None,
    chained: bool = True,
) -> Simulation:
    """Return the time and memory of a step.

    A rank runs its actions in order; each action waits until its inputs have arrived. A directed edge
    between two ranks carries one message at a time, in the order of the sender, concurrently with the
    computations of both.

    Args:
        schedule: Orders by rank.
        placement: Rank of each stage.
        costs: Times, by stage.
        footprint: Memory, by stage. Default: stages of one size that keep their activations until W.
        slots: Messages that an edge holds between its sender and the action that reads them; None for any
            number.
        chained: Whether steps follow each other on each rank without a barrier; the time is then the time of
            a step among many. Otherwise all ranks meet at the end of each step.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    footprint = Footprint.from_placement(placement) if footprint is None else footprint
    run = _Run(schedule, placement, costs, slots)
    run.run_step()
    step, origin = max(run.clocks, default=0.0), 0.0
    # Steps are in their steady state once all clocks advance by the same time.
    while chained and run.steps < _MAX_STEPS:
        before = list(run.clocks)
        run.run_step()
        advances = [after - earlier for earlier, after in zip(before, run.clocks, strict=True)]
        step = max(advances, default=0.0)
        if step - min(advances, default=0.0) <= _SAME * step:
            break
    if chained:
        origin = min((start for line in run.timeline for _, start, _ in line[:1]), default=0.0)
    parts, nothing = Footprint.from_placement(placement).activations, (0.0,) * len(placement)
    waiting, pending = Footprint(parts, nothing), Footprint(nothing, parts)
    return Simulation(
        step=step,
        timeline=tuple(
            tuple(Timed(a, s - origin, e - origin) for a, s, e in line) for line in run.timeline
        ),
        busy=tuple(sum(map(costs.time_of, order)) for order in schedule),
        peak_memory=tuple(peak_memory(order, footprint) for order in schedule),
        peak_activations=tuple(peak_memory(order, waiting) for order in schedule),
        peak_deferred=tuple(peak_memory(order, pending) for order in schedule),
    )


def peak_memory(order: Sequence[Action], footprint: Footprint) -> float:
    """Return the largest sum of footprints while a rank runs its order."""
    held = peak = 0.0
    for action in order:
        held += footprint.change(action)
        peak = max(peak, held)
    return peak


class _Run:
    """A sequence of steps; clocks, edges and slots keep their state from step to step."""

    def __init__(
        self, schedule: Schedule, placement: Placement, costs: Costs, slots: int | None
    ) -> None:
        self.schedule = schedule
        self.placement = placement
        self.costs = costs
        self.slots = slots
        self.clocks = [0.0] * len(schedule)
        self.steps = 0
        self.timeline: list[list[Timed]] = []
        self._messages = list_messages(schedule, placement)
        self._edge_of = {
            message: edge for edge, messages in self._messages.items() for message in messages
        }
        known = dict(enumerate(costs.overhead))
        # The time by which each action of a rank delays the next one: the action's part of the overhead.
        self._delays = [
            known.get(rank, 0.0) / max(1, len(order)) for rank, order in enumerate(schedule)
        ]
        self._edges = {edge: _Edge(costs.send_time(*edge), slots) for edge in self._messages}

    def run_step(self) -> None:
        """Run one more step of all ranks."""
        self.steps += 1
        self.timeline = [[] for _ in self.schedule]
        ends: dict[Action, float] = {}
        # The number of each message on its edge, counted over all steps.
        bases = {edge: self._edges[edge].accepted for edge in self._edges}
        numbers = {
            message: bases[edge] + number
            for edge, messages in self._messages.items()
            for number, message in enumerate(messages)
        }
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.schedule):
                line = self.timeline[rank]
                while len(line) < len(order):
                    action = order[len(line)]
                    arrival = self._arrival(action, ends, numbers)
                    if arrival is None:
                        break
                    start = max(self.clocks[rank], arrival)
                    self._finish(rank, action, start, ends, numbers)
                    moved = True
        for rank, order in enumerate(self.schedule):
            if len(self.timeline[rank]) < len(order):
                action = order[len(self.timeline[rank])]
                raise ScheduleError(
                    f"rank {rank}: deadlock, {action} waits for "
                    f"{find_source(action, self.placement)}. "
                    "Mend the rule that check_schedule() reports."
                )

    def _arrival(
        self, action: Action, ends: Mapping[Action, float], numbers: Mapping[Action, int]
    ) -> float | None:
        """Return the time at which the input of an action has arrived; None while that is unknown."""
        source = find_source(action, self.placement)
        if source is None:
            return 0.0
        edge = self._edge_of.get(source)
        return ends.get(source) if edge is None else self._edges[edge].arrival(numbers[source])

    def _finish(
        self,
        rank: int,
        action: Action,
        start: float,
        ends: dict[Action, float],
        numbers: Mapping[Action, int],
    ) -> None:
        end = start + self.costs.time_of(action)
        self.clocks[rank] = end + self._delays[rank]
        self.timeline[rank].append(Timed(action, start, end))
        source = find_source(action, self.placement)
        if source in self._edge_of:
            self._edges[self._edge_of[source]].read(numbers[source], start)
        if action.kind is Kind.W:
            return
        # The reader of a gradient names B as its source, also if a full backward computes it.
        made = action._replace(kind=Kind.B) if action.kind is Kind.BW else action
        ends[made] = end
        if made in self._edge_of:
            self._edges[self._edge_of[made]].accept(end)


class _Edge:
    """The messages from one rank to another, in the order of the sender, over all steps."""

    def __init__(self, time: float, slots: int | None) -> None:
        self._time = time
        self._slots = slots
        # The times at which messages were computed and at which they arrived, by number.
        self._made: list[float] = []
        self._arrived: list[float] = []
        # The times at which messages were read whose predecessors have not all been read.
        self._reads: dict[int, float] = defaultdict(float)
        # The time at which all messages up to an index had been read.
        self._freed: list[float] = []

    @property
    def accepted(self) -> int:
        return len(self._made)

    def accept(self, made: float) -> None:
        self._made.append(made)
        self._send()

    def read(self, number: int, start: float) -> None:
        self._reads[number] = start
        while len(self._freed) in self._reads:
            last = self._freed[-1] if self._freed else 0.0
            self._freed.append(max(last, self._reads.pop(len(self._freed))))
        self._send()

    def arrival(self, number: int) -> float | None:
        return self._arrived[number] if number < len(self._arrived) else None

    def _send(self) -> None:
        """Send the computed messages whose slot is known to become free."""
        while len(self._arrived) < len(self._made):
            number = len(self._arrived)
            start = max(self._made[number], self._arrived[-1] if self._arrived else 0.0)
            if self._slots is not None and number >= self._slots:
                if number - self._slots >= len(self._freed):
                    return
                start = max(start, self._freed[number - self._slots])
            self._arrived.append(start + self._time)

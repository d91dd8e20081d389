"""The costs of a pipeline, measured in its own steps: times of stages, memory of microbatches, and transfers.

Each rank measures its own part (:class:`RankCosts`). :func:`merge_costs` makes one problem of all parts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.pipelining.ir import Kind, Placement, Schedule
from ovpatch.overlap.pipelining.messages import Messages
from ovpatch.planner.memory_limit import MemoryLimit
from ovpatch.planner.simulator import Costs, Footprint, peak_memory
from ovpatch.planner.solver import Problem
from ovpatch_plugins.pipeline.runtime.stage import Stage
from ovpatch_plugins.pipeline.runtime.step_clock import StepTimes

# The part of a device's memory that stays free for fragments and for allocations of later steps.
_MARGIN: Final = 0.1
# The memory that an order may hold without a limit, in units of 1F1B's.
_MAX_TIMES: Final = 2.0
# The number of measured transfers; the first also connects the ranks.
_TRANSFERS: Final = 4


@dataclass(frozen=True)
class RankCosts:
    """The measurements of one rank, as JSON types.

    Attributes:
        ranks: Global ranks of its pipeline.
        facts: Facts that must be the same in all pipelines of a job: classes, numbers and options.
        times: Seconds of F, B and W of its stages, by stage.
        memory: Bytes that a microbatch holds from F to B and from B to W, by stage; empty on a CPU.
        spare: Bytes that were free at the peak, less a margin; None on a CPU.
        sends: Seconds of a transfer, by edge as ``sender-receiver``.
        overhead: Seconds of a step that are neither computations nor waits.
        draws: Whether an F draws random numbers.
    """

    ranks: Sequence[int]
    facts: Mapping[str, Any]
    times: Mapping[str, Sequence[float]]
    memory: Mapping[str, Sequence[float]]
    spare: float | None
    sends: Mapping[str, float]
    overhead: float
    draws: bool

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


class StageProbe:
    """Observes a rank's computations: the memory that they leave, and the random numbers that Fs draw.

    Torch's allocator counts the memory, so the host reads it without waiting for the device.

    Args:
        stages: The rank's stages, by index.
        device: The device on which they compute.
        allocated: Returns the allocated bytes. Default: those of a CUDA device, unknown on a CPU.

    Attributes:
        draws: Whether an F has drawn random numbers.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        device: torch.device,
        allocated: Callable[[], int] | None = None,
    ) -> None:
        self.draws = False
        self._stages = stages
        self._device = device
        on_cuda = device.type == "cuda"
        self._allocated = allocated or (
            (lambda: torch.cuda.memory_allocated(device)) if on_cuda else None
        )
        # The bytes by which each computation changed the memory.
        self._changes: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
        # The memory and the state of the random generator before the running computation.
        self._before = 0
        self._state: Tensor

    def start_action(self, stage: int, kind: Kind) -> None:
        """Note the memory before a computation."""
        # Computations of a rank run one at a time, so the difference belongs to this one.
        self._before = self._read()
        if kind is Kind.F:
            self._state = self._random_state()

    def finish_action(self, stage: int, kind: Kind) -> None:
        """Note the memory that a computation leaves, and whether it drew random numbers."""
        self._changes[stage, kind].append(self._read() - self._before)
        if kind is Kind.F and not self.draws:
            self.draws = not torch.equal(self._state, self._random_state())

    def read_footprints(self) -> dict[str, list[float]]:
        """Return the bytes that a microbatch holds from F to B and from B to W, by stage; empty if unknown."""
        found: dict[str, list[float]] = {}
        for index in self._stages if self._allocated is not None else ():
            forward, weight = self._changes.get((index, Kind.F)), self._changes.get((index, Kind.W))
            if forward:
                deferred = max(0.0, -statistics.median(weight)) if weight else 0.0
                found[str(index)] = [max(0.0, statistics.median(forward)), deferred]
        return found

    def _read(self) -> int:
        return 0 if self._allocated is None else self._allocated()

    def _random_state(self) -> Tensor:
        return (
            torch.cuda.get_rng_state(self._device)
            if self._device.type == "cuda"
            else torch.get_rng_state()
        )


def read_times(times: StepTimes, stages: Mapping[int, Stage]) -> dict[str, list[float]]:
    """Return the seconds of F, B and W by stage; a full backward that is not split counts as B."""
    found = {}
    for index in stages:
        backward = times.cost(index, Kind.B) or times.cost(index, Kind.BW)
        found[str(index)] = [times.cost(index, Kind.F), backward, times.cost(index, Kind.W)]
    return found


def read_spare(device: torch.device) -> float | None:
    """Return the bytes of a device that were free at the process's peak, less a margin; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (
        free
        + torch.cuda.memory_reserved(device)
        - torch.cuda.max_memory_allocated(device)
        - _MARGIN * total
    )


def measure_sends(
    messages: Messages,
    stages: Mapping[int, Stage],
    placement: Placement,
    rank: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the seconds of a transfer on each edge between this rank and a peer, by ``sender-receiver``.

    All ranks of the pipeline call this. Neighbors send a stage's output and its input gradient back and forth, for
    one pair of stages after another.
    """
    found: dict[str, float] = {}
    messages.start_step()
    for own in stages.values():
        # An evaluation between steps may have restored torch's buffers.
        own.buffers.take()
    for stage, (lower, upper) in enumerate(itertools.pairwise(placement)):
        if lower == upper or rank not in (lower, upper):
            continue
        is_lower = rank == lower
        own, peer = (stages[stage], upper) if is_lower else (stages[stage + 1], lower)
        sent = own.buffers.make_blank_outputs(Kind.F if is_lower else Kind.B)
        seconds = []
        for _ in range(_TRANSFERS):
            started = time.perf_counter()
            # The lower rank sends first, then the upper rank sends back. A transfer takes half of that time.
            for sends in (is_lower, not is_lower):
                if sends:
                    messages.send(sent, peer)
                else:
                    works = messages.receive(
                        own.buffers.make(Kind.B if is_lower else Kind.F, 0), peer
                    )
                    for work in works:
                        work.wait()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        own.buffers.drop(0)
        for edge in (f"{lower}-{upper}", f"{upper}-{lower}"):
            found[edge] = min(seconds[1:]) / 2
    messages.finish()
    return found


# --- one problem for all ranks ---


@dataclass(frozen=True)
class PipelineCosts:
    """The measurements of all ranks; of several pipelines of a job, the slowest and fullest count.

    Attributes:
        costs: Seconds, by stage and edge.
        footprint: Bytes, by stage; None if they are unknown, so that stages count as equal.
        spare: Bytes that were free, by rank of the pipeline; empty on a CPU.
        draws: Whether an F draws random numbers.
    """

    costs: Costs
    footprint: Footprint | None
    spare: Sequence[float]
    draws: bool

    def to_json(self) -> dict[str, Any]:
        """Return times in seconds and memory in bytes, by stage."""
        sends = self.costs.send if isinstance(self.costs.send, Mapping) else {}
        return {
            "forward": list(self.costs.forward),
            "backward": list(self.costs.backward),
            "weight": list(self.costs.weight),
            "send": max(sends.values(), default=0.0),
            "activations": None if self.footprint is None else list(self.footprint.activations),
            "deferred": None if self.footprint is None else list(self.footprint.deferred),
        }


def merge_costs(found: Sequence[RankCosts], placement: Placement) -> PipelineCosts | str:
    """Return the costs by which all ranks decide, or the reason for which there are none.

    Replicas of a pipeline must run the same order. Otherwise collectives inside of computations, such as those of
    tensor parallelism, would meet other collectives. So the slowest and the fullest replica of a stage count.
    """
    if any(costs.facts != found[0].facts for costs in found):
        return "the pipelines of this job differ"
    stages = range(len(placement))
    times: list[list[Sequence[float]]] = [
        [costs.times[str(s)] for costs in found if str(s) in costs.times] for s in stages
    ]
    if not all(times) or any(not sum(replica) for replicas in times for replica in replicas):
        return "not all stages have run"
    forward, backward, weight = (
        [max(replica[k] for replica in replicas) for replicas in times] for k in range(3)
    )
    sends: dict[tuple[int, int], float] = {}
    for costs in found:
        for edge, seconds in costs.sends.items():
            sender, receiver = map(int, edge.split("-"))
            sends[sender, receiver] = max(seconds, sends.get((sender, receiver), 0.0))
    held = [[costs.memory[str(s)] for costs in found if str(s) in costs.memory] for s in stages]
    footprint = None
    if all(held) and all(replica[0] > 0 for replicas in held for replica in replicas):
        parts = [
            tuple(max(replica[k] for replica in replicas) for replicas in held) for k in range(2)
        ]
        footprint = Footprint(parts[0], parts[1])
    return PipelineCosts(
        Costs(
            tuple(forward),
            tuple(backward),
            tuple(weight),
            sends,
            _merge_overheads(found, placement),
        ),
        footprint,
        _merge_spare(found, placement),
        any(costs.draws for costs in found),
    )


def _find_rank(costs: RankCosts, placement: Placement) -> int:
    return placement[int(next(iter(costs.times)))]


def _merge_overheads(found: Sequence[RankCosts], placement: Placement) -> tuple[float, ...]:
    merged = [0.0] * (max(placement) + 1)
    for costs in found:
        rank = _find_rank(costs, placement)
        merged[rank] = max(costs.overhead, merged[rank])
    return tuple(merged)


def _merge_spare(found: Sequence[RankCosts], placement: Placement) -> list[float]:
    merged = []
    for rank in range(max(placement) + 1):
        own = [costs.spare for costs in found if _find_rank(costs, placement) == rank]
        known = [spare for spare in own if spare is not None]
        if not known:
            return []
        merged.append(min(known))
    return merged


def find_unit(measured: PipelineCosts, placement: Placement, microbatches: int) -> float:
    """Return the memory that 1F1B holds on its fullest rank, in the unit of the footprint."""
    ranks = max(placement) + 1
    footprint = measured.footprint or Footprint.from_placement(placement)
    pairs = list(zip(footprint.activations, placement, strict=True))
    fullest = max(sum(held for held, owner in pairs if owner == rank) for rank in range(ranks))
    return min(ranks, microbatches) * fullest


def make_problem(
    measured: PipelineCosts,
    placement: Placement,
    microbatches: int,
    stock: Schedule,
    limit: MemoryLimit,
) -> tuple[Problem, str]:
    """Return the problem for the solver, and a remark on the memory limit.

    Without a limit, an order may hold twice the memory of 1F1B, as ZB-H2 does: with more memory, steps get hardly
    shorter.

    A checkpointed stage holds more after B than after F, and for a moment its full backward holds as much. So one
    deferred microbatch beyond the limit is allowed if it is larger.
    """
    ranks = max(placement) + 1
    footprint = measured.footprint or Footprint.from_placement(placement)
    unit, remark = find_unit(measured, placement, microbatches), ""
    if limit.size is not None and measured.footprint is None:
        limit, remark = (
            MemoryLimit(1.0),
            "memory_limit is 1x here, since memory in bytes is not measured on a CPU",
        )
    if limit == MemoryLimit() and (measured.footprint is None or not measured.spare):
        limit = MemoryLimit(1.0)
    if limit.times is not None:
        limits = [limit.times * unit] * ranks
    elif limit.size is not None:
        limits = [float(limit.size)] * ranks
    else:
        # At the peak, the order as given held its largest memory, and the rest was free.
        held = [peak_memory(order, footprint) for order in stock]
        limits = [
            min(most + max(0.0, spare), max(_MAX_TIMES * unit, most))
            for most, spare in zip(held, measured.spare, strict=True)
        ]
    pairs = list(zip(footprint.activations, footprint.deferred, strict=True))
    # On each rank, the amount by which a deferred microbatch is larger.
    extra = [
        max(
            max(0.0, after - before)
            for (before, after), owner in zip(pairs, placement, strict=True)
            if owner == rank
        )
        for rank in range(ranks)
    ]
    problem = Problem(
        placement,
        microbatches,
        measured.costs,
        [most + more for most, more in zip(limits, extra, strict=True)],
        measured.footprint,
        stock=stock,
        keep_forward_order=measured.draws,
    )
    return problem, remark

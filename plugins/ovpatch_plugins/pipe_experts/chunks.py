"""The chunks of an expert-parallel layer: which there are, and how many rows each sends and receives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from ovpatch_plugins.pipe_experts.options import CUTS, EXCHANGES

_MAX_EXPERT_GROUPS: Final = 4
_MEASURED: Final = (2, 4, 8)


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a layer; the same on all ranks, since each chunk is a pair of collectives.

    A plan depends on options and on facts that all ranks share, never on this rank's tokens. A chunk may have no rows.
    """

    ep_size: int  # number of ranks
    expert_groups: tuple[range, ...]  # ranges of local experts
    token_chunks: int = 1  # number of slices of the tokens; each slice has a chunk for every group of experts
    symmetric: bool = False  # whether rows travel over symmetric memory

    @property
    def num_local_experts(self) -> int:
        """Number of experts of a rank."""
        return self.expert_groups[-1].stop

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return self.ep_size * self.num_local_experts

    @functools.cached_property
    def chunks(self) -> list[tuple[int, range]]:
        """The chunks in the order of their dispatch: the slice of the tokens, and the local experts."""
        return [(i, group) for i in range(self.token_chunks) for group in self.expert_groups]

    def compute_positions(self) -> list[int]:
        """Return each expert's position in the send order of a slice of tokens: by expert group, then by rank."""
        local = self.num_local_experts
        order = [rank * local + i for group in self.expert_groups for rank in range(self.ep_size) for i in group]
        positions = [0] * self.num_experts
        for position, expert in enumerate(order):
            positions[expert] = position
        return positions


class PlanCandidates:
    """Plans of which one is chosen once all ranks know the number of tokens; by itself, one plan."""

    def __init__(self, plan: ChunkPlan) -> None:
        self.expected = plan  # the plan that is probably chosen; ranks may expect different ones
        self.finest = plan  # its slices of tokens are parts of every plan's, and it is symmetric if any plan is

    def choose_plan(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """Return a plan, the same on all ranks, which all call this.

        ``tokens`` are those of the rank that has the most, and ``trains`` tells whether gradients are on there.
        """
        return self.expected


@functools.lru_cache(maxsize=64)
def make_plan(
    ep_size: int, num_local_experts: int, cut: str = "auto", parts: int = 0, exchange: str = "c10d"
) -> ChunkPlan:
    """Return the plan of a layer on ``ep_size`` ranks.

    Groups of experts use each weight once, and a group of one expert needs no sorting of its rows. Slices of tokens use
    every weight in every chunk. ``cut`` is one of :data:`.options.CUTS`; ``auto`` without measurement is ``none``,
    since a chunk costs the host more than it hides unless layers are large. ``parts`` is the number of chunks, 0 for
    the default of ``cut``; there are never more groups than experts. ``exchange`` is one of :data:`.options.EXCHANGES`;
    ``auto`` without measurement is ``c10d``. ValueError for an unknown name or a negative number.
    """
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r}: choose one of {', '.join(CUTS)}")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r}: choose one of {', '.join(EXCHANGES)}")
    if parts < 0:
        raise ValueError(f"parts={parts}: expected a number of parts, or 0 for as many as the cut thinks best")
    symmetric = exchange == "symmetric" and ep_size > 1
    if cut == "tokens":
        return ChunkPlan(ep_size, (range(num_local_experts),), parts or 2, symmetric)
    count = min(parts or _MAX_EXPERT_GROUPS, num_local_experts) if cut == "experts" else 1
    bounds = [num_local_experts * i // count for i in range(count + 1)]
    groups = tuple(range(bounds[i], bounds[i + 1]) for i in range(count))
    return ChunkPlan(ep_size, groups, symmetric=symmetric)


def list_candidates(
    ep_size: int, num_local_experts: int, parts: int = 0, exchange: str = "c10d"
) -> dict[str, ChunkPlan]:
    """Return the plans to choose from, each once, by name; the uncut one comes first.

    ``parts`` is the number of chunks, 0 for 2, 4 and 8; the exchange ``auto`` stands for either way.
    """
    names: dict[ChunkPlan, str] = {}
    for way in ("c10d", "symmetric") if exchange == "auto" else (exchange,):
        suffix = ", symmetric" if way == "symmetric" else ""
        names.setdefault(make_plan(ep_size, num_local_experts, "none", exchange=way), f"none{suffix}")
        for cut in ("experts", "tokens"):
            for count in (parts,) if parts else _MEASURED:
                plan = make_plan(ep_size, num_local_experts, cut, count, way)
                names.setdefault(plan, f"{cut} {len(plan.chunks)}{suffix}")
    return {name: plan for plan, name in names.items()}


@functools.lru_cache(maxsize=64)
def get_positions_on(plan: ChunkPlan, device: torch.device) -> torch.Tensor:
    """Return :meth:`ChunkPlan.compute_positions` as a tensor on a device, ``[experts]``."""
    return torch.tensor(plan.compute_positions(), device=device)


@dataclass(frozen=True)
class Splits:
    """Numbers of rows in one call of a layer on one rank."""

    input_splits: list[list[int]]  # rows that this rank dispatches, ``[chunk][rank]``
    expert_splits: list[list[list[int]]]  # rows that arrive here, ``[chunk][rank][expert of the chunk's group]``

    @classmethod
    def from_counts(
        cls, plan: ChunkPlan, sent: Sequence[Sequence[Sequence[int]]], arriving: Sequence[Sequence[Sequence[int]]]
    ) -> Splits:
        """Group ``[rank][slice of tokens][local expert]`` by chunk."""
        return cls(
            [[sum(by_rank[i][expert] for expert in group) for by_rank in sent] for i, group in plan.chunks],
            [[[by_rank[i][expert] for expert in group] for by_rank in arriving] for i, group in plan.chunks],
        )

    def output_splits(self, chunk: int) -> list[int]:
        """Return how many rows of a chunk each rank dispatches to this one."""
        return [sum(by_expert) for by_expert in self.expert_splits[chunk]]

    def chunk_sizes(self) -> list[int]:
        """Return how many rows this rank dispatches in each chunk."""
        return [sum(by_rank) for by_rank in self.input_splits]

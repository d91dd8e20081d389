"""Into which parts the rows of an expert-parallel layer are cut.

Parts are the same on all ranks, since each is a pair of collectives: they depend on how many experts a rank has, on
options and on what all ranks know of each other, and not on how many rows this one has; a part may have none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

from ovpatch_plugins.pipe_experts.options import CUTS, EXCHANGES

if TYPE_CHECKING:
    import torch.distributed as dist

_MOST_GROUPS: Final = 4
_MEASURED: Final = (2, 4, 8)


@dataclass(frozen=True)
class ChunkPlan:
    """Which parts there are.

    Attributes:
        world: Number of ranks.
        groups: Ranges of local experts.
        chunks: Into how many chunks tokens are cut; each chunk has a part for every group.
        symmetric: Whether rows travel by symmetric memory.
    """

    world: int
    groups: tuple[range, ...]
    chunks: int = 1
    symmetric: bool = False

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.groups[-1].stop

    @property
    def experts(self) -> int:
        """Number of experts of all ranks."""
        return self.world * self.local

    @functools.cached_property
    def parts(self) -> list[tuple[int, range]]:
        """The parts in the order in which they are sent: a chunk, and which local experts."""
        return [(chunk, group) for chunk in range(self.chunks) for group in self.groups]

    @property
    def expected(self) -> ChunkPlan:
        """See :class:`Plans`."""
        return self

    def chosen(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """See :class:`Plans`."""
        return self

    def positions(self) -> list[int]:
        """Return at which place the rows of each expert are sent, within a chunk: by group, then by rank."""
        places = [0] * self.experts
        order = [rank * self.local + i for group in self.groups for rank in range(self.world) for i in group]
        for place, expert in enumerate(order):
            places[expert] = place
        return places


class Plans(Protocol):
    """Plans of which one is chosen when all ranks know how many tokens there are.

    A single plan is one of these, too.
    """

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def local(self) -> int:
        """Number of experts of a rank."""

    @property
    def chunks(self) -> int:
        """A number of chunks which every plan's number divides."""

    @property
    def symmetric(self) -> bool:
        """Whether rows may travel by symmetric memory."""

    @property
    def expected(self) -> ChunkPlan:
        """The plan that is probably chosen; ranks may expect different ones."""

    def chosen(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """Return a plan, the same on all ranks.

        Args:
            group: The ranks, all of which call this.
            tokens: Of the rank that has the most.
            trains: Whether gradients are on there.
        """


@functools.lru_cache(maxsize=64)
def plan(world: int, local: int, cut: str = "auto", parts: int = 0, exchange: str = "c10d") -> ChunkPlan:
    """Return the parts of a layer.

    By groups of experts each weight is used once, and rows of a single expert need no sorting where they arrive. Chunks
    of tokens use every weight in every part.

    Args:
        world: Number of ranks.
        local: Number of experts of a rank.
        cut: One of ``CUTS`` of :mod:`.options`; ``auto``, where nothing is measured, is ``none``: a part costs the host
            more than it hides, unless layers are large.
        parts: How many; 0 for as many as ``cut`` thinks best. There are never more groups than experts.
        exchange: One of ``EXCHANGES`` there; ``auto``, where nothing is measured, is ``c10d``.

    Raises:
        ValueError: A name that is none.
    """
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r}: choose one of {', '.join(CUTS)}")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r}: choose one of {', '.join(EXCHANGES)}")
    if parts < 0:
        raise ValueError(f"parts={parts}: expected a number of parts, or 0 for as many as the cut thinks best")
    symmetric = exchange == "symmetric" and world > 1
    if cut == "tokens":
        return ChunkPlan(world, (range(local),), parts or 2, symmetric)
    count = min(parts or _MOST_GROUPS, local) if cut == "experts" else 1
    groups = tuple(range(local * i // count, local * (i + 1) // count) for i in range(count))
    return ChunkPlan(world, groups, symmetric=symmetric)


def candidates(world: int, local: int, parts: int = 0, exchange: str = "c10d") -> dict[str, ChunkPlan]:
    """Return the plans between which can be chosen, each once, by name; the one that does not cut comes first.

    Args:
        world: Number of ranks.
        local: Number of experts of a rank.
        parts: How many; 0 for 2, 4 and 8.
        exchange: By what rows travel; ``auto`` for any way.
    """
    found: dict[ChunkPlan, str] = {}
    for way in ("c10d", "symmetric") if exchange == "auto" else (exchange,):
        behind = ", symmetric" if way == "symmetric" else ""
        found.setdefault(plan(world, local, "none", exchange=way), f"none{behind}")
        for cut in ("experts", "tokens"):
            for count in (parts,) if parts else _MEASURED:
                made = plan(world, local, cut, count, way)
                found.setdefault(made, f"{cut} {len(made.parts)}{behind}")
    return {name: made for made, name in found.items()}


@functools.lru_cache(maxsize=64)
def positions_on(plan: ChunkPlan, device: torch.device) -> torch.Tensor:
    """Return :meth:`ChunkPlan.positions` as a tensor, ``[experts]``."""
    return torch.tensor(plan.positions(), device=device)


@dataclass(frozen=True)
class Counts:
    """How many rows go where, in one layer's call on one rank.

    Attributes:
        sent: ``[part][rank]``.
        arriving: ``[part][rank][expert of the part's group]``.
    """

    sent: list[list[int]]
    arriving: list[list[list[int]]]

    @classmethod
    def of(
        cls, plan: ChunkPlan, sent: Sequence[Sequence[Sequence[int]]], arriving: Sequence[Sequence[Sequence[int]]]
    ) -> Counts:
        """Arrange by parts what is given by ``[rank][chunk][local expert]``."""
        return cls(
            [[sum(by_rank[chunk][i] for i in group) for by_rank in sent] for chunk, group in plan.parts],
            [[[by_rank[chunk][i] for i in group] for by_rank in arriving] for chunk, group in plan.parts],
        )

    def received(self, part: int) -> list[int]:
        """Return how many rows each rank sends here in a part."""
        return [sum(by_expert) for by_expert in self.arriving[part]]

    def sizes(self) -> list[int]:
        """Return how many rows this rank sends in each part."""
        return [sum(by_rank) for by_rank in self.sent]

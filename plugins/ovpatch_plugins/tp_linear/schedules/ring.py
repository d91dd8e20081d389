"""Schedule ``ring``: ranks pass rows on, and multiply those that they hold meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ovpatch_plugins.tp_linear.schedules.chunk import Chunk
from ovpatch_plugins.tp_linear.schedules.stock import linear
from ovpatch_plugins.tp_linear.tp_group import TPGroup

_CHUNKS = 4  # of an all-reduce, for which this schedule has no ring


class Ring(Chunk):
    """A rank multiplies its own rows first, then, step by step, those that it has received under the last product.

    For a reduce-scatter, a rank computes the rows of one owner at a time, its own last, and sends each product straight
    to the owner, which sums the terms.
    """

    def __init__(self) -> None:
        super().__init__(_CHUNKS)
        self.name = "ring"

    def gather_linear(
        self, ranks: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needs_whole: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """See :meth:`Schedule.gather_linear`."""
        world, rank = ranks.world, ranks.rank
        whole = x.new_empty((world * len(x), x.shape[1]))
        outs = [x.new_empty((len(whole), len(weight))) for weight in weights]
        by_rank, outs_by_rank = whole.view(world, *x.shape), [out.view(world, len(x), -1) for out in outs]
        by_rank[rank].copy_(x)
        for step in range(world):
            owner = (rank - step) % world
            pending = None
            if step + 1 < world:
                pending = ranks.exchange(by_rank[owner], (rank + 1) % world, by_rank[owner - 1], (rank - 1) % world)
            for out, weight, bias in zip(outs_by_rank, weights, biases, strict=True):
                linear(by_rank[owner], weight, bias, out=out[owner])
            if pending is not None:
                pending.wait()
        return outs, whole

    def linear_scatter(self, ranks: TPGroup, x: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Schedule.linear_scatter`."""
        world, rank = ranks.world, ranks.rank
        by_rank = x.view(world, -1, x.shape[1])
        terms = x.new_empty((world, by_rank.shape[1], len(weight)))  # by the rank that they come from
        under_way = []
        for step in range(1, world):
            owner, source = (rank + step) % world, (rank - step) % world
            under_way.append(ranks.exchange(linear(by_rank[owner], weight), owner, terms[source], source))
        linear(by_rank[rank], weight, out=terms[rank])
        for pending in under_way:
            pending.wait()
        return terms.sum(0)

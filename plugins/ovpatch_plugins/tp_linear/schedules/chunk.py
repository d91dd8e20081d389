"""Schedule ``chunk``: a product in several parts, each part's collective under the next part's product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ovpatch_plugins.tp_linear.schedules.bulk import Bulk
from ovpatch_plugins.tp_linear.schedules.stock import WeightGrads, linear
from ovpatch_plugins.tp_linear.tp_group import TPGroup


class Chunk(Bulk):
    """Rows are cut into chunks, fewer where they do not divide; each has rows of every rank."""

    ahead = True

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.name = self.format_name(chunks)

    @staticmethod
    def format_name(chunks: int) -> str:
        """Return the name of the schedule with a number of chunks."""
        return f"chunk{chunks}"

    def gather_linear(
        self, ranks: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needs_whole: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """See :meth:`Schedule.gather_linear`."""
        outs = [x.new_empty((ranks.world * len(x), len(weight))) for weight in weights]
        whole = x.new_empty((ranks.world * len(x), x.shape[1])) if needs_whole else None
        for rows, gathered in self._gathered(ranks, x):
            if whole is not None:
                _put(whole, gathered, rows, ranks.world)
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                _put(out, linear(gathered, weight, bias), rows, ranks.world)
        return outs, whole

    def linear_scatter(self, ranks: TPGroup, x: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Schedule.linear_scatter`."""
        by_rank = x.view(ranks.world, -1, x.shape[1])
        result = x.new_empty((by_rank.shape[1], len(weight)))
        under_way = []
        for rows in self._cut(by_rank.shape[1]):
            terms = linear(by_rank[:, rows].reshape(-1, x.shape[1]), weight)
            under_way.append((rows, *ranks.reduce_scatter(terms)))
        for rows, part, pending in under_way:
            pending.wait()
            result[rows] = part
        return result

    def linear_scatter_backward(
        self, ranks: TPGroup, grad: Tensor, weight: Tensor, weight_grads: WeightGrads | None, needs_input: bool
    ) -> Tensor | None:
        """See :meth:`Schedule.linear_scatter_backward`."""
        if not needs_input:
            return super().linear_scatter_backward(ranks, grad, weight, weight_grads, needs_input)
        (result,), whole = self.gather_linear(ranks, grad, [weight.t()], [None], weight_grads is not None)
        if weight_grads is not None and whole is not None:
            weight_grads(whole, ())
        return result

    def linear_reduce(self, ranks: TPGroup, x: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Schedule.linear_reduce`."""
        result = x.new_empty((len(x), len(weight)))
        under_way = []
        for rows in self._cut(len(x)):
            linear(x[rows], weight, out=result[rows])
            under_way.append(ranks.all_reduce(result[rows]))
        for pending in under_way:
            pending.wait()
        return result

    def _cut(self, rows: int) -> list[slice]:
        count = max((count for count in range(1, self.chunks + 1) if rows % count == 0), default=1)
        return [slice(i * (rows // count), (i + 1) * (rows // count)) for i in range(count)]

    def _gathered(self, ranks: TPGroup, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of every rank, ``[world * rows, k]``, while the next ones are gathered."""
        ahead = None
        for rows in self._cut(len(x)):
            now = (rows, *ranks.all_gather(x[rows]))
            if ahead is not None:
                ahead[2].wait()
                yield ahead[0], ahead[1]
            ahead = now
        assert ahead is not None
        ahead[2].wait()
        yield ahead[0], ahead[1]


def _put(target: Tensor, source: Tensor, rows: slice, world: int) -> None:
    """Copy rows of every rank to their places."""
    target.view(world, -1, target.shape[1])[:, rows] = source.view(world, -1, source.shape[1])

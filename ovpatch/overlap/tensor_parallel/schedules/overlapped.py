"""Schedules ``bulk``, ``chunk`` and ``ring``, whose collectives hide under products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.backward_waits import BACKWARD_WAITS
from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.tensor_parallel.schedules.stock import (
    ColumnGrads,
    Schedule,
    WeightGrads,
    linear,
)
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup

_NOTHING: Final = WorkGroup(())  # in flight


class Bulk(Schedule):
    """Products stay whole; the weights' gradients come last.

    Other ranks wait for the input's gradient, so its product comes first. The input is gathered again under it, if it
    has not been kept. The weights' gradients are launched behind the input gradient's reduce-scatter, and hide it.
    Both products and both collectives belong to one autograd node, so the engine cannot separate them; hooks of
    gradients and of parameters fire as under stock.
    """

    name = "bulk"
    gathers_grad_at_once = True

    def gather_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        whole, gathering = asked.kept, _NOTHING
        if asked.anew and asked.kept is not None and asked.weight_grads is not None:
            whole, gathering = ranks.all_gather(asked.kept)
        result, scattering = None, _NOTHING
        if asked.input_dtype is not None:
            result, scattering = self.scattered(ranks, asked, asked.input_dtype)
        gathering.wait()
        if whole is not None and asked.weight_grads is not None:
            asked.weight_grads(whole, asked.grads)
        _wait_in_backward(scattering)
        return result

    def scattered(
        self, ranks: TPGroup, asked: ColumnGrads, dtype: torch.dtype
    ) -> tuple[Tensor, WorkGroup]:
        """Start to add up the input's gradient over the ranks; return where this rank's rows will be, ``[m, k]``."""
        return ranks.reduce_scatter(asked.compute_input_grad(dtype))

    def replicated_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        result, reducing = None, _NOTHING
        if asked.input_dtype is not None:
            result = asked.compute_input_grad(asked.input_dtype)
            reducing = ranks.all_reduce(result)
        if asked.kept is not None and asked.weight_grads is not None:
            asked.weight_grads(asked.kept, asked.grads)
        _wait_in_backward(reducing)
        return result


def _wait_in_backward(pending: WorkGroup) -> None:
    """Wait for an input's gradient, behind what others can launch under it."""
    if BACKWARD_WAITS.launch_inside is not None:
        BACKWARD_WAITS.launch_inside()
    pending.wait()


class Chunk(Bulk):
    """Rows are cut into chunks, fewer where they do not divide; each has rows of every rank."""

    ahead = True
    gathers_grad_at_once = False

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.name = f"chunk{chunks}"

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_whole: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        outs = [x.new_empty((ranks.world * len(x), len(weight))) for weight in weights]
        whole = x.new_empty((ranks.world * len(x), x.shape[1])) if needs_whole else None
        for rows, gathered in self._gathered(ranks, x):
            if whole is not None:
                _put(whole, gathered, rows, ranks.world)
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                _put(out, linear(gathered, weight, bias), rows, ranks.world)
        return outs, whole

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        by_rank = x.view(ranks.world, -1, x.shape[1])
        result = x.new_empty((by_rank.shape[1], len(weight)))
        under_way = []
        for rows in self._cut(by_rank.shape[1]):
            terms = linear(by_rank[:, rows].reshape(-1, x.shape[1]), weight, bias)
            under_way.append((rows, *ranks.reduce_scatter(terms)))
        for rows, part, pending in under_way:
            pending.wait()
            result[rows] = part
        return result

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        if not needs_input:
            return super().linear_scatter_backward(ranks, grad, weight, weight_grads, needs_input)
        (result,), whole = self.gather_linear(
            ranks, grad, [weight.t()], [None], weight_grads is not None
        )
        if weight_grads is not None and whole is not None:
            weight_grads(whole, ())
        return result

    def linear_reduce(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        result = x.new_empty((len(x), len(weight)))
        under_way = []
        for rows in self._cut(len(x)):
            linear(x[rows], weight, bias, out=result[rows])
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
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_whole: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        world, rank = ranks.world, ranks.rank
        whole = x.new_empty((world * len(x), x.shape[1]))
        outs = [x.new_empty((len(whole), len(weight))) for weight in weights]
        by_rank, outs_by_rank = (
            whole.view(world, *x.shape),
            [out.view(world, len(x), -1) for out in outs],
        )
        by_rank[rank].copy_(x)
        for step in range(world):
            owner = (rank - step) % world
            pending = None
            if step + 1 < world:
                pending = ranks.exchange(
                    by_rank[owner], (rank + 1) % world, by_rank[owner - 1], (rank - 1) % world
                )
            for out, weight, bias in zip(outs_by_rank, weights, biases, strict=True):
                linear(by_rank[owner], weight, bias, out=out[owner])
            if pending is not None:
                pending.wait()
        return outs, whole

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        world, rank = ranks.world, ranks.rank
        by_rank = x.view(world, -1, x.shape[1])
        terms = x.new_empty(
            (world, by_rank.shape[1], len(weight))
        )  # by the rank that they come from
        under_way = []
        for step in range(1, world):
            owner, source = (rank + step) % world, (rank - step) % world
            under_way.append(
                ranks.exchange(linear(by_rank[owner], weight, bias), owner, terms[source], source)
            )
        linear(by_rank[rank], weight, bias, out=terms[rank])
        for pending in under_way:
            pending.wait()
        return terms.sum(0)

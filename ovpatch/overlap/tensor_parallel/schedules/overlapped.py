"""Schedules ``bulk``, ``chunk`` and ``ring``, whose collectives hide under GEMMs."""

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

_NO_WORK: Final = WorkGroup(())


class Bulk(Schedule):
    """The schedule that splits no GEMM, and computes the weights' gradients last.

    Peers wait for the input's gradient, so its GEMM comes first. If the gathered input was not kept, it is gathered
    again under this GEMM. The weights' gradients are launched after the reduce-scatter of the input's gradient, and
    hide it. Both GEMMs and both collectives belong to one autograd node, so the engine cannot separate them. Hooks of
    gradients and of parameters fire as in stock PyTorch.
    """

    name = "bulk"
    starts_grad_gather_early = True

    def gather_linear_backward(self, ranks: TPGroup, request: ColumnGrads) -> Tensor | None:
        gathered, pending_gather = request.saved_input, _NO_WORK
        # The gather starts first, because the GEMM of the input's gradient hides it.
        if (
            request.regathers
            and request.saved_input is not None
            and request.compute_weight_grads is not None
        ):
            gathered, pending_gather = ranks.all_gather(request.saved_input)
        result, pending_scatter = None, _NO_WORK
        if request.input_grad_dtype is not None:
            result, pending_scatter = self.start_input_grad_scatter(
                ranks, request, request.input_grad_dtype
            )
        pending_gather.wait()
        if gathered is not None and request.compute_weight_grads is not None:
            request.compute_weight_grads(gathered, request.output_grads)
        _wait_in_backward(pending_scatter)
        return result

    def start_input_grad_scatter(
        self, ranks: TPGroup, request: ColumnGrads, dtype: torch.dtype
    ) -> tuple[Tensor, WorkGroup]:
        """Start to sum the input's gradient over the ranks; return this rank's rows, ``[m, k]``, and the collective."""
        total = request.compute_input_grad(dtype)
        # No GEMM hides the reduce-scatter, so it runs on the current stream. Events of a second stream take host time.
        if request.compute_weight_grads is None and BACKWARD_WAITS.launch_inside is None:
            return ranks.scatter_rows(total), _NO_WORK
        return ranks.reduce_scatter(total)

    def replicated_linear_backward(self, ranks: TPGroup, request: ColumnGrads) -> Tensor | None:
        result, pending_reduce = None, _NO_WORK
        if request.input_grad_dtype is not None:
            result = request.compute_input_grad(request.input_grad_dtype)
            # The all-reduce hides under the weights' gradients, which come last.
            pending_reduce = ranks.all_reduce(result)
        if request.saved_input is not None and request.compute_weight_grads is not None:
            request.compute_weight_grads(request.saved_input, request.output_grads)
        _wait_in_backward(pending_reduce)
        return result


def _wait_in_backward(pending: WorkGroup) -> None:
    """Wait for an input's gradient, after other features have launched work under its collective."""
    if BACKWARD_WAITS.launch_inside is not None:
        BACKWARD_WAITS.launch_inside()
    pending.wait()


class SplitGather(Bulk):
    """A schedule that multiplies rows while further rows are gathered, in the backward of a scattered output, too."""

    computes_ahead = True
    # The first GEMM of the backward hides the gather, so it must not start earlier.
    starts_grad_gather_early = False

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        compute_weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        # Without the GEMM of the input's gradient, the gather would have nothing to hide under.
        if not needs_input:
            return super().linear_scatter_backward(
                ranks, grad, weight, compute_weight_grads, needs_input
            )
        (result,), gathered = self.gather_linear(
            ranks, grad, [weight.t()], [None], compute_weight_grads is not None
        )
        if compute_weight_grads is not None and gathered is not None:
            compute_weight_grads(gathered, ())
        return result


class Chunk(SplitGather):
    """The schedule that splits rows into chunks, each with rows of every rank.

    If the number of rows does not divide by the number of chunks, the next smaller number that divides is used.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.name = f"chunk{chunks}"

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        outs = [x.new_empty((ranks.world * len(x), len(weight))) for weight in weights]
        gathered = x.new_empty((ranks.world * len(x), x.shape[1])) if needs_gathered else None
        for rows, chunk in self._gather_chunks(ranks, x):
            if gathered is not None:
                _copy_rows(gathered, chunk, rows, ranks.world)
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                _copy_rows(out, linear(chunk, weight, bias), rows, ranks.world)
        return outs, gathered

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        rows_by_rank = x.view(ranks.world, -1, x.shape[1])
        result = x.new_empty((rows_by_rank.shape[1], len(weight)))
        in_flight = []
        for rows in self._split_rows(rows_by_rank.shape[1]):
            # Each chunk has rows of every owner, because a reduce-scatter gives all ranks the same number of rows.
            terms = linear(rows_by_rank[:, rows].reshape(-1, x.shape[1]), weight, bias)
            in_flight.append((rows, *ranks.reduce_scatter(terms)))
        # The waits come after all GEMMs, so that a collective runs under the GEMM of the next chunk.
        for rows, part, pending in in_flight:
            pending.wait()
            result[rows] = part
        return result

    def linear_reduce(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        result = x.new_empty((len(x), len(weight)))
        in_flight = []
        for rows in self._split_rows(len(x)):
            # The all-reduce of a chunk runs in place, under the GEMM of the next chunk.
            linear(x[rows], weight, bias, out=result[rows])
            in_flight.append(ranks.all_reduce(result[rows]))
        for pending in in_flight:
            pending.wait()
        return result

    def _split_rows(self, rows: int) -> list[slice]:
        count = max((count for count in range(1, self.chunks + 1) if rows % count == 0), default=1)
        return [slice(i * (rows // count), (i + 1) * (rows // count)) for i in range(count)]

    def _gather_chunks(self, ranks: TPGroup, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of rows of every rank, ``[world * rows, k]``, while the next chunk is gathered."""
        previous = None
        for rows in self._split_rows(len(x)):
            # The next gather starts before the caller multiplies the previous chunk, and hides under that GEMM.
            current = (rows, *ranks.all_gather(x[rows]))
            if previous is not None:
                previous[2].wait()
                yield previous[0], previous[1]
            previous = current
        assert previous is not None
        previous[2].wait()
        yield previous[0], previous[1]


def _copy_rows(target: Tensor, source: Tensor, rows: slice, world: int) -> None:
    """Copy a chunk with rows of every rank to its places among the rows of all chunks."""
    target.view(world, -1, target.shape[1])[:, rows] = source.view(world, -1, source.shape[1])


# An all-reduce has no ring here, so it runs in chunks.
_ALL_REDUCE_CHUNKS = 4


class Ring(Chunk):
    """The schedule in which rows go from rank to rank.

    A rank multiplies its own rows first. In each further step it multiplies the rows that it has received under the
    previous GEMM. For a reduce-scatter, a rank computes the rows of one owner at a time, its own rows last. It sends
    each result straight to the owner, which sums the terms.
    """

    def __init__(self) -> None:
        super().__init__(_ALL_REDUCE_CHUNKS)
        self.name = "ring"

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        world, rank = ranks.world, ranks.rank
        gathered = x.new_empty((world * len(x), x.shape[1]))
        outs = [x.new_empty((len(gathered), len(weight))) for weight in weights]
        rows_by_rank = gathered.view(world, *x.shape)
        outs_by_rank = [out.view(world, len(x), -1) for out in outs]
        rows_by_rank[rank].copy_(x)
        for step in range(world):
            # A rank passes on the rows that it multiplies. Index -1 is the last rank, because the ring is closed.
            owner = (rank - step) % world
            pending = None
            # The rows of the next step arrive under the GEMMs of this step. The last step needs no further rows.
            if step + 1 < world:
                pending = ranks.exchange(
                    rows_by_rank[owner],
                    (rank + 1) % world,
                    rows_by_rank[owner - 1],
                    (rank - 1) % world,
                )
            for out, weight, bias in zip(outs_by_rank, weights, biases, strict=True):
                linear(rows_by_rank[owner], weight, bias, out=out[owner])
            if pending is not None:
                pending.wait()
        return outs, gathered

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        world, rank = ranks.world, ranks.rank
        rows_by_rank = x.view(world, -1, x.shape[1])
        # The terms of this rank's rows, by the rank that computes them.
        terms = x.new_empty((world, rows_by_rank.shape[1], len(weight)))
        in_flight = []
        for step in range(1, world):
            owner, source = (rank + step) % world, (rank - step) % world
            in_flight.append(
                ranks.exchange(
                    linear(rows_by_rank[owner], weight, bias), owner, terms[source], source
                )
            )
        # The GEMM of this rank's own rows comes last, and hides the last messages.
        linear(rows_by_rank[rank], weight, bias, out=terms[rank])
        for pending in in_flight:
            pending.wait()
        return terms.sum(0)

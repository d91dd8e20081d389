"""Gradient buckets of which each rank gets its own part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives
from ovpatch.overlap.comm.side_streams import record_streams, side_streams
from ovpatch.overlap.comm.work import Work
from ovpatch.overlap.data_parallel.bucket import GradBucket
from ovpatch.overlap.tensors.metadata_ops import grad_of
from ovpatch.overlap.tensors.shard import flat_view
from ovpatch_plugins.dist_optimizer.half_wire import HalfWire
from ovpatch_plugins.dist_optimizer.report import COUNTERS

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads


class ShardedGradBucket(GradBucket):
    """Gradients of some parameters, most of which are reduced and scattered; the others are all-reduced.

    Args:
        indices: Index of each parameter in the order of the whole model.
        params: The parameters, in the same order.
        shards: Where the parts go; it knows which parameters are cut.
        wire: In which dtype they are sent.
        dtype: What the sum is computed in; the parameters' own dtype by default.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        shards: ShardedGrads,
        wire: HalfWire,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(indices, params, dtype=dtype, alone=shards.sharded)
        self._shards, self._wire = shards, wire
        self._cut = [i for i in self._large if indices[i] in shards.sharded]
        self._numels = {i: params[i].numel() for i in self._cut}
        self._given_up: set[int] = set()
        self._copies: list[Tensor] = []

    @property
    def freeable_nbytes(self) -> int:
        """See :class:`GradBucket`."""
        return sum(numel * self._dtype(i).itemsize for i, numel in self._numels.items())

    def free_reduced(self, *, but: Collection[int]) -> None:
        """Free the memory of what this rank has its part of."""
        self._outlive()
        for i in self._cut:
            piece = self._inputs.pop(i)
            if self.indices[i] not in but:
                self._shards.give_up(self.indices[i], ours=grad_of(self.params[i]) is piece)
        self._given_up.update(self._cut)

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Leave this rank's parts with the shards, and placeholders in ``p.grad``; the rest as for other buckets."""
        self._outlive()
        for i in self._cut:
            piece = self._inputs.pop(i, None)
            if (piece is not None or i in self._given_up) and self.indices[i] not in skip:
                self._shards.deliver(self.indices[i], ours=piece is not None and grad_of(self.params[i]) is piece)
        self._given_up.clear()
        return super().unpack(skip=skip)

    def detach_grads(self) -> None:
        """Take gradients away that are being reduced in place, or were given up."""
        self._shards.lose()
        super().detach_grads()

    def drop_inputs(self) -> None:
        """Drop what was packed."""
        self._outlive()
        self._given_up.clear()
        super().drop_inputs()

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reductions of what :meth:`pack` or :meth:`make_zeros` has returned."""
        first = len(inputs) - len(self._large)  # before it: the flat tensor, if there is one
        large = dict(zip(self._large, inputs[first:], strict=True))
        whole = inputs[:first] + [piece for i, piece in large.items() if i not in self._cut]
        works: list[Work] = [*collectives.all_reduce(whole)] if whole else []
        for dtype, ones in self._by_dtype().items():
            parts = [self._shards.part(self.indices[i], self.dtype) for i in ones]
            wholes = [self._padded(i, large[i]) for i in ones]
            in_half = dtype is not self.dtype
            works += (collectives.reduce_scatter_fp32 if in_half else collectives.reduce_scatter)(parts, wholes)
            COUNTERS.grads_in_half += in_half * len(ones)
        return works

    def _outlive(self) -> None:
        """Drop copies; their memory, and that of gradients, outlives the reductions, which have been waited for."""
        if side_streams.is_used(self.device):
            grads = (grad_of(self.params[i]) for i in self._cut)
            record_streams((*self._copies, *(self._inputs.get(i) for i in self._cut), *grads), self.device)
        self._copies.clear()

    def _by_dtype(self) -> dict[torch.dtype, list[int]]:
        found: dict[torch.dtype, list[int]] = {}
        for i in self._cut:
            found.setdefault(self._dtype(i), []).append(i)
        return found

    def _divided(self, inputs: Mapping[int, Tensor]) -> list[Tensor]:
        return [piece for i, piece in inputs.items() if self._dtype(i) is self.dtype]

    def _dtype(self, i: int) -> torch.dtype:
        if i not in self._numels:
            return self.dtype
        return self._wire.dtype(self.indices[i]) or self.dtype

    def _padded(self, i: int, piece: Tensor) -> Tensor:
        """Return a tensor that can be cut into equal parts, one per rank."""
        elements, wanted = flat_view(piece), self._shards.padded_numel(self.indices[i])
        numel = elements.numel()
        if numel == wanted:
            return elements
        self._copies.append(torch.nn.functional.pad(elements, (0, wanted - numel)))
        return self._copies[-1]

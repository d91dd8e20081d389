"""The assignment of parameters to gradient buckets."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.data_parallel.fp32_accumulation import LOW_PRECISION_DTYPES
from ovpatch.overlap.data_parallel.grad_bucket import (
    SMALL_NUMEL,
    Bucket,
    GradBucket,
    SparseBucket,
)
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder

# Bytes of small gradients that justify the launch of one more all-reduce, and on gloo one more message over a link.
_MIN_SMALL_BYTES: Final = 4 << 20
_MIN_MESSAGE_BYTES: Final = 1 << 17


@dataclass
class BucketAssignment:
    """The parameters in each bucket of a model.

    The first assignment follows the order of registration, and later ones the order in which
    gradients became ready. A ring adds the parts of a tensor in an order that depends on the first
    and last element of the tensor. So buckets with the boundaries of stock DDP give its bits if
    they are reduced as one flat tensor. torch's own function therefore sets the boundaries.

    Attributes:
        params: The parameters in registration order.
        names: Their fully qualified names.
        limits: The capacities of the first, second, … bucket in bytes. The last capacity holds
            for all further buckets.
        granularity: The content of a bucket: ``size`` fills its capacity, ``layer`` is one layer,
            ``module`` is the model. Default: ``size``.
        in_fp32: Whether bf16 and fp16 gradients are reduced in float32. Default: False.
        sparse: Whether each parameter's gradient will be sparse. Default: none is.
        sharder: Makes the buckets of sharded gradients.
        sends_each: Whether each large tensor is a separate message that crosses a link between
            hosts. Default: False.
        ready_order: The parameters, by index, in the order in which their gradients became ready in
            the last backward.
    """

    params: Sequence[torch.nn.Parameter]
    names: Sequence[str]
    limits: Sequence[int]
    granularity: str = "size"
    in_fp32: bool = False
    sparse: Sequence[bool] = ()
    sharder: GradSharder = field(default_factory=GradSharder)
    ready_order: list[int] = field(default_factory=list)
    sends_each: bool = False
    # The first rank's `ready_order`, once it was broadcast.
    _order: list[int] = field(default_factory=list)

    def broadcast_order(self, group: dist.ProcessGroup) -> None:
        """Adopt the first rank's :attr:`ready_order`; all ranks of the group call this."""
        # A parameter without gradient must still be in a bucket.
        missing = set(range(len(self.params))).difference(self.ready_order)
        order = [*self.ready_order, *sorted(missing)]
        with outside_modes():
            shared = torch.tensor(order, dtype=torch.int64, device=self.params[0].device)
        dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
        self._order = shared.tolist()

    def make_buckets(self, *, bucketed: bool) -> list[Bucket]:
        """Return the buckets along the broadcast order, or the initial ones before it.

        Args:
            bucketed: See :meth:`assign_initial`.
        """
        if self._order:
            return self.assign_along(self._order)
        return self.assign_initial(bucketed=bucketed)

    def assign_initial(self, *, bucketed: bool) -> list[Bucket]:
        """Return the buckets for the first backward, before the order of gradients is known.

        Args:
            bucketed: If true, split the parameters in reverse registration order. Otherwise return
                one bucket per dtype and device, as in stock DDP if the first backward determines
                the order of gradients.
        """
        order = range(len(self.params))
        if bucketed and self.granularity == "layer":
            return self._make_layer_buckets(list(reversed(order)))
        groups = self._group_by_size(order, self.limits if bucketed else [sys.maxsize])
        # A backward computes the last parameters' gradients first.
        return self._make_buckets(self._postpone_small(list(reversed(groups))))

    def assign_along(self, order: Sequence[int]) -> list[Bucket]:
        """Return the buckets along ``order``, in which gradients became ready."""
        if self.granularity == "layer":
            return self._make_layer_buckets(order)
        return self._make_buckets(self._postpone_small(self._group_by_size(order, self.limits)))

    def _group_by_size(self, order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        sizes = [sys.maxsize] if self.granularity == "module" else list(limits)
        params: list[torch.Tensor] = [self.params[i] for i in order]
        # torch finds sparse gradients by the index of the parameter in the model, not in `params`.
        sparse = [self._is_sparse(i) for i in range(len(self.params))]
        # torch expects no indices for the order of registration.
        indices = [] if isinstance(order, range) else list(order)
        groups, _ = dist._compute_bucket_assignment_by_size(params, sizes, sparse, indices)
        return [list(group) for group in groups]

    def _make_layer_buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Return a bucket per layer, dtype and device, ordered by its last gradient."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for i in order:
            param = self.params[i]
            sparse_index = i if self._is_sparse(i) else None
            key = (get_layer(self.names[i]), param.dtype, param.device, sparse_index)
            # Insert the group again, so that the dictionary is ordered by the last gradients.
            groups[key] = groups.pop(key, [])
            groups[key].append(i)
        return self._make_buckets(list(groups.values()))

    def _postpone_small(self, groups: Sequence[list[int]]) -> list[list[int]]:
        """Move small gradients to later groups.

        A bucket whose large gradients are reduce-scattered needs an additional all-reduce for its
        small ones, such as biases and norms, which costs a launch. So small gradients move to later
        buckets until together they justify a launch, or until the last bucket of their kind.

        Over a link, gloo sends the small ones of a bucket next to its large ones. Each message waits for the large
        ones before it, in one of two threads, so the link then carries one large tensor at a time.
        """
        if not (self.sharder.sharded or self.sends_each):
            return list(groups)
        min_bytes = _MIN_SMALL_BYTES if self.sharder.sharded else _MIN_MESSAGE_BYTES
        last = {self._get_kind(group): position for position, group in enumerate(groups)}
        postponed: dict[object, list[int]] = {}
        moved = []
        for position, group in enumerate(groups):
            kind = self._get_kind(group)
            group = postponed.pop(kind, []) + group
            # A dictionary serves as an ordered set.
            small = {
                i: None
                for i in group
                if i not in self.sharder.sharded and self.params[i].numel() < SMALL_NUMEL
            }
            if position < last[kind] and sum(self.params[i].nbytes for i in small) < min_bytes:
                postponed[kind] = list(small)
                group = [i for i in group if i not in small]
            if group:
                moved.append(group)
        return moved

    def _get_kind(self, group: Sequence[int]) -> object:
        """Return the properties that gradients of a group share; a sparse gradient is alone."""
        first = self.params[group[0]]
        return first.dtype, first.device, group[0] if self._is_sparse(group[0]) else None

    def _make_buckets(self, groups: Sequence[Sequence[int]]) -> list[Bucket]:
        return [self._make_bucket(group) for group in groups]

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        params = [self.params[i] for i in indices]
        if self._is_sparse(indices[0]):
            return SparseBucket(indices[0], params[0])
        dtype = torch.float32 if self.in_fp32 and params[0].dtype in LOW_PRECISION_DTYPES else None
        # The sharder has no bucket for these gradients if it shards none of them.
        return self.sharder.make_bucket(indices, params, dtype) or GradBucket(
            indices, params, dtype=dtype
        )

    def _is_sparse(self, index: int) -> bool:
        return bool(self.sparse) and self.sparse[index]


def get_layer(name: str) -> str:
    """Return the layer of a parameter: its name up to the first number, or else its module.

    ``transformer.h.3.attn.weight`` is in ``transformer.h.3``, ``model.lm_head.weight`` in
    ``model.lm_head``.
    """
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return found.group() if found else name.rpartition(".")[0]

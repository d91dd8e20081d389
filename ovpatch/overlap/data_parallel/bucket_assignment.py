"""The assignment of parameters to gradient buckets."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.data_parallel.fp32_accumulation import LOW_PRECISION_DTYPES
from ovpatch.overlap.data_parallel.grad_bucket import SMALL_NUMEL, Bucket, GradBucket, SparseBucket
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder

# --- which gradients share a bucket ---


_WORTH_A_LAUNCH = 4 << 20  # bytes of small gradients


@dataclass
class BucketAssignment:
    """Assigns the parameters of a model to buckets: by registration order at first, then along that of a backward.

    A ring adds the parts of a tensor in an order that depends on where the tensor begins and ends.
    Buckets with stock DDP's boundaries therefore give stock's bits wherever they are reduced as one flat tensor;
    torch's own function sets the boundaries.

    Attributes:
        params: The parameters in registration order.
        names: Their fully qualified names.
        limits: Capacity of the first, second, … bucket in bytes; the last one holds for all that follow.
        granularity: What a bucket holds: ``size``, as much as its capacity; ``layer``, one layer; ``module``, all.
        in_fp32: Reduce gradients of half precision in float32.
        sparse: Whether each parameter's gradient will be sparse.
        sharder: Makes the buckets of sharded gradients.
        ready_order: The parameters in the order in which their gradients became ready in the last backward.
    """

    params: Sequence[torch.nn.Parameter]
    names: Sequence[str]
    limits: Sequence[int]
    granularity: str = "size"
    in_fp32: bool = False
    sparse: Sequence[bool] = ()
    sharder: GradSharder = field(default_factory=GradSharder)
    ready_order: list[int] = field(default_factory=list)
    _order: list[int] = field(default_factory=list)

    def broadcast_order(self, group: dist.ProcessGroup) -> None:
        """Use the first rank's :attr:`ready_order` from now on; every rank of the group calls this."""
        missing = set(range(len(self.params))).difference(self.ready_order)
        order = [*self.ready_order, *sorted(missing)]
        with outside_modes():
            shared = torch.tensor(order, dtype=torch.int64, device=self.params[0].device)
        dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
        self._order = shared.tolist()

    def make_buckets(self, *, bucketed: bool) -> list[Bucket]:
        """Return the buckets; ``bucketed`` as for :meth:`assign_initial`, until an order was broadcast."""
        return self.assign_along(self._order) if self._order else self.assign_initial(bucketed=bucketed)

    def assign_initial(self, *, bucketed: bool) -> list[Bucket]:
        """Return the buckets for the first backward, whose order of gradients is not known.

        Args:
            bucketed: Cut in reverse registration order. Otherwise one bucket per dtype and device, as under stock DDP
                where the first backward shows the order of gradients.
        """
        order = range(len(self.params))
        if bucketed and self.granularity == "layer":
            return self._by_layer(list(reversed(order)))
        groups = self._by_size(order, self.limits if bucketed else [sys.maxsize])
        return self._make(self._postpone_small(list(reversed(groups))))

    def assign_along(self, order: Sequence[int]) -> list[Bucket]:
        """Return the buckets cut along ``order``, in which gradients became ready."""
        if self.granularity == "layer":
            return self._by_layer(order)
        return self._make(self._postpone_small(self._by_size(order, self.limits)))

    def _by_size(self, order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        sizes = [sys.maxsize] if self.granularity == "module" else list(limits)
        params: list[torch.Tensor] = [self.params[i] for i in order]
        sparse = [self._is_sparse(i) for i in range(len(self.params))]  # looked up by the parameter's own index
        indices = [] if isinstance(order, range) else list(order)
        groups, _ = dist._compute_bucket_assignment_by_size(params, sizes, sparse, indices)
        return [list(group) for group in groups]

    def _by_layer(self, order: Sequence[int]) -> list[Bucket]:
        """Return a bucket per layer, dtype and device, at the place of its last gradient."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for i in order:
            param = self.params[i]
            key = (get_layer(self.names[i]), param.dtype, param.device, i if self._is_sparse(i) else None)
            groups[key] = groups.pop(key, [])
            groups[key].append(i)
        return self._make(list(groups.values()))

    def _postpone_small(self, groups: Sequence[list[int]]) -> list[list[int]]:
        """Move small gradients to later groups.

        A bucket whose large gradients are reduce-scattered needs an all-reduce of its own for its small ones, a bias or
        a norm, at the cost of a launch. So small gradients move to later buckets until they are enough to be worth one,
        at the latest to the last bucket of their dtype and device.
        """
        if not self.sharder.sharded:
            return list(groups)
        last = {self._kind(group): position for position, group in enumerate(groups)}
        waiting: dict[object, list[int]] = {}
        moved = []
        for position, group in enumerate(groups):
            kind = self._kind(group)
            group = waiting.pop(kind, []) + group
            small = {i: None for i in group if i not in self.sharder.sharded and self.params[i].numel() < SMALL_NUMEL}
            if position < last[kind] and sum(self.params[i].nbytes for i in small) < _WORTH_A_LAUNCH:
                waiting[kind] = list(small)
                group = [i for i in group if i not in small]
            if group:
                moved.append(group)
        return moved

    def _kind(self, group: Sequence[int]) -> object:
        """Return what gradients of one group have in common; a sparse one is alone."""
        first = self.params[group[0]]
        return first.dtype, first.device, group[0] if self._is_sparse(group[0]) else None

    def _make(self, groups: Sequence[Sequence[int]]) -> list[Bucket]:
        return [self._make_bucket(group) for group in groups]

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        params = [self.params[i] for i in indices]
        if self._is_sparse(indices[0]):
            return SparseBucket(indices[0], params[0])
        dtype = torch.float32 if self.in_fp32 and params[0].dtype in LOW_PRECISION_DTYPES else None
        return self.sharder.make_bucket(indices, params, dtype) or GradBucket(indices, params, dtype=dtype)

    def _is_sparse(self, index: int) -> bool:
        return bool(self.sparse) and self.sparse[index]


def get_layer(name: str) -> str:
    """Return the layer that a parameter belongs to: its name up to the first number, else the module that owns it.

    ``transformer.h.3.attn.weight`` is in ``transformer.h.3``, ``model.lm_head.weight`` in ``model.lm_head``.
    """
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return found.group() if found else name.rpartition(".")[0]

"""The broadcast of parameters after a step in which each rank updates the parameters it owns."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.collectives import Broadcast, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.tensors.shard import view_flat
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from ovpatch_plugins.dist_optimizer.param_all_gather import MIB
from ovpatch_plugins.dist_optimizer.param_sync import group_by_kind, split_by_size
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


class BroadcastBucket:
    """The broadcast of some parameters of one owner, used again in every step.

    A single parameter is sent from its own memory, several parameters through a flat buffer. Call
    :meth:`start_broadcast` after each step, then :meth:`finish_broadcast` on the same stream.

    Args:
        params: Dense parameters of one dtype and device.
        group: The process group.
        owner: The rank of this group that has updated them.
        name: The name of the bucket in profiles.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        owner: int,
        *,
        name: str = "",
    ) -> None:
        self._params = tuple(params)
        self._is_owner = group.rank() == owner
        self._broadcast = Broadcast(group, owner)
        self._labels = [
            profiler_label("dist_optimizer", phase, name) for phase in ("broadcast", "wait")
        ]
        # The collective and the tensor that it sends or receives.
        self._in_flight: tuple[Work, Tensor] | None = None

    def start_broadcast(self) -> None:
        """Start the collective. All ranks of the group must call this in the same order."""
        with outside_modes(), profiler_span(self._labels[0]):
            elements = self._elements()
            # A single parameter needs no copy.
            if len(elements) == 1:
                sent = elements[0]
            elif self._is_owner:
                sent = torch.cat(elements)
            else:
                sent = elements[0].new_empty(sum(map(len, elements)))
            self._in_flight = self._broadcast(sent), sent

    def finish_broadcast(self) -> None:
        """Make the current stream wait for the values."""
        assert self._in_flight is not None
        with outside_modes(), profiler_span(self._labels[1]):
            work, received = self._in_flight
            # This releases the buffer even if the collective has failed.
            self._in_flight = None
            work.wait()
            # The memory of the parameters may have moved, so read it again.
            elements = self._elements()
            if len(elements) > 1 and not self._is_owner:
                torch._foreach_copy_(elements, received.split([len(flat) for flat in elements]))

    def _elements(self) -> list[Tensor]:
        return [view_flat(param.data) for param in self._params]


class ParamBroadcast:
    """The broadcasts of one optimizer's parameters after its step.

    Small parameters of one owner are sent together in a flat buffer. One bucket is in flight while
    the last one is copied out, so at most two buffers take memory.

    Args:
        bucket_mb: The capacity of a bucket in MiB.
    """

    def __init__(self, bucket_mb: float) -> None:
        # In bytes.
        self._capacity = bucket_mb * MIB
        self._params: Sequence[ShardedParam] = []
        # Copy engines broadcast nothing.
        self.copy_places: tuple[tuple[dist.ProcessGroup, torch.device], ...] = ()
        self._buckets: list[BroadcastBucket] = []
        self._nbytes = 0

    def find_copy_places(self, params: Sequence[ShardedParam]) -> None:
        """Do nothing, because there are none."""

    def choose_transport(self) -> None:
        """Do nothing, because the backend broadcasts."""

    def begin_update(self, params: Sequence[ShardedParam]) -> None:
        """Do nothing, because the optimizer updates the parameters' own memory."""

    def keep_update(self) -> None:
        """Do nothing, because the parameters' own memory has the update."""

    def start(self, params: Sequence[ShardedParam]) -> None:
        """Broadcast the parameters, and wait for them.

        Args:
            params: The parameters, the same on all ranks. Their owners do not change.
        """
        if params != self._params or not self._buckets:
            self._set_buckets(params)
        for last, bucket in itertools.pairwise([None, *self._buckets, None]):
            # The next bucket is in flight while the last one is copied out.
            if bucket is not None:
                bucket.start_broadcast()
            if last is not None:
                last.finish_broadcast()
        COUNTERS.bytes_gathered += self._nbytes
        COUNTERS.gathers += len(self._buckets)

    def finish(self) -> None:
        """Do nothing, because :meth:`start` leaves no collective in flight."""

    def _set_buckets(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        # If anything raises below, the next step must split again.
        self._buckets = []
        self._nbytes = sum(sharded.param.nbytes for sharded in params)
        capacities = itertools.repeat(self._capacity)
        self._buckets = [
            _make_bucket(bucket)
            for same_kind in group_by_kind(params, _kind)
            for bucket in split_by_size(same_kind, capacities)
        ]


def _kind(sharded: ShardedParam) -> Hashable:
    return sharded.owner, sharded.param.dtype


def _make_bucket(params: Sequence[ShardedParam]) -> BroadcastBucket:
    first = params[0]
    shards = first.shards
    assert first.owner is not None
    name = shards.names[first.index]
    # A script's thread may use the group concurrently.
    communicator = shards.holders.step_communicator(first.param.device)
    return BroadcastBucket(
        [sharded.param for sharded in params], communicator, first.owner, name=name
    )

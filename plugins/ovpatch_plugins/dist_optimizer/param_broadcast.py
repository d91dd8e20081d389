"""The broadcast of parameters after a step in which each rank updates full parameters that it owns."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.collectives import Broadcast, Work, step_communicator
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.tensors.shard import view_flat
from ovpatch_plugins.dist_optimizer.param_all_gather import MIB
from ovpatch_plugins.dist_optimizer.param_sync import group_by_kind, split_by_size
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


class BroadcastBucket:
    """Broadcasts parameters of one owner: one parameter in its own memory, several through a flat buffer.

    It is used over and over: :meth:`start_broadcast` after each step, then :meth:`finish_broadcast`, both on the same
    stream.

    Args:
        params: Dense parameters of one dtype and device.
        group: The process group.
        owner: The rank in it that has updated them.
        name: Of the bucket, for labels in profiles.
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
        self._labels = [profiler_label("dist_optimizer", phase, name) for phase in ("broadcast", "wait")]
        self._in_flight: tuple[Work, Tensor] | None = None

    def start_broadcast(self) -> None:
        """Start the collective, which all ranks of the group must call in the same order."""
        with outside_modes(), profiler_span(self._labels[0]):
            elements = self._elements()
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
            self._in_flight = None
            work.wait()
            elements = self._elements()
            if len(elements) > 1 and not self._is_owner:
                torch._foreach_copy_(elements, received.split([len(one) for one in elements]))

    def _elements(self) -> list[Tensor]:
        return [view_flat(param.data) for param in self._params]


class ParamBroadcast:
    """The broadcast of one optimizer's parameters after its step.

    Small parameters of one owner travel together in a flat buffer. One bucket is in flight while the last one is copied
    out, and no more than these two take memory.

    Args:
        bucket_mb: How many MiB of parameters go together.
    """

    def __init__(self, bucket_mb: float) -> None:
        self._capacity = bucket_mb * MIB
        self._params: Sequence[ShardedParam] = []
        self._buckets: list[BroadcastBucket] = []
        self._nbytes = 0

    def begin_update(self, params: Sequence[ShardedParam]) -> None:
        """Do nothing: parameters are updated where they are."""

    def keep_update(self) -> None:
        """Do nothing, likewise."""

    def start(self, params: Sequence[ShardedParam]) -> None:
        """Broadcast, and wait; all ranks do so for the same parameters, whose owners stay the same."""
        if params != self._params or not self._buckets:
            self._params, self._buckets = params, []
            self._nbytes = sum(one.param.nbytes for one in params)
            divided = [
                b
                for alike in group_by_kind(params, _kind)
                for b in split_by_size(alike, itertools.repeat(self._capacity))
            ]
            self._buckets = [_make_bucket(bucket) for bucket in divided]
        for last, bucket in zip([None, *self._buckets], [*self._buckets, None], strict=True):
            if bucket is not None:
                bucket.start_broadcast()
            if last is not None:
                last.finish_broadcast()
        COUNTERS.bytes_gathered += self._nbytes
        COUNTERS.gathers += len(self._buckets)

    def finish(self) -> None:
        """Do nothing: nothing stays in flight."""


def _kind(param: ShardedParam) -> Hashable:
    return param.owner, param.param.dtype


def _make_bucket(params: Sequence[ShardedParam]) -> BroadcastBucket:
    shards, owner = params[0].shards, params[0].owner
    assert owner is not None
    name = shards.names[params[0].index]
    communicator = step_communicator(shards.group, params[0].param.device)
    return BroadcastBucket([one.param for one in params], communicator, owner, name=name)

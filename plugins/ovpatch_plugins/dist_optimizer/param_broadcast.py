"""Copies of whole parameters from the rank that has updated them to all others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.collectives import Broadcast
from ovpatch.overlap.comm.step_communicator import step_communicator
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.comm.work import Work
from ovpatch.overlap.tensors.pending_param import plainly
from ovpatch.overlap.tensors.shard import flat
from ovpatch_plugins.dist_optimizer.param_all_gather import MIB, alike, by_size
from ovpatch_plugins.dist_optimizer.report import COUNTERS

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


class ParamBroadcast:
    """Hands out one owner's parameters, together: a parameter alone in its own memory, several through a flat copy.

    Use it over and over: :meth:`start` after each step, then :meth:`finish`, both on the same stream.

    Args:
        params: Dense parameters of one dtype and device.
        group: The process group.
        owner: The rank in it that has updated them.
        feature: For labels in profiles.
        name: Of the bucket, for labels in profiles.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        owner: int,
        *,
        feature: str = "dist_optimizer",
        name: str = "",
    ) -> None:
        self._params = tuple(params)
        self._is_owner = group.rank() == owner
        self._broadcast = Broadcast(group, owner)
        self._labels = profiler_label(feature, "broadcast", name), profiler_label(feature, "wait", name)
        self._under_way: tuple[Work, Tensor] | None = None

    def start(self) -> None:
        """Start: a collective, which all ranks of the group must call in the same order."""
        with plainly(), profiler_span(self._labels[0]):
            elements = self._elements()
            if len(elements) == 1:
                sent = elements[0]
            elif self._is_owner:
                sent = torch.cat(elements)
            else:
                sent = elements[0].new_empty(sum(map(len, elements)))
            self._under_way = self._broadcast(sent), sent

    def finish(self) -> None:
        """Make the current stream wait for the values."""
        assert self._under_way is not None
        with plainly(), profiler_span(self._labels[1]):
            work, received = self._under_way
            self._under_way = None
            work.wait()
            elements = self._elements()
            if len(elements) > 1 and not self._is_owner:
                torch._foreach_copy_(elements, received.split([len(one) for one in elements]))

    def _elements(self) -> list[Tensor]:
        return [flat(param.data) for param in self._params]


# Handing out the parameters of one optimizer after a step in which each was updated by its owner alone.
#
# [Note: a window of two] Small parameters of one owner travel together, in a flat copy. The next bucket is on its way
# while the last is copied out, and no more than these two take memory.


class ParamBroadcasts:
    """What gives one optimizer's parameters to the ranks that do not own them.

    Args:
        bucket_mb: How many MiB of parameters go together.
    """

    def __init__(self, bucket_mb: float) -> None:
        self._capacity = bucket_mb * MIB
        self._of: tuple[tuple[int, int], ...] = ()
        self._buckets: list[ParamBroadcast] = []

    def launch(self, parts: Sequence[ShardedParam]) -> None:
        """Hand out, and wait; all ranks do so for the same parameters."""
        which = tuple((id(part.shards), part.index) for part in parts)
        if which != self._of:
            kinds = alike(parts, _kind)
            self._of, self._buckets = which, [_handout(b) for ones in kinds for b in by_size(ones, self._capacity)]
        for last, bucket in zip([None, *self._buckets], [*self._buckets, None], strict=True):
            if bucket is not None:
                bucket.start()
            if last is not None:
                last.finish()
        COUNTERS.bytes_gathered += sum(part.param.nbytes for part in parts)
        COUNTERS.gathers += len(self._buckets)

    def settle(self) -> None:
        """Do nothing: nothing stays under way."""


def _kind(part: ShardedParam) -> Hashable:
    return part.owner, part.param.dtype


def _handout(parts: Sequence[ShardedParam]) -> ParamBroadcast:
    shards, owner = parts[0].shards, parts[0].owner
    assert owner is not None
    name = shards.names[parts[0].index]
    communicator = step_communicator(shards.group, parts[0].param.device)
    return ParamBroadcast([part.param for part in parts], communicator, owner, name=name)

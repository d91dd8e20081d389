"""Handing out the parameters of one optimizer after a step in which each was updated by its owner alone.

[Note: a window of two] Small parameters of one owner travel together, in a flat copy. The next bucket is on its way
while the last is copied out, and no more than these two take memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from ovpatch.overlap.handing_out import ParamHandout
from ovpatch.overlap.step_communicator import step_communicator
from ovpatch_plugins.dist_optimizer.counters import COUNTERS
from ovpatch_plugins.dist_optimizer.gathers import MIB, alike, by_size

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part


class Handouts:
    """What gives one optimizer's parameters to the ranks that do not own them.

    Args:
        bucket_mb: How many MiB of parameters go together.
    """

    def __init__(self, bucket_mb: float) -> None:
        self._capacity = bucket_mb * MIB
        self._of: tuple[tuple[int, int], ...] = ()
        self._buckets: list[ParamHandout] = []

    def launch(self, parts: Sequence[Part]) -> None:
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


def _kind(part: Part) -> Hashable:
    return part.owner, part.param.dtype


def _handout(parts: Sequence[Part]) -> ParamHandout:
    shards, owner = parts[0].shards, parts[0].owner
    assert owner is not None
    name = shards.names[parts[0].index]
    communicator = step_communicator(shards.group, parts[0].param.device)
    return ParamHandout([part.param for part in parts], communicator, owner, name=name)

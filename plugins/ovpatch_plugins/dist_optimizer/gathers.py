"""Gathering the parameters of one optimizer after its step.

[Note: in forward order] Parameters are gathered in buckets, in the order in which the model registered them, which is
mostly that in which forward uses them: the first layers can compute while the last are still on their way. A bucket is
waited for when the first of its parameters is read. A small model is cut, too, else there is nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ovpatch.hookspecs import cache_dir
from ovpatch.overlap.copies.attendance import attend
from ovpatch.overlap.copies.choosing import choose
from ovpatch.overlap.gathering import ParamGather, launch
from ovpatch.overlap.layout import layer_of
from ovpatch.overlap.step_communicator import step_communicator
from ovpatch_plugins.dist_optimizer.counters import COUNTERS

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ovpatch_plugins.dist_optimizer.parts import Part

MIB = 1024 * 1024

_FEWEST = 16  # buckets of a model, as far as they hold more than _SMALLEST bytes
_SMALLEST = MIB


class Gathers:
    """The gathers of one optimizer's parameters.

    Args:
        overlap: Wait for a bucket when it is read; otherwise at once.
        granularity: What a bucket holds: ``size``, ``layer`` or ``module``.
        bucket_mb: Capacity of a bucket in MiB, for ``size``; with overlap, at most a sixteenth of the model's size.
        copy_engines: Whether the GPUs' copy engines gather, and reduce what is gathered: ``on``, ``off`` or ``auto``.
    """

    def __init__(self, *, overlap: bool, granularity: str, bucket_mb: float, copy_engines: str) -> None:
        self._overlap, self._granularity, self._capacity = overlap, granularity, bucket_mb * MIB
        self._copy_engines = copy_engines
        self._of: tuple[tuple[int, int], ...] = ()
        self._buckets: list[ParamGather] = []
        self._places: Iterable[tuple[dist.ProcessGroup, torch.device]] = ()

    def launch(self, parts: Sequence[Part]) -> None:
        """Start to gather; all ranks do so for the same parameters."""
        which = tuple((id(part.shards), id(part.param)) for part in parts)
        if which != self._of:
            self._of, self._buckets = which, []
            self._places = dict.fromkeys((part.shards.group, part.param.device) for part in parts)
        if not self._buckets:
            self._buckets = [self._gather(bucket) for bucket in self._cut(parts)]
        nbytes = sum(part.param.nbytes for part in parts)  # now: while they are on their way, Python answers
        copied = self._places if self._copy_engines != "off" else ()
        for group, device in copied:
            choose(
                group,
                device,
                self._copy_engines,
                feature="dist_optimizer",
                directory=cache_dir(),
                communicator=step_communicator(group, device),
            )
        launch(self._buckets)
        for group, device in copied:
            attend(group, device, step_communicator(group, device))
        COUNTERS.bytes_gathered += nbytes
        COUNTERS.gathers += len(self._buckets)
        COUNTERS.gathers_copied += sum(gather.is_copied for gather in self._buckets)
        COUNTERS.gathers_overlapped += sum(gather.is_pending for gather in self._buckets) if self._overlap else 0
        if not self._overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for what is still on its way."""
        for gather in self._buckets:
            gather.settle()

    def _gather(self, parts: Sequence[Part]) -> ParamGather:
        shards = parts[0].shards
        name = shards.names[parts[0].index]
        communicator = step_communicator(shards.group, parts[0].param.device)
        return ParamGather([part.param for part in parts], shards.group, name=name, communicator=communicator)

    def _cut(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        for ones in alike(parts, self._kind):
            yield from by_size(ones, self._capacity_for(ones)) if self._granularity == "size" else [ones]

    def _capacity_for(self, parts: Sequence[Part]) -> float:
        sixteenth = sum(part.param.nbytes for part in parts) / _FEWEST
        return min(self._capacity, max(_SMALLEST, sixteenth)) if self._overlap else self._capacity

    def _kind(self, part: Part) -> tuple[Hashable, ...]:
        layer = layer_of(part.shards.names[part.index]) if self._granularity == "layer" else ""
        return layer, part.param.dtype


def alike(parts: Sequence[Part], kind: Callable[[Part], Hashable]) -> Iterable[list[Part]]:
    """Return the parameters of each model and kind, in registration order, each kind where the first of it stands."""
    ones: dict[Hashable, list[Part]] = {}
    models = list(dict.fromkeys(part.shards for part in parts))
    for part in sorted(parts, key=lambda part: (models.index(part.shards), part.index)):
        ones.setdefault((part.shards, kind(part)), []).append(part)
    return ones.values()


def by_size(parts: Iterable[Part], capacity: float) -> Iterator[list[Part]]:
    """Yield buckets of at most ``capacity`` bytes; a parameter that is larger is one by itself."""
    bucket: list[Part] = []
    size = 0
    for part in parts:
        if bucket and size + part.param.nbytes > capacity:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.param.nbytes
    if bucket:
        yield bucket

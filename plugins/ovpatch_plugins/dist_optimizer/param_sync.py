"""The protocol that makes parameters full after a sharded step, and their split into buckets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ovpatch_plugins.dist_optimizer.sharded_grads import sort_models
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


class ParamSync(Protocol):
    """The collectives that make the parameters of one optimizer full on all ranks after a step.

    A step calls :meth:`begin_update` before it changes shards, and then either :meth:`start` or, if
    peers will not take part, :meth:`keep_update`. The next step calls :meth:`finish` first. A step
    over other parameters than the last one calls :meth:`find_copy_places`.

    Attributes:
        copy_places: The groups and devices whose transport :meth:`choose_transport` chooses.
    """

    copy_places: tuple[tuple[dist.ProcessGroup, torch.device], ...]

    def find_copy_places(self, params: Sequence[ShardedParam]) -> None:
        """Set :attr:`copy_places` for the parameters of the next steps."""

    def choose_transport(self) -> None:
        """Choose how parameters are sent, together with all ranks, before this rank's update."""

    def begin_update(self, params: Sequence[ShardedParam]) -> None:
        """Prepare the update of this rank's shards; the same parameters are synchronized next."""

    def start(self, params: Sequence[ShardedParam]) -> None:
        """Start the collectives. All ranks call this for the same parameters."""

    def finish(self) -> None:
        """Wait for the collectives that are in flight."""

    def keep_update(self) -> None:
        """Keep the update of this rank's shards if :meth:`start` failed or was not called."""


def group_by_kind(
    params: Sequence[ShardedParam], kind: Callable[[ShardedParam], Hashable]
) -> Iterable[list[ShardedParam]]:
    """Return the parameters of each model and kind in registration order.

    The kinds of a model are in the order of their first parameters. The order of the optimizer's
    groups does not matter, because it may differ by rank, and ranks pair buckets by position.
    """
    # A dictionary keeps the order in which the kinds appear.
    groups: dict[Hashable, list[ShardedParam]] = {}
    # All ranks sort models in the same way, whatever their identity is here.
    models = sort_models(sharded.shards for sharded in params)
    in_order = sorted(params, key=lambda sharded: (models.index(sharded.shards), sharded.index))
    for sharded in in_order:
        groups.setdefault((sharded.shards, kind(sharded)), []).append(sharded)
    return groups.values()


def split_by_size(
    params: Iterable[ShardedParam], capacities: Iterator[float]
) -> Iterator[list[ShardedParam]]:
    """Yield the buckets of some parameters, in their order.

    Args:
        params: The parameters. A parameter that exceeds the capacity gets its own bucket.
        capacities: The capacity of each bucket in bytes.
    """
    bucket: list[ShardedParam] = []
    size = 0
    capacity = next(capacities)
    for sharded in params:
        # A bucket is never empty, so a parameter that exceeds the capacity gets one alone.
        if bucket and size + sharded.param.nbytes > capacity:
            yield bucket
            bucket = []
            size = 0
            capacity = next(capacities)
        bucket.append(sharded)
        size += sharded.param.nbytes
    if bucket:
        yield bucket

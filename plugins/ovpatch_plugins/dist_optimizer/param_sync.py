"""The protocol that makes parameters full after a sharded step, and their split into buckets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from ovpatch_plugins.dist_optimizer.sharded_grads import sort_models
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


class ParamSync(Protocol):
    """Makes parameters the same on all ranks after a step."""

    def begin_update(self, params: Sequence[ShardedParam]) -> None:
        """Called before this rank's shards of parameters are updated, which are synchronized next."""

    def keep_update(self) -> None:
        """Called instead of the start of the collectives, or after it has failed."""

    def start_param_sync(self, params: Sequence[ShardedParam]) -> None:
        """Start the collectives; all ranks do so for the same parameters."""

    def finish_param_sync(self) -> None:
        """Wait for what is in flight."""


def group_alike(
    params: Sequence[ShardedParam], kind: Callable[[ShardedParam], Hashable]
) -> Iterable[list[ShardedParam]]:
    """Return the parameters of each model and kind, in registration order, each kind where its first one stands.

    An optimizer may have its parameters in another order on other ranks.
    """
    found: dict[Hashable, list[ShardedParam]] = {}
    models = sort_models(one.shards for one in params)
    for one in sorted(params, key=lambda one: (models.index(one.shards), one.index)):
        found.setdefault((one.shards, kind(one)), []).append(one)
    return found.values()


def split_by_size(params: Iterable[ShardedParam], capacities: Iterator[float]) -> Iterator[list[ShardedParam]]:
    """Yield buckets of at most as many bytes as ``capacities`` say; a larger parameter is a bucket by itself."""
    bucket: list[ShardedParam] = []
    size, capacity = 0, next(capacities)
    for one in params:
        if bucket and size + one.param.nbytes > capacity:
            yield bucket
            bucket, size, capacity = [], 0, next(capacities)
        bucket.append(one)
        size += one.param.nbytes
    if bucket:
        yield bucket

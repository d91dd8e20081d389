"""The tags of votes: numbers that are the same on ranks that take the same next action."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Mapping

import torch.distributed as dist

from ovpatch_plugins.dist_optimizer.agreement import VOTE_MASK
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads, sort_models


def tag_votes(kind: str, subjects: Mapping[ShardedGrads, Hashable]) -> dict[ShardedGrads, int]:
    """Return the tag of each model's vote.

    The first vote of a group decides on all collectives until the last one, so each tag covers all
    models of the group.

    Args:
        kind: The name of the action that ranks are about to take.
        subjects: The parameters and other facts by model, as integers or tuples of these. The
            models are in the order of :func:`sort_models`.
    """
    # The hash of integers is the same in all processes, that of a string is not.
    names = {shards: zlib.crc32(f"{kind} {shards.identity}".encode()) for shards in subjects}
    digests: dict[dist.ProcessGroup, int] = {}
    for shards, subject in subjects.items():
        digests[shards.group] = hash((digests.get(shards.group, 0), names[shards], subject))
    return {
        shards: hash((digests[shards.group], name)) & VOTE_MASK for shards, name in names.items()
    }


def vote(kind: str, places: Iterable[tuple[ShardedGrads, int]]) -> None:
    """Have ranks agree on the next action on gradients; see :meth:`ShardedGrads.cast_vote`.

    Args:
        kind: The name of the action.
        places: The models and indices of the gradients.
    """
    indices: dict[ShardedGrads, list[int]] = {}
    for shards, index in places:
        indices.setdefault(shards, []).append(index)
    subjects = {shards: tuple(sorted(indices[shards])) for shards in sort_models(indices)}
    for shards, tag in tag_votes(kind, subjects).items():
        shards.cast_vote(tag)

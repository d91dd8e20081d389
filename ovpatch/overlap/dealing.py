"""Which rank owns which whole parameter.

[Note: largest first] Parameters are dealt out from the largest to the smallest, each to the rank that has the fewest
elements so far. So the ranks own about the same, unless one parameter alone is more than a rank's share. All ranks
come to the same result without a word, for they deal out the same parameters in the same order. What has been dealt out
stays where it is: its state is there. A model's optimizers are dealt to in turn from where the last left off, or one
optimizer per parameter would leave everything to rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ovpatch.overlap.grad_shards import GradShards

# How many elements of each model each rank owns.
_loads: weakref.WeakKeyDictionary[GradShards, list[int]] = weakref.WeakKeyDictionary()


def deal_out(shards: GradShards, indices: Iterable[int]) -> dict[int, int]:
    """Give each of some parameters an owner. All ranks call this for the same ones, in the same order of calls.

    Args:
        shards: Of the model that the parameters belong to.
        indices: The parameters' indices there.

    Returns:
        The group rank that owns it, by index.
    """
    loads = _loads.setdefault(shards, [0] * shards.group.size())
    numels = {index: shards.params[index].numel() for index in indices}
    owners = {}
    for index in sorted(numels, key=lambda index: (-numels[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += numels[index]
    return owners

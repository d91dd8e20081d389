"""Changes in place of gradients of which each rank keeps a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ovpatch.overlap.grad_shards import GradShards


@contextmanager
def changing(those: Sequence[tuple[GradShards, int]]) -> Iterator[None]:
    """Say that gradients by parts are changed in place while the block runs, on all ranks alike.

    Some ranks may have put a gradient together. The block changes the whole there, and the part follows: peers ask for
    it.
    """
    ones = list(dict.fromkeys(shards for shards, _ in those))
    for shards in ones:
        shards.editions.begin()
    try:
        yield
    finally:
        with torch.no_grad():
            for shards, index in those:
                if shards.has_grad(index) and not shards.is_pending(index):
                    shards.part_of(index).copy_(shards.current_part(index))
        for shards in ones:
            shards.editions.end()

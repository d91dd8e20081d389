"""The tiles of a product, and the number of programs that move rows, from measurements on two H200.

A program computes one tile at a time, so a product takes as many turns as the busiest program has tiles. Wide tiles
multiply faster; narrow ones leave fewer programs idle in the last turn. Where rows arrive meanwhile, there is one more
turn for the last of them.

Programs that fetch do not multiply. Their share is that of one multiprocessor's time for all fetches in its time for
fetches and products; more than 32 fetch no faster.

The tiles of a group of rows are computed one after the other, so that these rows are read once. With small groups
the first tiles of each owner come sooner, but weights are read once per group, which costs where the cache cannot hold
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    rows: int = 128  # of a tile
    columns: int = 256  # of a tile
    depth: int = 64  # of what is multiplied at a time
    warps: int = 8  # of a program
    stages: int = 3  # of the pipeline of loads
    group: int = 8  # blocks of rows whose tiles take turns
    split: bool = False  # whether tiles are stored in halves
    pullers: int = 16  # programs that fetch rows
    width: int = 256  # columns that are fetched at a time


WIDE: Final = Tiles()
NARROW: Final = Tiles(columns=128, stages=4)
_TURN: Final = {WIDE: 2.0, NARROW: 1.14}  # how long one lasts

_FETCHED: Final = 10.4e9  # bytes a second, by one multiprocessor
_MULTIPLIED: Final = 2.8e12  # pairs of numbers a second, by one multiprocessor
_FEWEST, _MOST, _STEP = 16, 32, 4  # programs that fetch

_CACHED: Final = 24 * 2**20  # bytes of weights that stay in the cache beside what streams through it


def gather_tiles(m: int, k: int, features: Sequence[int], itemsize: int, world: int, programs: int) -> Tiles:
    """Return how products of a rank's ``m`` gathered rows of ``k`` features are cut.

    ``features`` are those of each product's output, ``itemsize`` is in bytes, and ``programs`` run at a time.
    """
    fetching = (world - 1) * m * k * itemsize / _FETCHED
    multiplying = world * m * k * sum(features) / _MULTIPLIED
    share = programs * fetching / (fetching + multiplying)
    pullers = min(max(_STEP * math.ceil(share / _STEP), _FEWEST), _MOST)

    def duration(tiles: Tiles) -> float:
        count = world * -(-m // tiles.rows) * sum(-(-n // tiles.columns) for n in features)
        return (1 - -count // max(programs - pullers, 1)) * _TURN[tiles]

    return replace(min(_TURN, key=duration), pullers=pullers)


def scatter_tiles(n: int, k: int, itemsize: int) -> Tiles:
    """Return how products are cut whose tiles are stored to other ranks; ``k`` are the features of all inputs."""
    return replace(WIDE, group=4 if n * k * itemsize <= _CACHED else 8)

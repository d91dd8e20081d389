"""Which tiles a product is cut into, and how many programs move rows.

[Note: whole waves] All programs compute a tile each at a time, so that a product takes as many turns as the busiest one
has tiles, and a last turn with few of them costs as much as a full one. Wide tiles multiply faster, by a tenth for the
same area; narrow ones leave less idle in the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
        rows: Of a tile.
        columns: Of a tile.
        depth: Of what is multiplied at a time.
        warps: Of a program.
        stages: Of the pipeline of loads.
        group: Blocks of rows whose tiles take turns.
        split: Whether tiles are stored in halves.
        pushers: Programs that push rows to other ranks.
        width: Columns that are pushed at a time.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    split: bool = False
    pushers: int = 8
    width: int = 256


WIDE: Final = Tiles()
NARROW: Final = Tiles(columns=128, stages=4)
_TURN: Final = {WIDE: 2.0, NARROW: 1.1}  # how long one lasts, measured on an H200
_PUSHERS: Final = 14  # for more than one other rank


def tiles_of(rows: int, features: Sequence[int], world: int, programs: int) -> Tiles:
    """Return how products are cut.

    Args:
        rows: Of one rank.
        features: Of each product's output.
        world: Number of ranks, whose rows are multiplied.
        programs: How many compute at a time.
    """

    def duration(tiles: Tiles) -> float:
        count = world * -(-rows // tiles.rows) * sum(-(-n // tiles.columns) for n in features)
        return -(-count // programs) * _TURN[tiles]

    return min(_TURN, key=duration)


def tiles_beside_pushers(rows: int, features: Sequence[int], world: int, programs: int) -> Tiles:
    """Return how products are cut of which some of the programs push rows; arguments as of :func:`tiles_of`."""
    pushers = min(WIDE.pushers if world == 2 else _PUSHERS, programs - 1)
    return replace(tiles_of(rows, features, world, programs - pushers), pushers=pushers)

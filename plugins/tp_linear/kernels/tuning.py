"""Which tiles a product is cut into, and how many programs move rows."""

from __future__ import annotations

from dataclasses import dataclass


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


def tiles_of(m: int, n: int, k: int, world: int) -> Tiles:
    """Return how a product ``[world * m, k] x [k, n]`` is cut."""
    return Tiles()

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
        pullers: Programs that fetch rows.
        width: Columns that are fetched at a time.
        pull_stages: Of the pipeline by which they are fetched; 0 for plain loads.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    split: bool = False
    pullers: int = 16
    width: int = 256
    pull_stages: int = 0


_TILES = Tiles()


def tiles_of(m: int, n: int, k: int, world: int) -> Tiles:
    """Return how a product ``[world * m, k] x [k, n]`` is cut."""
    return _TILES

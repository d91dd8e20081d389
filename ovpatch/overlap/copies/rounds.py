"""How what is to be moved is cut, so that each round fits into a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

_KEPT: Final = 1024  # calls of a model's buckets, which are the same in every step


class Piece(NamedTuple):
    """A part of a tensor's part.

    Attributes:
        tensor: Which tensor.
        begin: First element.
        end: One past the last element.
        at: Where it lies in the slot.
    """

    tensor: int
    begin: int
    end: int
    at: int


@lru_cache(_KEPT)
def rounds(sizes: tuple[int, ...], room: int, grain: int = 1) -> Sequence[Sequence[Piece]]:
    """Return the pieces of each round.

    Args:
        sizes: Elements of each tensor that a rank contributes.
        room: Elements that a slot holds; a multiple of ``grain``.
        grain: Pieces begin at multiples of so many elements.
    """
    return tuple(map(tuple, _cut(sizes, room, grain)))


def _cut(sizes: Sequence[int], room: int, grain: int) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    at = 0
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if at == room:
                yield pieces
                pieces, at = [], 0
            end = min(size, begin + room - at)
            pieces.append(Piece(tensor, begin, end, at))
            at = min(-(-(at + end - begin) // grain) * grain, room)
            begin = end
    if pieces:
        yield pieces

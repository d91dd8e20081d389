"""Schedules: in which order products and collectives of a tensor-parallel linear are launched."""

from __future__ import annotations

from typing import Final

from ovpatch_plugins.tp_linear.schedules.bulk import Bulk
from ovpatch_plugins.tp_linear.schedules.chunk import Chunk
from ovpatch_plugins.tp_linear.schedules.ring import Ring
from ovpatch_plugins.tp_linear.schedules.stock import Schedule, Stock

SCHEDULES: Final[dict[str, Schedule]] = {
    schedule.name: schedule for schedule in (Stock(), Bulk(), Ring(), Chunk(1), Chunk(2), Chunk(4), Chunk(8))
}


def named(name: str, chunks: int) -> Schedule:
    """Return a schedule.

    Args:
        name: ``stock``, ``bulk``, ``ring`` or ``chunk``.
        chunks: Into how many parts ``chunk`` cuts rows.
    """
    made = SCHEDULES.get(key := Chunk.named(chunks) if name == "chunk" else name)
    if made is None:
        made = SCHEDULES[key] = Chunk(chunks)
    return made


__all__ = ["SCHEDULES", "Schedule", "named"]

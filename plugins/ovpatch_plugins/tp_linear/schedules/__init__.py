"""Schedules: in which order products and collectives of a tensor-parallel linear are launched."""

from __future__ import annotations

import functools
from typing import Final

from ovpatch_plugins.tp_linear.schedules.autotuned import Auto
from ovpatch_plugins.tp_linear.schedules.fused import Fused
from ovpatch_plugins.tp_linear.schedules.overlapped import Bulk, Chunk, Ring
from ovpatch_plugins.tp_linear.schedules.stock import Schedule
from ovpatch_plugins.tp_linear.tp_linear_options import FIXED, MEASURED

SCHEDULES: Final[dict[str, Schedule]] = {
    schedule.name: schedule for schedule in (Schedule(), Bulk(), Ring(), Fused(), *map(Chunk, (1, 2, 4, 8)))
}


def find_schedule(name: str, chunks: int, *, anew: bool = False) -> Schedule:
    """Return the schedule of one of the option's values; ``chunk`` cuts rows into that many parts.

    With ``anew`` inputs are gathered again for the weights' gradients, which ``auto`` measures then.
    """
    if name == "auto":
        return _auto(chunks, anew)
    made = SCHEDULES.get(f"chunk{chunks}" if name == "chunk" else name) or Chunk(chunks)
    return SCHEDULES.setdefault(made.name, made)


@functools.cache
def _auto(chunks: int, anew: bool) -> Auto:
    arms = {schedule.name: schedule for schedule in (find_schedule(name, chunks) for name in MEASURED)}
    return Auto(f"auto{chunks}", arms, FIXED, anew=anew)


__all__ = ["SCHEDULES", "Schedule", "find_schedule"]

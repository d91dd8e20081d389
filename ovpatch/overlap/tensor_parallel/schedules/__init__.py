"""Schedules: in which order GEMMs and collectives of a tensor-parallel linear are launched."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ovpatch.overlap.tensor_parallel.schedule_table import (
    DEFAULT_SCHEDULE,
    MEASURED_NAMES,
    SCHEDULES,
    get_schedule_info,
)
from ovpatch.overlap.tensor_parallel.schedules.stock import Schedule


def find_schedule(name: str, chunks: int, *, anew: bool = False) -> Schedule:
    """Return the schedule of a name in the table; ``chunk`` splits rows into that many parts.

    With ``anew`` inputs are gathered again for the weights' gradients, which ``auto`` measures then.
    """
    info = get_schedule_info(name)
    # Calls with the same arguments get the same object, because operators compare schedules by identity.
    if name == "auto":
        return _make_auto(info.implementation, chunks, anew)
    return _make_schedule(info.implementation, chunks if info.takes_chunks else None)


@functools.cache
def parse_schedule(text: str) -> Schedule:
    """Return the schedule whose ``name`` is a text, such as ``chunk4``; a graph keeps that text."""
    for info in SCHEDULES:
        chunks = text.removeprefix(info.name)
        if info.takes_chunks and chunks.isdecimal():
            return find_schedule(info.name, int(chunks), anew=True)
    return find_schedule(text, 1)


@functools.cache
def _make_schedule(implementation: str, chunks: int | None) -> Schedule:
    made: Schedule = _find_class(implementation)(*(() if chunks is None else (chunks,)))
    return made


@functools.cache
def _make_auto(implementation: str, chunks: int, anew: bool) -> Schedule:
    arms = {
        schedule.name: schedule
        for schedule in (find_schedule(name, chunks) for name in MEASURED_NAMES)
    }
    made: Schedule = _find_class(implementation)(f"auto{chunks}", arms, DEFAULT_SCHEDULE, anew=anew)
    return made


def _find_class(implementation: str) -> Any:
    module, _, name = implementation.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


__all__ = ["Schedule", "find_schedule", "parse_schedule"]

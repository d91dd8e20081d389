"""Races whose winner a test decides: see :mod:`ovpatch.overlap.choosing`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

from ovpatch.overlap.choosing import chooser

# Where nothing is kept, as on a machine whose homes are read-only.
NOWHERE = {"OVPATCH_CACHE_DIR": os.path.join(os.devnull, "none")}


@contextlib.contextmanager
def forced(first: int) -> Iterator[list[str]]:
    """Time no arm, but run each once, and let one after the other win.

    Args:
        first: Which arm wins the first race.

    Yields:
        The winners so far.
    """
    turns, won = itertools.count(first), []

    def measured(arms: dict[str, Any], *args: Any) -> dict[str, float]:
        for arm in arms.values():
            arm()
        won.append(list(arms)[next(turns) % len(arms)])
        return {name: 1.0 if name == won[-1] else 2.0 for name in arms}

    stock, chooser.measured = chooser.measured, measured
    chooser._choosers.clear()
    try:
        yield won
    finally:
        chooser.measured = stock
        chooser._choosers.clear()

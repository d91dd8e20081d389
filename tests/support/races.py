"""Races whose winner a test decides: see :mod:`ovpatch.overlap.kernels.autotuner`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

from ovpatch.overlap.comm.lifetimes import drop_values
from ovpatch.overlap.kernels import autotuner

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

    def measured(candidates: dict[str, Any], *args: Any) -> dict[str, float]:
        for candidate in candidates.values():
            candidate()
        won.append(list(candidates)[next(turns) % len(candidates)])
        return {name: 1.0 if name == won[-1] else 2.0 for name in candidates}

    stock, autotuner.measure_candidates = autotuner.measure_candidates, measured
    drop_values(autotuner.Autotuner)
    try:
        yield won
    finally:
        autotuner.measure_candidates = stock
        drop_values(autotuner.Autotuner)

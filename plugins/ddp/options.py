"""Options of the feature."""

from __future__ import annotations

import math
from typing import Final

from ovpatch.hookspecs import Option


def _capacity(text: str) -> float | None:
    if text.strip().lower() in ("", "none"):
        return None
    value = _number(text)
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError("expected a size in MiB, 0 or more, or none")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError("expected a time in seconds, more than 0")
    return value


def _number(text: str) -> float:
    """Return the number in ``text``, or one that no option accepts, so that its own message is shown."""
    try:
        return float(text)
    except ValueError:
        return math.nan


OPTIONS: Final = (
    Option(
        "overlap_grad_reduce",
        True,
        "Reduce gradient buckets while backward still computes; false: all of them after backward.",
        aliases=("overlap_grad_sync",),
    ),
    Option(
        "bucket_cap_mb",
        None,
        "Capacity of a gradient bucket in MiB where the script sets none; a value that the script sets is kept. "
        "none: 100 on CUDA, elsewhere DistributedDataParallel's own 25.",
        parse=_capacity,
    ),
    Option(
        "agreement_timeout_s",
        20.0,
        "How long ranks wait for each other's settings when a model is wrapped, in seconds.",
        parse=_seconds,
    ),
)

"""Counters and remarks of the feature in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ovpatch.hookspecs import FeatureCounters


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        blocks: Blocks that were attached to.
        calls: Forwards of these blocks whose activations were not kept.
        recomputations: Forwards that backward ran again.
        launched_ahead: Recomputations that were launched before a wait for a gradient.
        compiled_calls: Calls that a compiler traced; their graphs recompute by themselves.
        stock_calls: Calls that torch ran, because the script checkpoints them or has forward hooks inside.
    """

    blocks: int = 0
    calls: int = 0
    recomputations: int = 0
    launched_ahead: int = 0
    compiled_calls: int = 0
    stock_calls: int = 0


COUNTERS: Final = Counters()

_models: dict[str, None] = {}
# The number of blocks by the reason for their fallback.
_fallbacks: Counter[str] = Counter()
_notes: dict[str, None] = {}


def note_model(text: str) -> None:
    """Add a model and its recomputed blocks to the report."""
    _models[text] = None


def note_fallback(reason: str) -> None:
    """Add a block that fell back to torch to the report, with the reason."""
    _fallbacks[reason] += 1


def note(text: str) -> None:
    """Add a remark to the report, once."""
    _notes[text] = None


def write_remarks() -> Sequence[str]:
    """Return the blocks that are recomputed, and the blocks that fell back, with reasons."""
    fallbacks = [
        f"{count} blocks fall back to torch: {reason}" for reason, count in _fallbacks.items()
    ]
    return [*_models, *fallbacks, *_notes]


def drop_remarks() -> None:
    """Remove all remarks."""
    _models.clear()
    _fallbacks.clear()
    _notes.clear()

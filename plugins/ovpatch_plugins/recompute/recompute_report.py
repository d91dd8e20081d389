"""What the feature did in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ovpatch.hookspecs import FeatureCounters


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        blocks: Blocks taken over.
        calls: Their forwards whose activations were not kept.
        recomputations: Forwards that backward ran again.
        launched_ahead: Those of them that were launched before a wait for a gradient.
        compiled_calls: Calls that a compiler traced; their graphs recompute by themselves.
        stock_calls: Calls left alone, as the script checkpoints them itself, or has forward hooks inside.
    """

    blocks: int = 0
    calls: int = 0
    recomputations: int = 0
    launched_ahead: int = 0
    compiled_calls: int = 0
    stock_calls: int = 0


COUNTERS: Final = Counters()

_models: dict[str, None] = {}
_left: Counter[str] = Counter()
_notes: dict[str, None] = {}


def note_model(text: str) -> None:
    """Have the report say which blocks of a model were taken over."""
    _models[text] = None


def note_left(reason: str) -> None:
    """Have the report say why a block was left to stock."""
    _left[reason] += 1


def note(text: str) -> None:
    """Have the report say something once."""
    _notes[text] = None


def write_remarks() -> Sequence[str]:
    """Return which blocks are recomputed, which are not, and why."""
    left = [f"{count} blocks are left to stock: {reason}" for reason, count in _left.items()]
    return [*_models, *left, *_notes]


def drop_remarks() -> None:
    """Forget what was noted."""
    _models.clear()
    _left.clear()
    _notes.clear()

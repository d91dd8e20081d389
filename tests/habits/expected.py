"""The declared exceptions of the matrix. An exception that no cell needs fails the tests.

Unless an entry says otherwise a cell must show the bits of stock PyTorch, raise nothing, and each feature must work.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Expected:
    """A declared exception.

    Attributes:
        habits: The habits that need it.
        why: The reason.
        allow: The absolute difference that is allowed on two ranks and more.
        idle: The feature that has nothing to do.
        raises: Whether stock PyTorch raises.
    """

    habits: tuple[str, ...]
    why: str
    allow: float = 0.0
    idle: str = ""
    raises: bool = False


EXPECTED: Final = (Expected(("clip_norm",), "a norm is summed over shards, in another order", allow=1e-4),)


def find_expected(habits: Collection[str], features: Collection[str]) -> list[Expected]:
    """Return the declarations of a cell, with the smallest differences first."""
    found = [
        entry for entry in EXPECTED if set(entry.habits) & set(habits) and (not entry.idle or entry.idle in features)
    ]
    return sorted(found, key=lambda entry: entry.allow)

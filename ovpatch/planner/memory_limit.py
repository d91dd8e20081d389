"""The memory that microbatches may hold on a rank."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_AUTO: Final = "auto"
# The units of sizes, as powers of the base 1000 or 1024.
_UNITS: Final = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}


class MemoryLimit(NamedTuple):
    """The limit of the memory that a rank holds for microbatches between their F and their W.

    If both attributes are None, the feature finds the limit from the free memory.

    Attributes:
        times: The limit, in units of the memory that the fullest rank of 1F1B holds.
        size: The limit in bytes.
    """

    times: float | None = None
    size: int | None = None


def read_memory_limit(text: str) -> MemoryLimit:
    """Return the limit that a string means: ``auto``, ``1.5x``, ``40GiB`` or ``40GB``.

    Raises:
        ValueError: The string has none of these forms, or its number is 0.
    """
    if text.strip().lower() == _AUTO:
        return MemoryLimit()
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:(x)|([kmgt]?)(i?)b)", text.strip().lower())
    if found is None or not float(found[1]):
        raise ValueError("expected auto, a multiple such as 1.5x, or a size such as 40GiB")
    number, times, unit, binary = found.groups()
    if times:
        return MemoryLimit(times=float(number))
    base = 1024 if binary else 1000
    return MemoryLimit(size=int(float(number) * (base ** _UNITS[unit] if unit else 1)))


def parse_memory_limit(text: str) -> str:
    """Check the option's value and return it in one spelling.

    Raises:
        ValueError: :func:`read_memory_limit` cannot read it.
    """
    read_memory_limit(text)
    return "".join(text.split())

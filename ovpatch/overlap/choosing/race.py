"""What is chosen between, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

Arms = dict[str, Callable[[], object]]
"""Ways to compute the same, by name; each call is one computation, launched if not awaited."""

TIE: Final = 0.02
"""By how much, relatively, an arm must beat the baseline and the default: what is measured is no more precise."""


@dataclass(frozen=True)
class Race:
    """Ways to compute the same.

    Attributes:
        key: What is computed, in words: operator, shapes, dtype, direction. The same on all ranks.
        arms: Names of the ways. The first is the baseline, what would be computed without the feature.
        default: Which to take where nothing is measured, and where it is hardly slower than the fastest.
        make: Makes the arms, on data drawn from a generator.
        needs: Bytes of memory that they take, at most.
        usable: Tells whether an arm can be used at all, the same on all ranks, which all call it: it may have them ask
            each other.
    """

    key: str
    arms: tuple[str, ...]
    default: str
    make: Callable[[torch.Generator], Arms]
    needs: int = 0
    usable: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True)
class Choice:
    """What is taken, and why.

    Attributes:
        arm: Its name.
        why: How it came about, in words.
        times: What each arm takes, in ms: the median, of the slowest rank. Empty if nothing is known.
        final: Whether it holds for all later calls.
    """

    arm: str
    why: str
    times: Mapping[str, float] = field(default_factory=dict)
    final: bool = True

    def text(self, key: str) -> str:
        """Return a line for the report."""
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.times.items())
        return f"{key}: {self.arm} ({'; '.join(filter(None, (times, self.why)))})"


def fastest(times: Mapping[str, float], default: str) -> str:
    """Return the arm that takes the least time; of those that take hardly more, the default one, or the baseline.

    Where nothing beats the baseline, the default one is taken only if it is measured no slower.

    Args:
        times: Of each arm, in ms; the first is the baseline.
        default: What is taken where nothing is measured; need not have been measured.
    """
    baseline = next(iter(times))
    best = min(times, key=times.__getitem__)
    enough = times[best] / (1 - TIE)
    if times.get(default, math.inf) <= min(enough, times[baseline]):
        return default
    return best if times[baseline] > enough else baseline

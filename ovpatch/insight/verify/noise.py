"""What stock differs from itself in values that are a single number, such as losses and norms.

[Note: one number is one draw] The largest difference of a tensor tells what noise there is in it. Of a single number
there is one difference, which is now and then much smaller than usual. So its noise is taken over all processes, and
over the steps so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from ovpatch.insight.verify.records import Event, Run
from ovpatch.insight.verify.values import Kept

_Key = tuple[Hashable, str]  # which event, and the number's name


class Noise:
    """The noise of single numbers by their names; see [Note: one number is one draw].

    Args:
        stock: What stock recorded.
        others: What further stock runs recorded, as long as they recorded the same events.
    """

    def __init__(self, stock: Run, others: Iterable[Run]) -> None:
        found: dict[_Key, dict[int, float]] = {}
        for other in others:
            for process in stock.processes:
                for ours, theirs in zip(stock.events(process), other.events(process), strict=False):
                    if ours.signature != theirs.signature:
                        break
                    for name, value in ours.values.items():
                        difference = _difference(value, theirs.values.get(name))
                        if difference:
                            steps = found.setdefault((ours.signature, name), {})
                            steps[ours.step] = max(difference, steps.get(ours.step, 0.0))
        self._found = found

    def of(self, event: Event, name: str) -> float:
        """Return how far stock was from itself in a number of such an event, in its step or before; 0 if it was not."""
        found = self._found.get((event.signature, name), {})
        return max((noise for at, noise in found.items() if at <= event.step), default=0.0)


def _difference(one: Kept, other: Kept | None) -> float:
    """Return how far apart two single numbers are; 0 of what is none, or is not finite."""
    if other is None or one[:2] == other[:2] or one.form != other.form or one.values is None or one.folded:
        return 0.0
    first, second = torch.as_tensor(one.values), torch.as_tensor(other.values)
    if first.numel() != 1:
        return 0.0
    difference = float((first.to(torch.complex128) - second.to(torch.complex128)).abs())
    return difference if difference < float("inf") else 0.0

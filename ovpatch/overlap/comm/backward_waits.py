"""What may be launched under a communication that a backward waits for.

Features that communicate in backward call these slots between the start of a transfer and its wait; a feature that has
work which needs nothing of that transfer fills them. An empty slot costs the test for None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass
class BackwardWaits:
    """The slots. Ranks call them in one order, as the work may communicate itself.

    Attributes:
        launch_inside: Called inside a backward, before it waits for a collective.
        launch_before: Called with the autograd nodes of a graph's outputs, before their gradients are waited for.
    """

    launch_inside: Callable[[], None] | None = None
    launch_before: Callable[[Sequence[Any]], None] | None = None


BACKWARD_WAITS: Final = BackwardWaits()

"""Slots for work that a backward launches before it waits for communication.

Two kinds of features meet here, without importing each other:

1. A feature with work that needs no transfer, such as ``recompute``, fills the slots when it is applied, and empties
   them when it is reverted.
2. A feature that communicates in backward, such as ``tp_linear`` or ``pipeline``, starts its transfer, calls the slot,
   and only then waits. An empty slot costs one test for None.

All ranks call the slots in one order, because the work may communicate as well: before the wait for a collective of a
backward (``launch_inside``), or before a backward that waits for the gradients of its outputs (``launch_before``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass
class BackwardWaits:
    """The slots of this process.

    Attributes:
        launch_inside: Called inside a backward, before it waits for a collective. Default: None.
        launch_before: Called with the autograd nodes of a graph's outputs, before the backward waits for their
            gradients. Default: None.
    """

    launch_inside: Callable[[], None] | None = None
    launch_before: Callable[[Sequence[Any]], None] | None = None

    def fill(
        self, launch_inside: Callable[[], None], launch_before: Callable[[Sequence[Any]], None]
    ) -> None:
        """Have backwards launch this work before they wait."""
        self.launch_inside = launch_inside
        self.launch_before = launch_before

    def clear(self) -> None:
        """Have backwards wait at once."""
        self.launch_inside = None
        self.launch_before = None


BACKWARD_WAITS: Final = BackwardWaits()

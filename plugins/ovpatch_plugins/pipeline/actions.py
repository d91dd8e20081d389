"""What a rank of a pipeline does, one action after the other.

An order is a list of actions of one rank. Orders hold computations alone; the engine and the simulator derive from
them what a rank sends and receives, so an order can never name a transfer that its neighbour does not expect.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Kind(enum.Enum):
    """The computations of one microbatch on one stage, by the letters of the zero-bubble paper.

    ``F`` is the forward, ``B`` the gradient of the stage's input alone, ``W`` the gradients of its weights that ``B``
    left for later, and ``BW`` a full backward; torch calls the latter ``B``, and ``B`` ``I``.
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


class Action(NamedTuple):
    """One computation.

    Attributes:
        kind: What is computed.
        stage: Index of the stage in the whole pipeline.
        microbatch: Index of the microbatch in the step.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order: TypeAlias = Sequence[Action]
"""The actions of one rank, in the order in which it runs them."""

Schedule: TypeAlias = Sequence[Order]
"""The orders of all ranks of a pipeline, by rank."""

"""What an operator is told beside tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ovpatch_plugins.tp_linear.options import DEFAULT
from ovpatch_plugins.tp_linear.schedules import Schedule, named
from ovpatch_plugins.tp_linear.tp_group import TPGroup


@dataclass(frozen=True)
class TPConfig:
    """How an operator is computed.

    Attributes:
        schedule: In which order.
        fuse: Add weights' gradients to what is there already, where nobody would notice.
        regather: Keep this rank's part of an input for backward, and gather it anew; else it is kept gathered.
    """

    schedule: Schedule
    fuse: bool = False
    regather: bool = False


@dataclass(frozen=True, slots=True)
class OpContext:
    """What an operator is told beside tensors; the same for all calls of a linear that are alike.

    Attributes:
        how: How to compute.
        wires: The ranks.
        dim: Which dimension of the input is the sequence, or comes first in rows.
        count: How many weights.
        constant: Whether the input needs no gradient; it is kept gathered then in any case.
        mesh: Of DTensors that are given or returned.
        given: How the gradient of an input is laid out that is a DTensor; None if it is none.
        returned: How outputs are laid out that are to be DTensors; None if they are to be none.
        whole: How the gathered input is laid out, if it is to be returned as well: a DTensor that all ranks have.
        check: Called before backward.
        later: Outputs are computed later: called with the gathered rows, and with the places of the outputs.
        trains: Whether any weight needs a gradient, also if none does that this very call knows of.
    """

    how: TPConfig
    wires: TPGroup
    dim: int = 0
    count: int = 1
    constant: bool = False
    mesh: Any = None
    given: Any = None
    returned: Any = None
    whole: Any = None
    check: Callable[[], None] | None = None
    later: Callable[[Tensor, list[Tensor]], None] | None = None
    trains: bool = False

    @property
    def anew(self) -> bool:
        """Whether the input has to be gathered anew for the weights' gradients."""
        return self.how.regather and not self.constant

    @property
    def partial(self) -> bool:
        """Whether the gradient of an input that all ranks have is this rank's term of a sum."""
        return self.given is not None and self.given.is_partial()


# Whether the feature is on in this process, and how it computes.


@dataclass
class State:
    """What taken-over modules look up at every call.

    Attributes:
        on: Off, they do what stock does; copies of them, of which nobody knows, included.
        how: How operators are computed.
        shares: Whether gathers for several linears are taken over.
        compiles: Whether compiled graphs get our operators.
        terms: All options, which must be the same on all ranks.
    """

    on: bool = False
    how: TPConfig = field(default_factory=lambda: TPConfig(named(DEFAULT, 4)))
    shares: bool = True
    compiles: bool = False
    terms: dict[str, Any] = field(default_factory=dict)

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Compute as the feature's options say."""
        schedule = named(options["schedule"], options["chunks"], anew=options["regather"])
        self.how = TPConfig(schedule, options["gradient_accumulation_fusion"], options["regather"])
        self.terms = dict(options)
        self.shares, self.compiles, self.on = options["shared_gather"], options["compiled"], True


STATE = State()

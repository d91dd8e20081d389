"""The non-tensor arguments of an operator, and the feature's settings in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ovpatch_plugins.tp_linear.operators import GATHER_LINEAR, LocalLinear
from ovpatch_plugins.tp_linear.options import DEFAULT
from ovpatch_plugins.tp_linear.schedules import Schedule, find_schedule
from ovpatch_plugins.tp_linear.tp_group import TPGroup


@dataclass(frozen=True)
class TPConfig:
    """How an operator is computed.

    Attributes:
        schedule: The order of products and collectives.
        fuse: Add a weight's gradient to the one that is already there, where no hook would miss it.
        regather: Keep this rank's part of an input for backward, and gather it anew; else it is kept gathered.
    """

    schedule: Schedule
    fuse: bool = False
    regather: bool = False


@dataclass(frozen=True, slots=True)
class OpContext:
    """The non-tensor arguments of an operator; a linear's calls with inputs of one layout share them.

    Attributes:
        config: How it is computed.
        ranks: The ranks.
        operator: The operator.
        dim: The input dimension that comes first in rows: the sequence, if that is cut.
        count: The number of weights.
        constant: Whether the input needs no gradient; it is kept gathered then.
        mesh: The mesh of DTensors that are given or returned.
        given: The placement of the input's gradient if the input is a DTensor, else None.
        returned: The placement of the outputs if they are DTensors, else None.
        whole: The placement of the gathered input if it is returned as well, as a DTensor, else None.
        check: Called before backward.
        later: Called with the gathered rows and the outputs' memory if the outputs are computed later, else None.
        trains: Whether any linear that reads the gathered input has a weight to train, also one outside this call.
    """

    config: TPConfig
    ranks: TPGroup
    operator: LocalLinear = GATHER_LINEAR
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
        return self.config.regather and not self.constant


@dataclass
class State:
    """Settings that modules look up at every call.

    Attributes:
        on: Whether the feature is on; if not, modules and their copies compute as stock.
        config: How operators are computed.
        shares: Whether one gather for several linears is computed with their products.
        compiles: Whether compiled graphs contain the feature's operators.
        terms: All options, which must be the same on all ranks.
    """

    on: bool = False
    config: TPConfig = field(default_factory=lambda: TPConfig(find_schedule(DEFAULT, 4)))
    shares: bool = True
    compiles: bool = False
    terms: dict[str, Any] = field(default_factory=dict)

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Set everything by the feature's options."""
        schedule = find_schedule(options["schedule"], options["chunks"], anew=options["regather"])
        self.config = TPConfig(schedule, options["gradient_accumulation_fusion"], options["regather"])
        self.terms = dict(options)
        self.shares, self.compiles, self.on = options["shared_gather"], options["compiled"], True


STATE = State()

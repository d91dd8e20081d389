"""The non-tensor arguments of an operator, and the feature's settings in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ovpatch_plugins.tp_linear.operators import (
    GATHER_LINEAR,
    LocalLinear,
    WeightGrad,
    accumulate_weight_grad,
    multiply_weight_grad,
)
from ovpatch_plugins.tp_linear.options import DEFAULT
from ovpatch_plugins.tp_linear.schedules import Schedule, find_schedule
from ovpatch_plugins.tp_linear.tp_group import TPGroup


@dataclass(frozen=True)
class TPConfig:
    """How an operator is computed."""

    schedule: Schedule  # the order of products and collectives
    weight_grad: WeightGrad = multiply_weight_grad  # how a weight's gradient is computed
    regather: bool = False  # gather an input anew for backward; else it is kept gathered


@dataclass(frozen=True, slots=True)
class OpContext:
    """The non-tensor arguments of an operator; a linear's calls with inputs of one layout share them."""

    config: TPConfig  # how it is computed
    ranks: TPGroup
    operator: LocalLinear = GATHER_LINEAR
    dim: int = 0  # the input dimension that comes first in rows: the sequence, if that is cut
    count: int = 1  # the number of weights
    constant: bool = False  # whether the input needs no gradient; it is kept gathered then
    mesh: Any = None  # the mesh of DTensors that are given or returned
    given: Any = None  # the placement of the input's gradient if the input is a DTensor, else None
    returned: Any = None  # the placement of the outputs if they are DTensors, else None
    whole: Any = None  # the placement of the gathered input if it is returned as well, as a DTensor, else None
    check: Callable[[], None] | None = None  # called before backward
    later: list[tuple[Tensor, Sequence[Tensor]]] | None = None  # gets rows and outputs' memory, if these come later
    trains: bool = False  # whether any linear that reads the gathered input, in this call or not, has a weight to train


@dataclass
class State:
    """Settings that modules look up at every call."""

    on: bool = False  # whether the feature is on; if not, modules and their copies compute as stock
    config: TPConfig = field(default_factory=lambda: TPConfig(find_schedule(DEFAULT, 4)))  # how operators are computed
    shares: bool = True  # whether one gather for several linears is computed with their products
    compiles: bool = False  # whether compiled graphs contain the feature's operators
    terms: dict[str, Any] = field(default_factory=dict)  # all options, which must be the same on all ranks

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Set everything by the feature's options."""
        schedule = find_schedule(options["schedule"], options["chunks"], anew=options["regather"])
        fuse = options["gradient_accumulation_fusion"]
        self.config = TPConfig(schedule, accumulate_weight_grad if fuse else multiply_weight_grad, options["regather"])
        self.terms = dict(options)
        self.shares, self.compiles, self.on = options["shared_gather"], options["compiled"], True


STATE = State()

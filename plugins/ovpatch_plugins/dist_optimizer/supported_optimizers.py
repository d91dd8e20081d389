"""Which optimizers can update shards of parameters, or whole parameters on one rank each.

An element-wise optimizer computes each element's update from that element's gradient and state alone, so it can be
given any shard of a parameter. Others need a whole parameter but no other one, so one rank can update it for all.
Whether a class does so cannot be seen from outside: those of torch are known, and the user may name others. A subclass
with a ``step`` of its own may do anything there.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim import Optimizer

ELEMENT_WISE: Final[tuple[type[Optimizer], ...]] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

# Not in every version of torch. The names and tensors of a parameter's state do not change after its first step.
PER_PARAMETER: Final[tuple[type[Optimizer], ...]] = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)


class Kind(enum.Enum):
    """How an optimizer's work is divided among ranks.

    Attributes:
        SLICES: Each rank updates a shard of every parameter; torch's classes.
        SLICES_NAMED: The same, for a class that the user has named.
        WHOLE: Each rank updates some whole parameters; torch's classes.
        WHOLE_NAMED: The same, for a class that the user has named.
    """

    SLICES = enum.auto()
    SLICES_NAMED = enum.auto()
    WHOLE = enum.auto()
    WHOLE_NAMED = enum.auto()


@dataclass(frozen=True)
class Named:
    """Classes that the user has named, as ``module.Class``.

    Attributes:
        element_wise: They may be given shards.
        per_parameter: They need whole parameters, but each by itself.
    """

    element_wise: Sequence[str] = ()
    per_parameter: Sequence[str] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Named:
        """Read the feature's options."""
        return cls(_names(options["element_wise"]), _names(options["per_parameter"]))


def with_a_step(named: Named) -> list[str]:
    """Return the names of the known classes that define ``step``; the others inherit it."""
    known = [cls for cls in (*ELEMENT_WISE, *PER_PARAMETER) if "step" in vars(cls)]
    return list(dict.fromkeys([*map(name_of, known), *named.element_wise, *named.per_parameter]))


def kind_of(cls: type[Optimizer], named: Named) -> Kind | None:
    """Return how the work of a class of optimizers can be divided, None if that is not known."""
    for base in cls.__mro__:
        if name_of(base) in named.per_parameter:
            return Kind.WHOLE_NAMED
        if name_of(base) in named.element_wise:
            return Kind.SLICES_NAMED
        if base in ELEMENT_WISE:
            return Kind.SLICES
        if base in PER_PARAMETER:
            return Kind.WHOLE
        if {"step", "_init_group"} & set(vars(base)):
            return None
    return None


def unsupported_reason(optimizer: Optimizer, named: Named) -> str:
    """Return why an optimizer stays stock, or "".

    Args:
        optimizer: The optimizer.
        named: Further classes.
    """
    cls = type(optimizer)
    if kind_of(cls, named) is None:
        return (
            f"{name_of(cls)} is not known to be element-wise, nor to update each parameter by itself; if it is, name "
            "it in OVPATCH_DIST_OPTIMIZER_ELEMENT_WISE, if it does, in OVPATCH_DIST_OPTIMIZER_PER_PARAMETER"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True differentiates through the update"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "capturable=True: it may step inside a CUDA graph, whose replays no host sees"
    return ""


def name_of(cls: type) -> str:
    """Return a class's module and name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer inside of a ``ZeroRedundancyOptimizer``, which is known to differ by rank."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim  # type: ignore[no-any-return]
    return None

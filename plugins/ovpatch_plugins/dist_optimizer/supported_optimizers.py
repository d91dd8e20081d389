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
    """How an optimizer's work is divided: by shards of every parameter, or by whole parameters.

    The ``NAMED`` ones are of classes that the user has named.
    """

    ELEMENT_WISE = enum.auto()
    ELEMENT_WISE_NAMED = enum.auto()
    PER_PARAMETER = enum.auto()
    PER_PARAMETER_NAMED = enum.auto()


@dataclass(frozen=True)
class NamedClasses:
    """Classes that the user has named, as ``module.Class``."""

    element_wise: Sequence[str] = ()
    per_parameter: Sequence[str] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> NamedClasses:
        """Read the feature's options."""
        texts = (options["element_wise"], options["per_parameter"])
        return cls(*([name.strip() for name in text.split(",") if name.strip()] for text in texts))


def list_step_classes(named: NamedClasses) -> list[str]:
    """Return the names of the known classes that define ``step``; the others inherit it."""
    known = [cls for cls in (*ELEMENT_WISE, *PER_PARAMETER) if "step" in vars(cls)]
    return list(dict.fromkeys([*map(_full_name, known), *named.element_wise, *named.per_parameter]))


def find_kind(cls: type[Optimizer], named: NamedClasses) -> Kind | None:
    """Return how the work of a class of optimizers can be divided, None if that is not known."""
    for base in cls.__mro__:
        if _full_name(base) in named.per_parameter:
            return Kind.PER_PARAMETER_NAMED
        if _full_name(base) in named.element_wise:
            return Kind.ELEMENT_WISE_NAMED
        if base in ELEMENT_WISE:
            return Kind.ELEMENT_WISE
        if base in PER_PARAMETER:
            return Kind.PER_PARAMETER
        if {"step", "_init_group"} & set(vars(base)):
            return None
    return None


def unsupported_reason(optimizer: Optimizer, named: NamedClasses) -> str:
    """Return why an optimizer stays stock, or ""."""
    cls = type(optimizer)
    if find_kind(cls, named) is None:
        return (
            f"{_full_name(cls)} is not known to be element-wise, nor to update each parameter by itself. If it is "
            "element-wise, name it in OVPATCH_DIST_OPTIMIZER_ELEMENT_WISE; if it updates each parameter by itself, "
            "in OVPATCH_DIST_OPTIMIZER_PER_PARAMETER"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True differentiates through the update"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "capturable=True: it may step inside a CUDA graph, whose replays no host sees"
    return ""


def find_inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer inside of a ``ZeroRedundancyOptimizer``, which is known to differ by rank."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim  # type: ignore[no-any-return]
    return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

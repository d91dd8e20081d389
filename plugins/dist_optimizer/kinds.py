"""Which optimizers can update a parameter by parts.

[Note: only what is known] An element-wise optimizer computes each element's update from that element's gradient and
state alone, so it can be given any slice of a parameter. Whether a class does so cannot be seen from outside; those of
torch are known, and the user may name others. A subclass that has a ``step`` of its own may do anything there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

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


def classes_with_a_step() -> list[type[Optimizer]]:
    """Return the classes whose ``step`` the others inherit."""
    return [cls for cls in ELEMENT_WISE if "step" in vars(cls)]


def objection(optimizer: Optimizer, named: Collection[str] = ()) -> str:
    """Return why an optimizer stays stock, or "".

    Args:
        optimizer: The optimizer.
        named: Further element-wise classes, as ``module.Class``.
    """
    cls = type(optimizer)
    if not _is_element_wise(cls, named):
        return (
            f"{cls.__module__}.{cls.__qualname__} is not known to be element-wise; if it is, name it in "
            "OVPATCH_DIST_OPTIMIZER_ELEMENT_WISE"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True differentiates through the update"
    return ""


def _is_element_wise(cls: type[Optimizer], named: Collection[str]) -> bool:
    for base in cls.__mro__:
        if base in ELEMENT_WISE or f"{base.__module__}.{base.__qualname__}" in named:
            return True
        if {"step", "_init_group"} & set(vars(base)):
            return False
    return False

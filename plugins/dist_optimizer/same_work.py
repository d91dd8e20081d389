"""Whether all ranks have the same work to divide.

[Note: the same everywhere] An optimizer may have other parameters on other ranks: ZeroRedundancyOptimizer has such a
one inside, and so have scripts that share the work out by hand. What one rank alone updates cannot be gathered from
all. So ranks compare, through the store, before an optimizer's first step by parts; where they differ, it stays stock.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch.distributed as dist
from torch.optim import Optimizer

from ovpatch.overlap import grad_shards
from ovpatch.overlap.agreement import DisagreementError, agree

#: How long a rank waits for the others, in seconds; one may save a checkpoint first.
PATIENCE_S = 60.0

_REMEDY: Final = (
    "If the script shares the work out itself, as ZeroRedundancyOptimizer does, nothing is wrong; otherwise make the "
    "same optimizers, and step them in the same order, on every rank."
)


def objection(optimizer: Optimizer) -> str:
    """Return why the ranks cannot divide an optimizer's work, the same on all of them; "" if they can.

    Every rank calls it at the optimizer's first step.
    """
    names: dict[dist.ProcessGroup, list[str]] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        entry = grad_shards.find(param)
        if entry is not None:
            shards, index = entry
            names.setdefault(shards.group, []).append(f"{shards.identity}: {shards.names[index]}")
    for group, ones in names.items():
        digest = hashlib.sha256("\n".join(ones).encode()).hexdigest()[:12]
        terms = {
            "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "parameters": f"{len(ones)} from {ones[0]} to {ones[-1]} (digest {digest})",
        }
        try:
            agree(group, "dist_optimizer", terms, timeout_s=PATIENCE_S, remedy=_REMEDY)
        except DisagreementError as error:
            return str(error)
    return ""

"""Whether the ranks of a group compute in the same way; see :mod:`ovpatch.overlap.comm.consensus`.

Ranks agree when ``parallelize_module`` first cuts a linear over a group, where stock, too, needs them all. Models
that were made parallel before ``ovpatch.apply()`` have their ranks agree in their first forward.
"""

from __future__ import annotations

import importlib.metadata
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ovpatch.overlap.comm.consensus import check_consistent, patience
from ovpatch_plugins.tp_linear.config import STATE

PATIENCE_S = 300.0  # ranks may load or make their models at different speeds

_REMEDY = (
    "Either ovpatch is not active there, or that rank does not build the same model. Call ovpatch.apply() with the "
    "same arguments on every rank before parallelize_module, and give every rank the same OVPATCH variables; "
    "OVPATCH_TP_LINEAR=0 on all ranks leaves linears to stock."
)

_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_era = 0
_world: dist.ProcessGroup | None = None  # the default group of that era


def ensure(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have the ranks agree on how linears compute, once for each group.

    Args:
        group: Over which linears are cut.
        device: Where they are.

    Raises:
        DisagreementError: They differ, or a rank did not answer in time.
    """
    if group in _groups:
        return
    terms = {"version of ovpatch": importlib.metadata.version("ovpatch"), **STATE.terms}
    check_consistent(group, "tp_linear", terms, timeout_s=patience(group, device, PATIENCE_S), remedy=_REMEDY)
    _groups.add(group)


def era() -> int:
    """Return a number that changes when ranks have to agree anew, or process groups have."""
    global _world
    if distributed_c10d.GroupMember.WORLD is not _world:
        _world = distributed_c10d.GroupMember.WORLD
        forget()
    return _era


def forget() -> None:
    """Let ranks agree anew: settings may change."""
    global _era
    _era += 1
    _groups.clear()

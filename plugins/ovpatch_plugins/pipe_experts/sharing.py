"""Which groups have a lane over symmetric memory."""

from __future__ import annotations

import dataclasses
import weakref

import torch
import torch.distributed as dist

from ovpatch.overlap.symm_mem import memory, support
from ovpatch_plugins.pipe_experts.how import How
from ovpatch_plugins.pipe_experts.symmetric import Symmetric

_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Symmetric | None]] = weakref.WeakKeyDictionary()
_objections: dict[str, None] = {}  # they outlive groups, for the report


def lane_of(group: dist.ProcessGroup, device: torch.device) -> Symmetric | None:
    """Return the lane of a group; None if it can have none, which is the same on all ranks.

    A collective when it is first called for a group and device; no memory is taken after that.

    Args:
        group: The ranks.
        device: Where this rank's tensors are.
    """
    known = _lanes.setdefault(group, {})
    if device not in known:
        known[device] = _made(group, device)
    return known[device]


def _made(group: dist.ProcessGroup, device: torch.device) -> Symmetric | None:
    problem = support.objection(group, device)
    if not problem:
        try:
            return Symmetric(group, device)
        except memory.LackingError as error:
            problem = str(error)
    _objections[problem] = None
    return None


def possible(how: How, group: dist.ProcessGroup, device: torch.device) -> How:
    """Return how can be computed what is to be computed so: with c10d's all-to-alls where there is no other lane."""
    if how.exchange == "c10d":
        return how
    is_asked = group.size() > 1 and (how.exchange == "symmetric" or how.cut == "auto")  # else nothing is measured
    return how if is_asked and lane_of(group, device) is not None else dataclasses.replace(how, exchange="c10d")


def objections() -> list[str]:
    """Return why groups that were to have a lane do without."""
    return list(_objections)

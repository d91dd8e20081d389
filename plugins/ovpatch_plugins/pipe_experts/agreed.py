"""Whether the ranks of a group compute a layer in the same parts; see :mod:`ovpatch.overlap.comm.consensus`.

They agree in the first call of a layer, where stock, too, needs them all.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from dataclasses import asdict

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import check_consistent, patience
from ovpatch_plugins.pipe_experts.config import MoEConfig

PATIENCE_S = 300.0  # ranks may load or make their models at different speeds

_REMEDY = (
    "Give every rank and every token the same number of experts, every rank the same OVPATCH variables and the same "
    "`how`, and call ovpatch.apply() with the same arguments everywhere; OVPATCH_PIPE_EXPERTS=0 on all ranks leaves "
    "layers to stock."
)

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[MoEConfig, int, int]]] = weakref.WeakKeyDictionary()


def ensure(group: dist.ProcessGroup, device: torch.device, how: MoEConfig, local: int, top_k: int) -> None:
    """Have the ranks agree on how layers with so many experts are computed, once.

    Args:
        group: The ranks.
        device: Where tokens are.
        how: How this rank computes.
        local: How many experts it has.
        top_k: How many experts a token has.

    Raises:
        DisagreementError: They differ, or a rank did not answer in time.
    """
    known = _agreed.setdefault(group, set())
    if (how, local, top_k) in known:
        return
    version = importlib.metadata.version("ovpatch")
    terms = {"version of ovpatch": version, "experts of a rank": local, "experts of a token": top_k, **asdict(how)}
    check_consistent(group, "pipe_experts", terms, timeout_s=patience(group, device, PATIENCE_S), remedy=_REMEDY)
    known.add((how, local, top_k))

"""Whether all ranks have the same work to divide.

[Note: the same everywhere] An optimizer may have other parameters on other ranks: ZeroRedundancyOptimizer has such a
one inside, and so have scripts that share the work out by hand. What one rank alone updates cannot be gathered from
all. So ranks compare, through the store, before an optimizer's first step; where they differ, it stays stock.

[Note: twice] An optimizer may have parameters in several process groups. If it stays stock for what was found in one,
the others' ranks must know: a second round tells them.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist
from torch.optim import Optimizer

from ovpatch.overlap import grad_shards
from ovpatch.overlap.agreement import DisagreementError, agree, patience
from ovpatch.overlap.grad_shards import GradShards
from ovpatch_plugins.dist_optimizer.kinds import name_of

#: How long a rank waits for the others at most, in seconds; one may save a checkpoint first.
PATIENCE_S = 300.0

#: After how long it says for what it waits, in seconds.
SILENCE_S = 5.0

_log = logging.getLogger("ovpatch.dist_optimizer")

_REMEDY: Final = (
    "If the script shares the work out itself, as ZeroRedundancyOptimizer does, nothing is wrong; otherwise make the "
    "same optimizers, and step them in the same order, on every rank."
)


def objection(optimizer: Optimizer) -> str:
    """Return why the ranks cannot divide an optimizer's work; "" if they can, then on all ranks of its groups.

    Every rank calls it at the optimizer's first step, also one that has nothing to divide.
    """
    found = [grad_shards.find(param) for group in optimizer.param_groups for param in group["params"]]
    entries = [entry for entry in found if entry is not None]
    reasons: dict[dist.ProcessGroup, str] = {}
    waits = {shards.group: patience(shards.group, shards.params[0].device, PATIENCE_S) for shards, _ in entries}
    for group in waits:
        ones = [entry for entry in entries if entry[0].group is group]
        with _not_in_silence(optimizer, waits[group]):
            reasons[group] = _ask(group, _terms(optimizer, ones), waits[group])
    reason = next(filter(None, reasons.values()), "")
    for group in [group for group, failed in reasons.items() if not failed]:
        reason = _ask(group, {"round": 2}, waits[group], objection=reason) or reason
    return reason


def recognised(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer inside of a ``ZeroRedundancyOptimizer``, which needs no comparison."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim  # type: ignore[no-any-return]
    return None


def _terms(optimizer: Optimizer, entries: Sequence[tuple[GradShards, int]]) -> dict[str, str]:
    names = sorted(f"{shards.identity}: {shards.names[index]}" for shards, index in entries)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    return {
        "class": name_of(type(optimizer)),
        "parameters": f"{len(names)} from {names[0]} to {names[-1]} (digest {digest})",
    }


@contextmanager
def _not_in_silence(optimizer: Optimizer, patience: float) -> Iterator[None]:
    """Warn if the other ranks are long in coming: perhaps they go on with an older optimizer, and never come."""
    text = (
        f"{type(optimizer).__name__} has not stepped before, and waits for the other ranks to step theirs, for up to "
        f"{patience:g} s. {_REMEDY}"
    )
    timer = threading.Timer(SILENCE_S, _log.warning, ("%s", text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ask(group: dist.ProcessGroup, terms: Mapping[str, Any], patience: float, *, objection: str = "") -> str:
    try:
        return agree(group, "dist_optimizer", terms, objection=objection, timeout_s=patience, remedy=_REMEDY)
    except DisagreementError as error:
        return str(error)

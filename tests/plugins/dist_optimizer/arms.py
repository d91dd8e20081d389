"""Runs a training loop twice in one worker, stock and with the feature, and records what a user could see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ovpatch
from tests.plugins.ddp.arms import Record

Loop = Callable[..., list[Record]]

# Tests' models are small; all but the smallest parameters are to be cut. With overlap there is more to go wrong.
SMALL = {"min_param_numel": 8, "overlap_param_gather": True}


def both(loop: Loop, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Run ``loop`` stock, then patched, from the same seeds.

    Returns:
        ``stock`` and ``patched``: what the loop returned; ``counters``: what the feature did in the patched arm;
        ``pulled``: how many gradients were put together because somebody read them.
    """
    torch.manual_seed(0)
    stock = loop(*args, **kwargs)
    before = _counters()
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | (options or {})}):
        torch.manual_seed(0)
        patched = loop(*args, **kwargs)
        counters = {name: value - before[name] for name, value in _counters().items()}
    return {"stock": stock, "patched": patched, "counters": counters}


def _counters() -> dict[str, int]:
    from ovpatch_plugins.dist_optimizer.report import COUNTERS

    return COUNTERS.as_dict()

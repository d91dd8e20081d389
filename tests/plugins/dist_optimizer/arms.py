"""Runs a training loop twice in one worker, stock and with the feature, and records what a user could see."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ovpatch
from tests.plugins.ddp.arms import Loop
from tests.plugins.ddp.arms import both as run_both

# Tests' models are small; all but the smallest parameters are to be cut. With overlap there is more to go wrong.
SMALL = {"min_param_numel": 8, "overlap_param_gather": True}


def both(loop: Loop, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Run ``loop`` stock, then patched, from the same seeds; see :func:`tests.plugins.ddp.arms.both`."""
    return run_both(loop, *args, apply=partial(apply, options), **kwargs)


def apply(options: dict[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Turn the features on, with :data:`SMALL` unless ``options`` say otherwise."""
    return ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | (options or {})})

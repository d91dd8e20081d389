"""Gathers whose optimizer is gone.

[Note: orphans] A parameter stays alive until its values have come, which its next reader or its optimizer's next step
sees to. If a script drops model and optimizer right after a step, there is neither. So the gathers of an optimizer that
is gone are settled before the next step of any other one. Not in the finaliser: that may run in a thread on which the
collective itself depends, or while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ovpatch_plugins.dist_optimizer.gathers import Gathers

_orphans: list[Gathers] = []


def after(optimizer: Optimizer, gathers: Gathers) -> None:
    """Remember gathers once their optimizer is gone."""
    weakref.finalize(optimizer, _orphans.append, gathers).atexit = False


def settle() -> None:
    """Wait for what dropped optimizers have left under way."""
    while _orphans:
        with contextlib.suppress(RuntimeError):  # whoever reads these parameters, if anybody, is told
            _orphans.pop().settle()

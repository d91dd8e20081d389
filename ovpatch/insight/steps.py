"""The borders between a script's steps, and the end of the last one that a tool wants to see.

A step is one step of the optimizer that steps most often: where several take turns, as in a GAN, a step is one turn of
all of them. A border is the end of that optimizer's ``step()``. Steps that :class:`~torch.amp.GradScaler` skips do not
call it and make none.

[Note: leaving together] A rank that ends while a peer is still in the last collective tears down the connection that
this peer is reading from. So processes sign off in the directory and wait for each other, and only then end, by
``os._exit``: an exception would run the script's own clean-up, with collectives that the other ranks do not enter.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import Optimizer

from ovpatch.insight.step_hooks import StepHooks
from ovpatch.reports import workers

#: Seconds to wait for ranks that still have to take their last step; some scripts have ranks that never step.
PATIENCE: Final = 60.0


class Steps:
    """Counts the steps of this process, and shows how far it is to whoever started it.

    Args:
        directory: Where the count is left, in ``beat-<pid>``, whose time stamp is that of the last border.
        at_border: Called after step 1, 2, ... with its number.
    """

    def __init__(self, directory: Path, at_border: Callable[[int], None]) -> None:
        self._directory, self._at_border = directory, at_border
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._beat: tuple[int, int] | None = None  # pid and file; a forked child that trains has its own
        self._latest: ReferenceType[Optimizer] | None = None
        self.count = 0

    def watch(self) -> None:
        """Begin to count."""
        self._hooks = StepHooks(after=self._stepped)

    def unwatch(self) -> None:
        """Stop counting."""
        self._hooks.remove()

    def device(self) -> torch.device:
        """Return where the parameters are that the last border has changed."""
        optimizer = self._latest() if self._latest is not None else None
        groups = optimizer.param_groups if optimizer is not None else []
        return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))

    def _stepped(self, optimizer: Optimizer) -> None:
        joined = max(0, self.count - 1)  # a later optimizer, as after unfreezing, joins the step that is under way
        mine = self._counts[optimizer] = self._counts.get(optimizer, joined) + 1
        if mine > self.count:
            self.count, self._latest = mine, ref(optimizer)
            self._at_border(mine)
            self._show()

    def _show(self) -> None:
        pid = os.getpid()
        if self._beat is None or self._beat[0] != pid:
            path = self._directory / f"beat-{pid}"
            self._beat = pid, os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        os.pwrite(self._beat[1], b"%8d" % self.count, 0)


def rank() -> int:
    """Return this process's rank in the job, 0 where there is only one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)


def world() -> int:
    """Return the number of ranks of the job."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def leave(directory: Path, patience: float = PATIENCE) -> None:
    """End this process with exit code 0, together with its peers. Does not return.

    Args:
        directory: Where the ranks sign off; visible to all hosts of the job.
        patience: Seconds to wait for the others.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    (directory / f"left-{rank()}").touch()
    deadline = time.monotonic() + patience
    while len(list(directory.glob("left-*"))) < world() and time.monotonic() < deadline:
        time.sleep(0.02)
    workers.report_now()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

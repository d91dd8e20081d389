"""The borders between a script's steps, and the end of the last one that a tool wants to see.

A step is one step of the optimizer that steps most often: where several take turns, as in a GAN, a step is one turn of
all of them. A border is the end of that optimizer's ``step()``. Steps that :class:`~torch.amp.GradScaler` skips do not
call it and make none.

[Note: leaving together] A rank that ends while a peer is still in the last collective tears down the connection that
this peer is reading from. So processes sign off in the directory and wait for each other, and only then end, by
``os._exit``: an exception would run the script's own clean-up, with collectives that the other ranks do not enter.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import parent_process, util
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ovpatch.session import worker_reports

# The steps of optimizers, each seen once.
#
# [Note: hooks in the middle of a step] torch gives a class's ``step()`` its hooks when the first optimizer of that
# class is built. A ``step()`` that calls that of a base class, which may have hooks of its own, calls all of them
# again, as often as it calls the base, with the step half done. Counting how deep it is cannot tell: after an
# exception torch calls no post hook, and the count stays too high. So the stack is looked at, on which nothing is
# left over: a step as a whole begins and ends where torch's wrapper is on it just once for the optimizer. Dynamo can
# compile the wrapper into code in which it is not recognised: then the innermost end counts, which is the first post
# hook after a pre hook.

Before = Callable[[Optimizer, tuple[Any, ...], Mapping[str, Any]], None]
After = Callable[[Optimizer], None]

#: The code of what torch puts around every ``step()``; it is the same for all classes.
_WRAPPER: Final = Optimizer.profile_hook_step(lambda: None).__code__


class StepHooks:
    """Hooks around each step of every optimizer, from when this is made; see [Note: hooks in the middle of a step].

    Args:
        after: Called with the optimizer when its step is done, and not if it raises. Stock optimizers call it last,
            after the parameters have their new values.
        before: Called with the optimizer and the arguments of its ``step()``, of which the first is the optimizer.
    """

    def __init__(self, *, after: After, before: Before | None = None) -> None:
        self._before, self._after = before, after
        self._under_way: WeakSet[Optimizer] = WeakSet()  # and those whose step raised; their next begins it anew
        self._handles = register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @torch._disable_dynamo
    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_whole(optimizer):
            self._under_way.add(optimizer)
            if self._before is not None:
                self._before(optimizer, args, kwargs)

    @torch._disable_dynamo
    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer in self._under_way and _is_whole(optimizer):
            self._under_way.discard(optimizer)
            self._after(optimizer)


def _is_whole(optimizer: Optimizer) -> bool:
    """Whether a hook that is called now is that of the outermost ``step()`` of its optimizer."""
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and depth < 2:
        depth += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth < 2


# The models of a script, which nobody hands over: they are looked for.


def roots() -> list[nn.Module]:
    """Return all modules that are no other's child."""
    # By type: isinstance() would ask objects for their __class__, which makes lazy proxies load what they stand for.
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    return [module for module in modules if id(module) not in children and "_modules" in vars(module)]


# The end of a process that a tool observes, however that process came to be.

_acts: list[Callable[[], None]] = []


def at_end(act: Callable[[], None]) -> None:
    """Have something called when this process, or a child of multiprocessing that it forks, ends by itself.

    Children of :mod:`multiprocessing` skip :mod:`atexit`, and begin by forgetting the finalizers that they inherit, so
    each registers again.

    Args:
        act: Called at the end of every such process; it has to find out whether that one has anything to tell.
    """
    if not _acts:
        atexit.register(_run)
        util.register_after_fork(_run, _begin_child)
        if parent_process() is not None:
            util.Finalize(None, _run, exitpriority=100)
    _acts.append(act)


def _begin_child(run: Callable[[], None]) -> None:
    util.Finalize(None, run, exitpriority=100)


def _run() -> None:
    while _acts:
        _acts.pop()()


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
    worker_reports.write_report_now()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

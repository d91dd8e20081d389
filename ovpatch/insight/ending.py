"""The end of a process that a tool observes, however that process came to be."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing import parent_process, util

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

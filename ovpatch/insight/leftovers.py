"""Processes that a command leaves behind: data loaders' workers, trackers, whatever a script started and did not end.

A run is cut off at a step, by ``os._exit``, so what a script would have ended at its own end lives on. All of them
inherit the environment of the command, wherever in the tree of processes and sessions they are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROCESSES: Final = Path("/proc")
_PATIENCE: Final = 1.5  # seconds for those that end by themselves when their parent is gone, and again after SIGTERM


def end(entry: str, patience: float = _PATIENCE) -> None:
    """End every process that has an entry in its environment: let it, then ask it, then kill it.

    Args:
        entry: Such as ``NAME=value``. Where the system does not show environments, nothing is done.
        patience: Seconds between these.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _wait(lambda: not find(entry), patience):
            return
        for pid in find(entry):
            send(pid, number)
    _wait(lambda: not find(entry), patience)  # a killed process is still there until the system has cleaned up


def find(entry: str) -> list[int]:
    """Return the numbers of all processes but this one that began with an entry in their environment."""
    pids = [int(path.name) for path in _PROCESSES.glob("[0-9]*")] if _PROCESSES.is_dir() else []
    return [pid for pid in pids if pid != os.getpid() and entry.encode() in _environment(pid)]


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROCESSES / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or somebody else's
        return []


def _wait(done: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

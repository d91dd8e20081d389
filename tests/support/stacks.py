"""Stacks of a process that hangs: faulthandler on a signal, written to a file of the process.

The handler runs in C and needs no GIL, so it also runs while the main thread is blocked in a collective.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Final, TextIO

SIGNAL: Final = signal.SIGUSR2


def install(path: Path) -> TextIO:
    """Make this process write its stacks to ``path`` on :data:`SIGNAL` and on a crash; keep the returned file open."""
    file = path.open("w")
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    return file


def request_stacks(pid: int) -> bool:
    """Make a process write its stacks. Return False if it no longer exists."""
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return False
    return True


def read(path: Path, *, within: float = 10.0) -> str:
    """Wait until the stacks in ``path`` are complete, that is, stop growing, and return them."""
    deadline = time.monotonic() + within
    size = -1
    while time.monotonic() < deadline:
        now = path.stat().st_size if path.exists() else 0
        if now and now == size:
            break
        size = now
        time.sleep(0.05)
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text or "(the process did not write its stacks)"


def keep_case_stacks(text: str, worker: ModuleType) -> str:
    """Remove the parts that are always the same: the frames that called the case, and the worker's own thread."""
    threads = [
        thread.splitlines()
        for thread in text.split("\n\n")
        if not thread.startswith("Extension modules:")
    ]
    own = f" in {worker.die_with_parent.__name__}"
    kept = [
        "\n".join(_take_frames_above(lines, str(worker.__file__)))
        for lines in threads
        if not any(own in line for line in lines)
    ]
    return "\n\n".join(kept)


def _take_frames_above(lines: list[str], file: str) -> list[str]:
    above = list(itertools.takewhile(lambda line: file not in line, lines))
    # If the worker itself hangs, no frames are above its frames.
    return above if len(above) > 1 else lines

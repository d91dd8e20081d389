"""What happens in a process, in order, kept in files: one for each step, and one for what comes after the last."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ovpatch.insight import steps
from ovpatch.insight.ending import at_end
from ovpatch.insight.verify.values import Kept

#: Kinds of events.
BACKWARD: Final = "backward"
STEP: Final = "step"
SCALE: Final = "scale"
CHECKPOINT: Final = "checkpoint"


class Recorder:
    """Collects the events of this process.

    Args:
        directory: Where the files go.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: list[dict[str, Any]] = []
        self._begin()

    def _begin(self) -> None:
        self._pid, self._born, self._files = os.getpid(), time.time_ns(), 0
        self._rank: int | None = None
        self._events.clear()

    def add(self, kind: str, values: Mapping[str, Kept], *, step: int, index: int = 0, label: str = "") -> None:
        """Add an event.

        Args:
            kind: What happened.
            values: What was computed, by name.
            step: The step that it belongs to, from 1.
            index: Which optimizer.
            label: The optimizer's class, or the file of a checkpoint.
        """
        kept = {name: tuple(value) for name, value in values.items()}
        self._events.append({"kind": kind, "index": index, "label": label, "step": step, "values": kept})

    def flush(self) -> None:
        """Write what has happened since the last time. A directory that is gone is no error."""
        if not self._events or not self._directory.is_dir() or self._pid != os.getpid():
            return
        name = f"events-{_identity()}-{self._born}-{self._pid}-{self._know_rank()}-{self._files:06d}.pt"
        self._write(self._directory / name)
        self._files += 1
        self._events.clear()

    def _know_rank(self) -> int:
        """Return the rank; a process whose group is destroyed keeps the one that it had."""
        if self._rank is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._rank = steps.rank()
        return self._rank

    def _write(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}")
        inspect.unwrap(torch.save)(
            self._events, temporary
        )  # not by way of patches: this is nothing that the script saves
        os.replace(temporary, path)

    def keep_to_the_end(self) -> None:
        """Write the rest when the process ends, and let forked children have a record of their own."""
        at_end(self.flush)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)


def _identity() -> str:
    """Return which child of which this is, such as ``0.2``: children that start together are born in any order."""
    from multiprocessing import process

    numbers: tuple[int, ...] = getattr(process.current_process(), "_identity", ())
    return ".".join(map(str, (0, *numbers)))


def load(path: Path) -> Iterable[dict[str, Any]]:
    """Return the events of a file."""
    events: Iterable[dict[str, Any]] = torch.load(path, weights_only=True)
    return events

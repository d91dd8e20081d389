"""What happens in a process, in order, kept in files: one for each step, and one for what comes after the last."""

from __future__ import annotations

import inspect
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ovpatch.insight import steps
from ovpatch.insight.steps import at_end
from ovpatch.insight.verify.values import Kept

# What the processes of an arm recorded, read back: processes by rank, and their events in order.


@dataclass(frozen=True)
class Event:
    """Something that happened in a process.

    Attributes:
        kind: Of :mod:`ovpatch.insight.verify.recording`.
        index: Which optimizer, by the order of their first steps.
        label: The optimizer's class, or the file of a checkpoint.
        step: The step that it belongs to, from 1.
        values: What was computed.
    """

    kind: str
    index: int
    label: str
    step: int
    values: Mapping[str, Kept]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Event:
        """Return an event as it was stored."""
        values = {name: Kept(*value) for name, value in data["values"].items()}
        return cls(data["kind"], data["index"], data["label"], data["step"], values)

    @property
    def signature(self) -> tuple[str, int]:
        """What two runs must have at the same place."""
        return self.kind, self.index

    def __str__(self) -> str:
        return {
            BACKWARD: f"a backward (step {self.step})",
            STEP: f"step {self.step} of optimizer {self.index} ({self.label})",
            SCALE: "GradScaler.update()",
            CHECKPOINT: f"a checkpoint ({self.label})",
        }[self.kind]


@dataclass(frozen=True)
class Run:
    """What one arm recorded.

    Attributes:
        processes: The files of each process that recorded anything, in order, by its name: ``rank 1``.
        cut: Whether it ended before its time, so that its records may stop anywhere.
    """

    processes: Mapping[str, Sequence[Path]]
    cut: bool = False

    def events(self, process: str) -> Iterator[Event]:
        """Yield the events of a process; its files are read one by one."""
        for path in self.processes.get(process, ()):
            yield from map(Event.of, load(path))


def read(folder: Path, *, cut: bool = False) -> Run:
    """Return what the processes left in the folder of an arm.

    Args:
        folder: The arm's.
        cut: Whether the arm failed or was ended.
    """
    files: dict[tuple[tuple[int, ...], int, int], list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("events-*.pt"), key=lambda path: path.stem.rpartition("-")[2]):
        _, identity, born, pid, _, _ = path.stem.split("-")
        files[tuple(map(int, identity.split("."))), int(born), int(pid)].append(path)
    ranks: dict[int, list[list[Path]]] = defaultdict(list)
    for _, paths in sorted(files.items()):
        ranks[int(paths[-1].stem.split("-")[4])].append(paths)
    return Run({_name(rank, n): paths for rank, many in sorted(ranks.items()) for n, paths in enumerate(many)}, cut)


def _name(rank: int, number: int) -> str:
    return f"rank {rank}" if number == 0 else f"rank {rank}, process {number + 1}"


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

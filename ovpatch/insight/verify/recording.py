"""Files of a process's events: one per step, and one for the events after the last step."""

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
from ovpatch.insight.steps import run_at_exit
from ovpatch.insight.verify.values import KeptValue


@dataclass(frozen=True)
class RecordedEvent:
    """An event of a process."""

    kind: str  # one of :data:`BACKWARD`, :data:`STEP`, :data:`SCALE` and :data:`CHECKPOINT`
    index: int  # number of the optimizer, in the order of their first steps
    label: str  # class of the optimizer, or file of the checkpoint
    step: int  # its step, from 1
    values: Mapping[str, KeptValue]  # its values by name

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RecordedEvent:
        """Return an event from its stored form."""
        values = {name: KeptValue(*value) for name, value in data["values"].items()}
        return cls(data["kind"], data["index"], data["label"], data["step"], values)

    @property
    def signature(self) -> tuple[str, int]:
        """The part that must be equal in two runs."""
        return self.kind, self.index

    def __str__(self) -> str:
        return {
            BACKWARD: f"a backward (step {self.step})",
            STEP: f"step {self.step} of optimizer {self.index} ({self.label})",
            SCALE: "GradScaler.update()",
            CHECKPOINT: f"a checkpoint ({self.label})",
        }[self.kind]


@dataclass(frozen=True)
class RecordedRun:
    """The record of one arm."""

    processes: Mapping[str, Sequence[Path]]  # files of each process, in order, by its name, such as ``rank 1``
    cut: bool = False  # whether the arm failed or was ended, so that its events may stop anywhere

    def events(self, process: str) -> Iterator[RecordedEvent]:
        """Yield the events of a process, file by file."""
        for path in self.processes.get(process, ()):
            yield from map(RecordedEvent.from_data, load_events(path))


def read_recorded(folder: Path, *, cut: bool = False) -> RecordedRun:
    """Return the record in the folder of an arm; ``cut`` tells whether the arm failed or was ended."""
    files: dict[tuple[tuple[int, ...], int, int], list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("events-*.pt"), key=lambda path: path.stem.rpartition("-")[2]):
        _, identity, born, pid, _, _ = path.stem.split("-")
        files[tuple(map(int, identity.split("."))), int(born), int(pid)].append(path)
    ranks: dict[int, list[list[Path]]] = defaultdict(list)
    for _, paths in sorted(files.items()):
        ranks[int(paths[-1].stem.split("-")[4])].append(paths)
    return RecordedRun(
        {_name(rank, n): paths for rank, many in sorted(ranks.items()) for n, paths in enumerate(many)}, cut
    )


def _name(rank: int, number: int) -> str:
    return f"rank {rank}" if number == 0 else f"rank {rank}, process {number + 1}"


#: Kinds of events.
BACKWARD: Final = "backward"
STEP: Final = "step"
SCALE: Final = "scale"
CHECKPOINT: Final = "checkpoint"


class EventRecorder:
    """Collects the events of this process, and writes them to files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        self._pid, self._born, self._files = os.getpid(), time.time_ns(), 0
        self._rank: int | None = None
        self._events.clear()

    def record_event(
        self, kind: str, values: Mapping[str, KeptValue], *, step: int, index: int = 0, label: str = ""
    ) -> None:
        """Add an event; see :class:`RecordedEvent` for its parts."""
        kept = {name: tuple(value) for name, value in values.items()}
        self._events.append({"kind": kind, "index": index, "label": label, "step": step, "values": kept})

    def flush_events(self) -> None:
        """Write the events since the last flush. A directory that is gone is no error."""
        if not self._events or not self._directory.is_dir() or self._pid != os.getpid():
            return
        name = f"events-{_identity()}-{self._born}-{self._pid}-{self._know_rank()}-{self._files:06d}.pt"
        self._write(self._directory / name)
        self._files += 1
        self._events.clear()

    def _know_rank(self) -> int:
        """Return the rank; a process keeps it when its group is destroyed."""
        if self._rank is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._rank = steps.get_rank()
        return self._rank

    def _write(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}")
        save = inspect.unwrap(torch.save)  # unpatched: this is not a checkpoint of the script
        save(self._events, temporary)
        os.replace(temporary, path)

    def flush_at_exit(self) -> None:
        """Write the rest when the process ends, and give forked children their own record."""
        run_at_exit(self.flush_events)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)


def _identity() -> str:
    """Return the position in multiprocessing's tree, such as ``0.2``; children have no fixed order of start."""
    from multiprocessing import process

    numbers: tuple[int, ...] = getattr(process.current_process(), "_identity", ())
    return ".".join(map(str, (0, *numbers)))


def load_events(path: Path) -> Iterable[dict[str, Any]]:
    """Return the events of a file."""
    events: Iterable[dict[str, Any]] = torch.load(path, weights_only=True)
    return events

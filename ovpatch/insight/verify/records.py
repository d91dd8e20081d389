"""What the processes of an arm recorded, read back: processes by rank, and their events in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ovpatch.insight.verify import recording
from ovpatch.insight.verify.values import Kept


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
            recording.BACKWARD: f"a backward (step {self.step})",
            recording.STEP: f"step {self.step} of optimizer {self.index} ({self.label})",
            recording.SCALE: "GradScaler.update()",
            recording.CHECKPOINT: f"a checkpoint ({self.label})",
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
            yield from map(Event.of, recording.load(path))


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

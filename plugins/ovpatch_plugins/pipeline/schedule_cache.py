"""The orders that earlier runs chose, in files of the user's cache, one a pipeline.

The first rank of a job reads and writes them, and tells the others. A file that cannot be read is written again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovpatch.overlap.autotune.measure import write_if_possible
from ovpatch_plugins.pipeline.actions import Action, Kind, Schedule
from ovpatch_plugins.pipeline.orders import ScheduleError

_FORMAT: Final = 1
_ACTION: Final = re.compile(r"(\d+)(F|BW|B|W)(\d+)")


@dataclass(frozen=True)
class ChosenOrder:
    """An order that has won a race.

    Attributes:
        name: What it is called in the report.
        schedule: Orders by rank.
        steps: Measured seconds of a step of each order that ran, by name.
    """

    name: str
    schedule: Schedule
    steps: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {"name": self.name, "orders": write_orders(self.schedule), "steps": dict(self.steps)}

    @classmethod
    def from_json(cls, data: Any) -> ChosenOrder:
        """Return what :meth:`to_json` wrote.

        Raises:
            ScheduleError: It is something else.
        """
        try:
            steps = {str(name): float(seconds) for name, seconds in data["steps"].items()}
            return cls(str(data["name"]), read_orders(data["orders"]), steps)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"the kept order cannot be understood ({error!r}). Delete its file.") from error


def write_orders(schedule: Schedule) -> list[str]:
    """Return orders as text, one line a rank."""
    return [" ".join(map(str, order)) for order in schedule]


def read_orders(lines: Sequence[str]) -> Schedule:
    """Return the orders of lines that :func:`write_orders` made.

    Raises:
        ScheduleError: A word is no action.
    """
    return [[_read_action(word) for word in line.split()] for line in lines]


def _read_action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise ScheduleError(f"{word} is no action. Write one as 0F3: stage, kind and microbatch.")
    return Action(Kind(found[2]), int(found[1]), int(found[3]))


class ScheduleCache:
    """The file of one pipeline.

    Args:
        directory: The user's cache; None keeps nothing.
        key: What the choice depends on: the model's shapes, the pipeline, the options and the machine.
    """

    def __init__(self, directory: Path | None, key: Mapping[str, Any]) -> None:
        text = json.dumps(key, sort_keys=True)
        self._key = json.loads(text)
        name = f"pipeline-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self.path = None if directory is None else directory / "choices" / name

    def read(self) -> ChosenOrder | None:
        """Return the order that was kept; None without a file that can be used."""
        if self.path is None:
            return None
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT or data["key"] != self._key:
                return None
            return ChosenOrder.from_json(data["choice"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # ScheduleError is a ValueError
            return None

    def write(self, choice: ChosenOrder) -> None:
        """Keep an order if the file can be written. The write is atomic."""
        if self.path is None:
            return
        write_if_possible(self.path, {"format": _FORMAT, "key": self._key, "choice": choice.to_json()})

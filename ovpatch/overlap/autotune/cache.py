"""The cache file of measurements, one per feature and environment.

Only a group's first rank reads and writes it; a measurement that it cannot read is made again. Of several writers the
last one's entries stay, which include those that it found.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1
Times = dict[str, float]


class TuningCache:
    """The measurements of one feature in one environment, which is what the times depend on besides their keys.

    Without a directory nothing is kept.
    """

    def __init__(self, directory: Path | None, feature: str, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        digest = hashlib.sha256(json.dumps(self._environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if directory is None else directory / "choices" / f"{feature}-{digest}.json"  # the file
        self.problem = ""  # why the file's content was not used; empty if it was, or if there is no readable file

    def read(self) -> dict[str, Times]:
        """Return the times of each key's candidates, in ms; empty if there is no readable file."""
        if self.path is None:
            return {}
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.problem = "" if isinstance(error, OSError) else self._damaged("it is no text")
            return {}
        try:
            found = _checked(json.loads(text), self._environment)
        except (ValueError, RecursionError) as error:  # JSON's errors are ValueErrors
            self.problem = self._damaged(str(error))
            return {}
        self.problem = ""
        return found

    def write(self, key: str, times: Mapping[str, float]) -> None:
        """Add the times of a key's candidates if the file can be written. The write is atomic."""
        if self.path is None:
            return
        choices = self.read() | {key: dict(times)}
        data = {"format": FORMAT, "environment": self._environment, "choices": choices}
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError:  # read-only, full, or no directory; this process still knows the times
            _removed(temporary)

    def _damaged(self, why: str) -> str:
        return f"{self.path} is damaged and was not used ({why}): it is written anew if something is measured"


def _checked(data: Any, environment: Mapping[str, str]) -> dict[str, Times]:
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("environment") != environment:
        raise ValueError("its head is of another format or environment")
    choices = data.get("choices")
    if not isinstance(choices, dict) or not all(_are_times(times) for times in choices.values()):
        raise ValueError("its choices are no times by candidate")
    return choices


def _are_times(times: Any) -> bool:
    return isinstance(times, dict) and all(
        isinstance(ms, float) and math.isfinite(ms) and ms > 0 for ms in times.values()
    )


def _removed(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a directory that cannot be written to cannot be cleaned up either
        return

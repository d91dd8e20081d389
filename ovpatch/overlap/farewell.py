"""What a rank keeps for its peers after it has no use for it itself.

[Note: last questions] When a feature is turned off, each rank asks the others for what it lacks and then drops its own
parts. The fastest must not drop them before the slowest has asked. So a last question says that it is one, and whoever
is asked for the last time by everybody is free.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


class Farewell:
    """Keeps its owner alive from its own last question until all others have asked theirs.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._others = group.rank(), group.size() - 1
        self._lock = threading.Lock()
        self._heard: set[int] = set()
        self._said = False

    def say(self, owner: object) -> None:
        """This rank's questions are its last from now on; ``owner`` is kept for those of the others."""
        with self._lock:
            self._said = True
            if len(self._heard) < self._others:
                _kept[id(self)] = owner

    def mark(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return a question that says whether it is this rank's last."""
        return question | ({"last of": self._rank} if self._said else {})

    def hear(self, question: Mapping[str, Any]) -> None:
        """Note a question that has been answered."""
        with self._lock:
            if "last of" in question:
                self._heard.add(question["last of"])
            if self._said and len(self._heard) == self._others:
                _kept.pop(id(self), None)


_kept: dict[int, object] = {}

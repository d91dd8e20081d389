"""What a rank keeps for its peers after it has no use for it itself.

[Note: last questions] When a feature is turned off, each rank asks the others for what it lacks and then drops its own
parts. The fastest must not drop them before the slowest has asked. So a last question says that it is one, and whoever
has been asked for the last time by everybody is free. It is free, too, once all ranks have taken part in a backward
since: scripts ask between backwards. That holds as well for what is collected as garbage while a slower peer still
asks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Farewell:
    """Keeps its owner alive from its own last question until all others have asked theirs.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._others = group, group.rank(), group.size() - 1
        self._lock = threading.Lock()
        self._heard: set[int] = set()
        self._owner: int | None = None  # its id(): who keeps it is not to be kept by it, for it may be large

    def say(self, owner: object) -> None:
        """This rank's questions are its last from now on; ``owner`` is kept for those of the others."""
        with self._lock:
            self._owner = id(owner)
            if len(self._heard) < self._others:
                keep(self._group, owner)

    def mark(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return a question that says whether it is this rank's last."""
        return question | ({"last of": self._rank} if self._owner is not None else {})

    def hear(self, question: Mapping[str, Any]) -> None:
        """Note a question that has been answered."""
        with self._lock:
            if "last of" in question:
                self._heard.add(question["last of"])
            if self._owner is not None and len(self._heard) == self._others:
                _kept.pop(self._owner, None)


def keep(group: dist.ProcessGroup, owner: object) -> None:
    """Keep something that peers may still ask for until all ranks of the group have taken part in a backward."""
    gone = [key for key, (its, _) in list(_kept.items()) if its not in c10d._world.pg_map]
    for key in gone:  # destroyed: nobody can ask any more
        _kept.pop(key, None)
    if group in c10d._world.pg_map:
        _kept[id(owner)] = (group, owner)


def met(group: dist.ProcessGroup) -> None:
    """All ranks of the group have taken part in a backward."""
    for key, (its, _) in list(_kept.items()):
        if its is group:
            _kept.pop(key, None)


_kept: dict[int, tuple[dist.ProcessGroup, object]] = {}

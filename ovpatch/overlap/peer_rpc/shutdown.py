"""A rank that has come to its end goes on answering until its peers have come to theirs.

[Note: who leaves last] Group rank 0 asks every other rank to tell when it has come to its end as well, and the others
ask rank 0 to tell when it has heard from all. Those connections break by themselves when a process dies, so nobody
polls, and nobody waits for the dead. The store, which may end with its host, is needed to find the way only.

A process with several groups first says in all of them that it has come, then collects where it is rank 0, then waits:
so no two ranks wait for each other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ovpatch.overlap.comm.group_state import group_state, is_destroyed
from ovpatch.overlap.peer_rpc.client import Request
from ovpatch.overlap.peer_rpc.rendezvous import Endpoints
from ovpatch.overlap.peer_rpc.server import Server

_log = logging.getLogger("ovpatch.peers")


class ShutdownBarrier:
    """How one rank takes leave of a process group.

    Args:
        rank: This process's group rank.
        names: Global ranks by group rank.
        directory: Where the others are found.
        server: What answers meanwhile.
    """

    def __init__(self, rank: int, names: Sequence[int], directory: Endpoints, server: Server) -> None:
        self.rank, self.used, self.left = rank, False, False
        self._names, self._directory, self._server, self._pid = names, directory, server, os.getpid()

    def due(self) -> bool:
        """Whether leave is yet to be taken; a fork has none to take."""
        return not self.left and os.getpid() == self._pid

    def concerned(self) -> bool:
        """Whether anybody could still want something: this rank has served, asked or been asked."""
        return self.used or self._server.asked_at > 0

    def release(self) -> None:
        """Tell the others that this rank needs nobody any more."""
        self._server.release()

    def wait(self, timeout_s: float) -> None:
        """Wait until the others have left, as far as this rank has to know, or are gone."""
        ranks = [0] if self.rank else range(1, len(self._names))
        begin = time.monotonic()
        inquiry = Request(self._directory, ranks, {"leave": True}, begin + timeout_s, insist=False)
        try:
            while inquiry.late() and time.monotonic() < inquiry.deadline:
                inquiry.step()
                inquiry.deadline = max(begin, self._server.asked_at) + timeout_s
        except RuntimeError as error:
            _log.debug("the store is gone, and with it who is waited for: %s", error)
        finally:
            inquiry.close()
        if inquiry.late():
            late = ", ".join(str(self._names[rank]) for rank in inquiry.late())
            _log.warning("rank %s has not come to its end in %g s and is not waited for any longer", late, timeout_s)


def leave(departures: Iterable[ShutdownBarrier], timeout_s: float) -> None:
    """Take leave of several process groups; see [Note: who leaves last].

    Args:
        departures: One a group.
        timeout_s: Seconds without a question after which a group is left anyway.
    """
    due = [departure for departure in departures if departure.due()]
    for departure in due:
        departure.left = True
        if departure.rank or not departure.concerned():
            departure.release()
    waiting = [departure for departure in due if departure.concerned()]
    for departure in [departure for departure in waiting if departure.rank == 0]:
        departure.wait(timeout_s)
        departure.release()
    for departure in [departure for departure in waiting if departure.rank]:
        departure.wait(timeout_s)


# What a rank keeps for its peers after it has no use for it itself.
#
# [Note: last questions] When a feature is turned off, each rank asks the others for what it lacks and then drops its
# own parts. The fastest must not drop them before the slowest has asked. So a last question says that it is one, and
# whoever has been asked for the last time by everybody is free. It is free, too, once all ranks have taken part in a
# backward since: scripts ask between backwards. That holds as well for what is collected as garbage while a slower
# peer still asks.


class KeepAlive:
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
                group_state(self._group).values.get(_Kept, {}).pop(self._owner, None)


class _Kept(dict[int, object]):
    """What this rank keeps for the peers of one group, by ``id()``."""


def keep(group: dist.ProcessGroup, owner: object) -> None:
    """Keep something that peers may still ask for until all ranks of the group have taken part in a backward."""
    if not is_destroyed(group):  # else nobody can ask any more
        group_state(group).get_or_create(_Kept, _Kept, keeps_group=True)[id(owner)] = owner


def met(group: dist.ProcessGroup) -> None:
    """All ranks of the group have taken part in a backward."""
    kept = group_state(group).values.get(_Kept)
    if kept:
        kept.clear()

"""How long a rank keeps answering its peers, and keeps what they may still read."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ovpatch.overlap.comm.group_state import group_state, is_destroyed, renew_in_children
from ovpatch.overlap.peer_rpc.client import Request
from ovpatch.overlap.peer_rpc.rendezvous import Endpoints
from ovpatch.overlap.peer_rpc.server import Server

_log = logging.getLogger("ovpatch.peers")


class ShutdownBarrier:
    """One rank's part in the shutdown of a process group: it answers until its peers have finished, too.

    [Note: shutdown order] Group rank 0 asks every other rank to reply once it has finished, and the others ask rank 0
    to reply once all have. These connections break by themselves when a process dies, so there is no polling, and no
    wait for the dead. The store, which may end with its host, is needed to look up addresses only. A process with
    several groups first reports in all of them that it has finished, then collects where it is rank 0, then waits where
    it is not: so no two ranks wait for each other.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int], endpoints: Endpoints, server: Server) -> None:
        self.rank, self.used, self.entered = rank, False, False
        self._global_ranks, self._endpoints, self._server, self._pid = global_ranks, endpoints, server, os.getpid()

    def is_due(self) -> bool:
        """Return whether the shutdown has not begun; a fork takes no part in it."""
        return not self.entered and os.getpid() == self._pid

    def is_needed(self) -> bool:
        """Return whether peers may still call: this rank has registered, called or been called."""
        return self.used or self._server.called_at > 0

    def finish(self) -> None:
        """Tell the peers that this rank has finished."""
        self._server.finish()

    def wait(self, timeout_s: float) -> None:
        """Wait until the ranks that this rank collects from have finished or died."""
        ranks = [0] if self.rank else range(1, len(self._global_ranks))
        begin = time.monotonic()
        request = Request(self._endpoints, ranks, {"shutdown": True}, begin + timeout_s, retry=False)
        try:
            while request.pending() and time.monotonic() < request.deadline:
                request.poll()
                request.deadline = max(begin, self._server.called_at) + timeout_s
        except RuntimeError as error:
            _log.debug("the store is gone, and so are the addresses of ranks to wait for: %s", error)
        finally:
            request.close()
        if request.pending():
            late = ", ".join(str(self._global_ranks[rank]) for rank in request.pending())
            _log.warning("rank %s has not come to its end in %g s and is not waited for any longer", late, timeout_s)


def run_shutdown(barriers: Iterable[ShutdownBarrier], timeout_s: float) -> None:
    """Shut several process groups down; see [Note: shutdown order].

    A group is left anyway after ``timeout_s`` seconds without a call.
    """
    due = [barrier for barrier in barriers if barrier.is_due()]
    for barrier in due:
        barrier.entered = True
        if barrier.rank or not barrier.is_needed():
            barrier.finish()
    needed = [barrier for barrier in due if barrier.is_needed()]
    for barrier in [barrier for barrier in needed if barrier.rank == 0]:
        barrier.wait(timeout_s)
        barrier.finish()
    for barrier in [barrier for barrier in needed if barrier.rank]:
        barrier.wait(timeout_s)


class KeepAlive:
    """Keeps an object from this rank's final call until every peer has made its own.

    When a feature is turned off, each rank pulls what it lacks and then drops its shards. The fastest rank must not
    drop them before the slowest has pulled. So each rank marks its final call. A rank frees its shards once every peer
    has sent one, or once all ranks have joined a later backward, since scripts read between backwards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._others = group, group.rank(), group.size() - 1
        self._lock = threading.Lock()
        renew_in_children(self, "_lock", threading.Lock)
        self._finished: set[int] = set()
        self._owner: int | None = None  # an id(), since the object may be large and this one outlive it

    def start_final_calls(self, owner: object) -> None:
        """Mark this rank's calls as final from now on; keep ``owner`` for those of the peers."""
        with self._lock:
            self._owner = id(owner)
            if len(self._finished) < self._others:
                keep_until_backward(self._group, owner)

    def mark_final(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments with the mark of a final call, if it is one; a fork's never is."""
        is_final = self._owner is not None and not group_state(self._group).is_forked
        return arguments | ({"last of": self._rank} if is_final else {})

    def record_call(self, arguments: Mapping[str, Any]) -> None:
        """Record a call that has been answered."""
        with self._lock:
            if "last of" in arguments:
                self._finished.add(arguments["last of"])
            if self._owner is not None and len(self._finished) == self._others:
                group_state(self._group).values.get(Kept, {}).pop(self._owner, None)


@dataclass
class _KeptOwner:
    owner: object
    left: int  # backwards for which it is kept
    has_passed_one: bool = False


class Kept(dict[int, _KeptOwner]):
    """What this rank keeps for the peers of one group, by ``id()``."""


def keep_until_backward(group: dist.ProcessGroup, owner: object, backwards: int = 1) -> None:
    """Keep an object that peers may still read until all ranks of the group have joined so many later backwards."""
    if not is_destroyed(group):  # else no peer can call any more
        kept = group_state(group).get_or_create(Kept, Kept, keeps_group=True)
        kept[id(owner)] = _KeptOwner(owner, backwards)


class BeforeBackward(list[Callable[[], None]]):
    """What this rank does before it joins the next backward of one group."""


def call_before_backward(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Call ``action`` before this rank joins a further backward: until then peers keep what they have."""
    if not is_destroyed(group):
        group_state(group).get_or_create(BeforeBackward, BeforeBackward).append(action)


def prepare_backward(group: dist.ProcessGroup) -> None:
    """Do what is due before this rank joins a backward of the group."""
    due = group_state(group).values.get(BeforeBackward)
    while due:
        due.pop()()


def keep_no_longer(group: dist.ProcessGroup, *, read: bool) -> None:
    """Keep what is kept for one backward at most; what has been kept for one only if it may still be read."""
    kept = group_state(group).values.get(Kept, {})
    for key, one in list(kept.items()):
        one.left = 1
        if one.has_passed_one and not read:
            kept.pop(key, None)  # a peer's last call may have dropped it


def drop_kept(group: dist.ProcessGroup) -> None:
    """Drop what is kept for no further backward, since all ranks of the group have joined one."""
    kept = group_state(group).values.get(Kept, {})
    for key, one in list(kept.items()):
        one.left -= 1
        one.has_passed_one = True
        if not one.left:
            kept.pop(key, None)

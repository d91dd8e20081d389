"""Objects that a rank retains because peers may still read them, and reads that may not wait longer.

Peers read at any time between two backwards. So a rank that drops an object retains it until all
ranks have joined another backward, or until each peer has made its final call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import group_state, is_destroyed, reset_after_fork

# The name of the argument by which a rank marks its final call. The value is its group rank.
_MARK: Final = "last of"


def is_final(arguments: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of a rank's final call, see :class:`FinalReads`."""
    return _MARK in arguments


class FinalReads:
    """The last calls of all ranks for one topic, until which a rank retains an object.

    When a feature is turned off, each rank pulls the shards that it lacks and then drops its own.
    The fastest rank must retain its shards until the slowest rank has pulled them. So each rank
    marks its final call, and a peer drops its shards once it has a final call from every rank.
    It also drops them once all ranks have joined another backward, or a given number of them. A
    rank that has turned the feature off may destroy the group, or exit, before its peers have read:
    it serves final calls until it exits or starts calls in another group, and its exit waits for
    them.

    Args:
        group: The process group.
        peers: The group ranks that read. Default: all peers.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Sequence[int] | None = None) -> None:
        self._group = group
        self._rank = group.rank()
        everyone = range(group.size()) if peers is None else peers
        self._peers = frozenset(everyone) - {self._rank}
        # Threads of the server record the calls of peers.
        self._lock = threading.Lock()
        reset_after_fork(self, "_lock", threading.Lock)
        # The ranks whose final calls this rank has served.
        self._finished_ranks: set[int] = set()
        # The id() of the retained object, None before this rank's final calls. A reference would
        # keep the object alive, which may be large.
        self._owner_id: int | None = None

    def start_final_calls(self, owner: object, backwards: int = 1) -> None:
        """Mark the following calls of this rank as final, and retain ``owner`` for its peers.

        Args:
            owner: The object that peers read.
            backwards: The number of backwards after which it is released in any case. Default: 1.
        """
        with self._lock:
            self._owner_id = id(owner)
            if self.list_awaited():
                retain(self._group, owner, backwards, self)

    def mark_final(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, with a mark if the call is final."""
        return arguments | ({_MARK: self._rank} if self._owner_id is not None else {})

    def list_awaited(self) -> frozenset[int]:
        """Return the ranks whose final calls this rank has not served."""
        return self._peers - self._finished_ranks

    def record_call(self, arguments: Mapping[str, Any]) -> None:
        """Record a call that this rank has served."""
        with self._lock:
            if is_final(arguments):
                self._finished_ranks.add(arguments[_MARK])
            if self._owner_id is not None and not self.list_awaited():
                retention: Retention | None = group_state(self._group).values.get(Retention)
                if retention is not None:
                    retention.retained.pop(self._owner_id, None)


@dataclass
class _Retained:
    owner: object
    # Backwards that all ranks must join before the owner is released.
    remaining_backwards: int
    # The calls that release the owner earlier; None without any.
    final_reads: FinalReads | None = None


class Retention:
    """The objects that this rank retains for its peers in one process group.

    Attributes:
        retained: The objects, by ``id()``.
        before_backward: Functions to call before this rank joins the next backward.
    """

    def __init__(self) -> None:
        self.retained: dict[int, _Retained] = {}
        self.before_backward: list[Callable[[], None]] = []


def retain(
    group: dist.ProcessGroup,
    owner: object,
    backwards: int = 1,
    final_reads: FinalReads | None = None,
) -> None:
    """Retain an object until all ranks of ``group`` have joined ``backwards`` more backwards.

    If it is retained already, its final reads and the larger number of backwards hold. Do nothing
    if the group was destroyed, because peers cannot call then.

    Args:
        group: The process group.
        owner: The object.
        backwards: The number of backwards.
        final_reads: The calls that release it earlier. Default: none.
    """
    if not is_destroyed(group):
        retained = _get_retention(group).retained
        known = retained.get(id(owner))
        if known is not None:
            backwards = max(backwards, known.remaining_backwards)
            final_reads = final_reads or known.final_reads
        retained[id(owner)] = _Retained(owner, backwards, final_reads)


def has_retained(group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank retains objects for its peers in a group, which may be destroyed."""
    retention = None if group is None else group_state(group).values.get(Retention)
    return retention is not None and bool(retention.retained)


def list_awaited_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the group ranks whose final calls release objects that this rank retains."""
    retention = None if group is None else group_state(group).values.get(Retention)
    retained = [] if retention is None else list(retention.retained.values())
    reads = [item.final_reads for item in retained if item.final_reads is not None]
    return sorted(set().union(*(item.list_awaited() for item in reads)))


def shorten_retention(group: dist.ProcessGroup) -> None:
    """Release all retained objects at the next backward, however long they should have stayed."""
    retention: Retention | None = group_state(group).values.get(Retention)
    if retention is not None:
        for retained in list(retention.retained.values()):
            retained.remaining_backwards = 1


def release_retained(group: dist.ProcessGroup) -> None:
    """Count a backward that all ranks of ``group`` have joined, and release the objects due."""
    retention: Retention | None = group_state(group).values.get(Retention)
    if retention is None:
        return
    for key, retained in list(retention.retained.items()):
        retained.remaining_backwards -= 1
        if not retained.remaining_backwards:
            # The final call of a peer may have released it concurrently.
            retention.retained.pop(key, None)


def call_before_backward(group: dist.ProcessGroup, function: Callable[[], None]) -> None:
    """Call ``function`` before this rank joins the next backward, until which peers retain objects.

    Do nothing if the group was destroyed, because this rank cannot call its peers then.
    """
    if not is_destroyed(group):
        _get_retention(group).before_backward.append(function)


def prepare_backward(group: dist.ProcessGroup) -> None:
    """Call the functions that are due before this rank joins a backward of ``group``."""
    retention: Retention | None = group_state(group).values.get(Retention)
    while retention is not None and retention.before_backward:
        # A function that raises must not be called again.
        retention.before_backward.pop()()


def _get_retention(group: dist.ProcessGroup) -> Retention:
    # The retained objects reference the group.
    return group_state(group).get_or_create(Retention, Retention, keeps_group=True)

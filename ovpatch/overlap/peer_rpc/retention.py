"""Objects that peers may still read, kept until a later backward or until the final reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import (
    group_state,
    is_destroyed,
    renew_in_children,
)


class FinalReads:
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
                retain(self._group, owner)

    def mark_final(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments with the mark of a final call, if it is one."""
        return arguments | ({"last of": self._rank} if self._owner is not None else {})

    def record_call(self, arguments: Mapping[str, Any]) -> None:
        """Record a call that has been answered."""
        with self._lock:
            if "last of" in arguments:
                self._finished.add(arguments["last of"])
            if self._owner is not None and len(self._finished) == self._others:
                group_state(self._group).values.get(Retention, {}).pop(self._owner, None)


@dataclass
class _KeptOwner:
    owner: object
    left: int  # backwards for which it is kept
    has_passed_one: bool = False


class Retention(dict[int, _KeptOwner]):
    """What this rank keeps for the peers of one group, by ``id()``."""


def retain(group: dist.ProcessGroup, owner: object, backwards: int = 1) -> None:
    """Keep an object that peers may still read until all ranks of the group have joined so many later backwards."""
    if not is_destroyed(group):  # else no peer can call any more
        kept = group_state(group).get_or_create(Retention, Retention, keeps_group=True)
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
    """Keep everything for one further backward at most; what has passed one already, only if it may still be read."""
    kept = group_state(group).values.get(Retention, {})
    for key, one in list(kept.items()):
        one.left = 1
        if one.has_passed_one and not read:
            kept.pop(key, None)  # a peer's last call may have dropped it


def drop_kept(group: dist.ProcessGroup) -> None:
    """Drop what is kept for no further backward, since all ranks of the group have joined one."""
    kept = group_state(group).values.get(Retention, {})
    for key, one in list(kept.items()):
        one.left -= 1
        one.has_passed_one = True
        if not one.left:
            kept.pop(key, None)

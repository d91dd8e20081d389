"""Where the ranks' hosts meet before their devices begin to wait for each other.

[Note: hosts first] PeerRpc' questions are answered by a thread, and CUDA keeps every thread of a process from copying
while one of them is inside a copy from or to pageable memory, as ``batch.to(device)`` is. A host that has run ahead can
stay inside such a copy as long as its device waits for a rank that has not launched its part of a collective; and if
that rank is the one that asks, both wait for ever. So hosts wait here, where they hold nothing that an answer needs. It
costs little: the device has its queue to work on, and the collective could not have begun before the slowest host.

[Note: one number] All meetings of a group count in one number of its store, which only grows: the n-th is over when
every rank has added n. Nobody can be ahead of that by more than one meeting, since it would have waited. So whoever
comes last asks the store once, and nothing is left to be deleted. To add nothing asks for the number in one message,
where ``get()`` takes two; but a store in a file writes down whatever is added, and would grow as long as anybody waits.

[Note: ahead] A rank that asks nobody anything until its next collective may say before that it comes
(:meth:`HostBarrier.come`). Hosts are never equally fast, and a step whose device waits for its host takes as long as
the slower of them at every meeting; what lies between coming and meeting evens that out.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from typing import Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.group_state import group_state, group_store, group_timeout_s
from ovpatch.overlap.peer_rpc.rpc import PeerRpc

_TOPIC: Final = "the gate's name"

_PAUSE_S: Final = 0.002
_PAUSE_PER_RANK_S: Final = 2e-5


def needed(device: torch.device) -> bool:
    """Tell whether hosts run ahead of this kind of device."""
    return device.type == "cuda"


class HostBarrier:
    """The gate of one process group; from :meth:`of`.

    Attributes:
        devices: Whose collectives hosts meet for. Backwards of several devices come to the gate in any order, and a
            flag of one might be taken for the other's; so such a flag means something only with a single device.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._world, self._rank = group.size(), group.rank()
        self._group = weakref.ref(group)
        self.devices: set[torch.device] = set()
        store = group_store(group)
        assert store is not None, "the process group was destroyed"
        self._store, self._in_file = store, _is_in_file(store)
        self._timeout_s = group_timeout_s(group)
        self._number, self._lock = 0, threading.Lock()
        self._raised = ""  # what this rank has told the others the last time
        self._ahead = self._open = False
        self._longest_pause_s = max(_PAUSE_S, _PAUSE_PER_RANK_S * self._world)  # all of them ask one store
        # The store may outlive the processes, with the keys of earlier ones in it, so nobody else may have this name.
        self._name = uuid.uuid4().hex if self._rank == 0 else ""
        if self._rank == 0:
            name = self._name
            PeerRpc.of(group).serve(_TOPIC, lambda _: ({"name": name}, []))

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> HostBarrier:
        """Return the group's gate. Every rank makes this call before the first that meets.

        Args:
            group: Whose hosts meet.
            device: Whose collectives they will meet for, if they do so during backwards.
        """
        barrier = group_state(group).get_or_create(HostBarrier, lambda: cls(group))
        barrier.devices |= {device} if device is not None else set()
        return barrier

    def come(self) -> None:
        """Say that this rank comes to its next :meth:`meet`, and asks no other anything until then; see [Note: ahead].

        The next is one without a flag. To say so twice is to say it once.
        """
        with self._lock:
            if self._world > 1 and not self._ahead:
                self._come()
                self._ahead = True

    def meet(self, flag: bool | None = None) -> bool:
        """Wait until every rank has come here as often as this one.

        Args:
            flag: Something to tell the others; None if they are not told, nor this rank.

        Returns:
            Whether any rank has told the others that something is true.

        Raises:
            RuntimeError: Not all came within the process group's time-out.
        """
        if self._world == 1:
            return bool(flag)
        with self._lock:  # the backwards of two devices have a thread each
            raised = f"{self._key()}/raised at {self._number + (not self._ahead)}"
            if flag:
                self._store.set(raised, "")
            if not self._ahead:
                self._come()
                self._ahead = True  # whoever is interrupted while it waits comes back to the same meeting
            if not self._open:
                self._wait()
            self._ahead = False
            if self._raised:  # all have looked at it, for all have come here since
                self._store.delete_key(self._raised)
            self._raised = raised if flag else ""
            return flag is not None and (flag or self._store.check([raised]))

    def _come(self) -> None:
        count = self._store.add(self._key(), 1)
        self._number += 1
        self._open = count >= self._number * self._world

    def _wait(self) -> None:
        begin, waited = time.monotonic(), 0.0
        while self._count() < self._number * self._world:
            waited = time.monotonic() - begin
            if waited > self._timeout_s:
                raise RuntimeError(_MISSING.format(self._timeout_s))
            time.sleep(min(waited / 4, self._longest_pause_s))

    def _count(self) -> int:
        return int(self._store.get(self._key())) if self._in_file else self._store.add(self._key(), 0)

    def _key(self) -> str:
        if not self._name:
            group = self._group()
            assert group is not None
            header, _ = PeerRpc.of(group).ask(_TOPIC, {}, ranks=[0])[0]
            self._name = header["name"]
        return f"ovpatch/gate/{self._name}"


def _is_in_file(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


_MISSING = (
    "ovpatch: not all ranks came to the same collective within {:g} s. Look at the output of the others: one may have "
    "ended, hang, or run other steps than this one."
)

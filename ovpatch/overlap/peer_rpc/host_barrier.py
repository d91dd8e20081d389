"""A barrier of the ranks' hosts, which they pass before their devices begin to wait for each other."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from typing import Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import group_state, group_store, group_timeout_s
from ovpatch.overlap.peer_rpc.client import unwrap_store
from ovpatch.overlap.peer_rpc.rpc import PeerRpc

_TOPIC: Final = "host barrier: name"
_LEFT: Final = 1 << 40  # more than all arrivals
_PAUSE_S: Final = 0.0005
_PAUSE_PER_RANK_S: Final = 2e-5


def is_needed(device: torch.device) -> bool:
    """Return whether hosts run ahead of this kind of device."""
    return device.type == "cuda"


class HostBarrier:
    """The host barrier of one process group, from :meth:`for_group`. It has two phases, arrive and wait.

    [Note: hosts before devices] A large pageable copy, such as ``batch.to(device)``, holds a lock of the CUDA driver
    until its stream gets there. If a collective is in front of it, the RPC thread of this rank cannot answer the rank
    that this collective waits for: deadlock. So every rank arrives when it starts a collective, after its last call of
    a peer, and waits for the others before one of its streams waits for that collective. In between a host goes on:
    nothing that it queues is behind the collective. :meth:`defer` arrives, and :meth:`finish` waits.

    ``name`` is what the ranks have agreed to call another barrier, beside that of :meth:`for_group`.
    """

    # The store holds one number per group, which only grows: barrier n is passed when every rank has added n. No rank
    # can be ahead by more than one, since it waits. So the last rank asks the store once, and no keys are left behind.
    # A rank that stays away adds more than all arrivals, so that ranks look for its key only then.

    def __init__(self, group: dist.ProcessGroup, name: str = "") -> None:
        self._world, self._rank = group.size(), group.rank()
        self._group = weakref.ref(group)
        # The devices whose collectives hosts synchronise for. Backwards of several devices reach the barrier in any
        # order, and a flag of one may be taken for another's; so flags mean something with a single device only.
        self.devices: set[torch.device] = set()
        store = group_store(group)
        assert store is not None, "the process group was destroyed"
        self._store, self._in_file = store, _is_in_file(store)
        self._timeout_s = group_timeout_s(group)
        self._number = 0
        self._lock = threading.RLock()  # re-entered if a signal handler reads what is waited for
        self._raised = ""  # the key of the flag that this rank raised last
        self._arrived = self._open = self._deferred = False
        self._longest_pause_s = max(_PAUSE_S, _PAUSE_PER_RANK_S * self._world)  # all ranks poll one store
        self._name = name
        if not name and self._rank == 0:
            # The store may outlive the processes, with the keys of earlier ones in it, so the name must be new.
            made = self._name = uuid.uuid4().hex
            PeerRpc.for_group(group).register(_TOPIC, lambda _: ({"name": made}, []))

    @classmethod
    def for_group(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> HostBarrier:
        """Return the group's barrier. Every rank calls this before the first :meth:`wait`.

        ``device`` is that of the collectives that hosts synchronise for, if they do so during backwards.
        """
        barrier = group_state(group).get_or_create(HostBarrier, lambda: cls(group))
        barrier.devices |= {device} if device is not None else set()
        return barrier

    def arrive(self) -> None:
        """Count this rank for the next barrier. It must call no peer until its next :meth:`wait`, without a flag.

        A second call before that wait does nothing.
        """
        with self._lock:
            self.finish()
            if self._world > 1 and not self._arrived:
                self._arrive()
                self._arrived = True

    def defer(self) -> None:
        """Arrive, if this rank has not, and leave the wait to :meth:`finish`."""
        with self._lock:
            self.arrive()
            self._deferred = self._world > 1

    def finish(self) -> None:
        """Wait as :meth:`wait` does, if that was deferred and has not been done since."""
        if self._deferred:
            with self._lock:
                if self._deferred:
                    self._pass(None)

    def stay_away(self) -> None:
        """Pass the next barrier without waiting: ranks that wait there raise an error. Others may pass it alike."""
        with self._lock:
            self.finish()
            if self._world > 1:
                key, arrives = self._key(), not self._arrived
                self._number += arrives
                self._store.set(f"{key}/left at {self._number}", "")
                self._store.add(key, _LEFT + arrives)
                self._arrived = False

    def wait(self, flag: bool | None = None) -> bool:
        """Wait until every rank has arrived as often as this one; return whether the flag of any rank is true.

        Without flags on all ranks, none are exchanged. RuntimeError if not all ranks arrived within the process group's
        time-out, or if one stays away.
        """
        if self._world == 1:
            return bool(flag)
        with self._lock:  # the backwards of two devices run on a thread each
            self.finish()
            return self._pass(flag)

    def _pass(self, flag: bool | None) -> bool:
        raised = f"{self._key()}/raised at {self._number + (not self._arrived)}"
        if flag:
            self._store.set(raised, "")
        if not self._arrived:
            self._arrive()
            self._arrived = True  # a rank that is interrupted below returns to the same barrier
        if not self._open:
            self._poll_store()
        self._arrived = self._deferred = False
        if self._raised:  # all ranks have read it, for all have arrived since
            self._store.delete_key(self._raised)
        self._raised = raised if flag else ""
        return flag is not None and (flag or self._store.check([raised]))

    def _arrive(self) -> None:
        count = self._store.add(self._key(), 1)
        self._number += 1
        self._open = self._is_open(count)

    def _is_open(self, count: int) -> bool:
        left, arrived = divmod(count, _LEFT)
        if left and self._store.check([f"{self._key()}/left at {self._number}"]):
            raise RuntimeError(_STAYED_AWAY)
        return arrived >= self._number * self._world

    def _poll_store(self) -> None:
        begin, waited = time.monotonic(), 0.0
        while not self._is_open(self._count()):
            waited = time.monotonic() - begin
            if waited > self._timeout_s:
                raise RuntimeError(_MISSING.format(self._timeout_s))
            time.sleep(min(waited / 8, self._longest_pause_s))

    def _count(self) -> int:
        # To add 0 takes one message where get() takes two; but a store in a file would grow by each addition.
        return int(self._store.get(self._key())) if self._in_file else self._store.add(self._key(), 0)

    def _key(self) -> str:
        if not self._name:
            group = self._group()
            assert group is not None
            header, _ = PeerRpc.for_group(group).call(_TOPIC, {}, ranks=[0])[0]
            self._name = header["name"]
        return f"ovpatch/host barrier/{self._name}"


def _is_in_file(store: dist.Store) -> bool:
    return isinstance(unwrap_store(store), dist.FileStore)


_MISSING = (
    "ovpatch: not all ranks came to the same collective within {:g} s. Look at the output of the others: one may have "
    "ended, hang, or run other steps than this one."
)

_STAYED_AWAY = (
    "ovpatch: a rank does not come to this collective, because it stepped its optimizer with gradients that "
    "DistributedDataParallel had not reduced (no_sync(), or a forward around the wrapper), or stepped another "
    "optimizer than this rank. Do the same on every rank, or turn dist_optimizer off."
)

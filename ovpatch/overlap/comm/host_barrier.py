"""A barrier of the ranks' hosts, for collectives in which devices wait for each other.

It carries no values but a flag and a tag. It is one of three ways for ranks to agree, see
``comm.consensus``.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import abort_transport
from ovpatch.overlap.comm.consensus import (
    LATE_START_S,
    RankMismatchError,
    agree_on_name,
    describe_missing,
    wait_limit_s,
)
from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_store,
    group_timeout_s,
    unwrap_store,
)
from ovpatch.overlap.comm.step_communicators import abort_step_communicators

_TOPIC: Final = "host barrier"
# This many barriers share two keys of the store, so that a count of arrivals needs few bits.
_BLOCK_BARRIERS: Final = 1 << 12
# Stores have signed numbers of 64 bits.
_NUMBER_BITS: Final = 63
_MAX_TAG_BITS: Final = 30
_MAX_PAUSE_S: Final = 0.0005
_MAX_PAUSE_PER_RANK_S: Final = 2e-5


def is_needed(device: torch.device) -> bool:
    """Return whether hosts run ahead of this kind of device."""
    return device.type == "cuda"


class HostBarrier:
    """The host barrier of one process group, see :meth:`for_group`. Ranks arrive at it, then wait.

    [Note: hosts before devices] A large copy from pageable memory, such as ``batch.to(device)``,
    holds a lock of the CUDA driver until its stream reaches it. If a collective precedes the copy,
    this rank cannot reply to a peer that calls it before it starts the same collective: a deadlock.
    So a host arrives when it starts a collective, after its last call to a peer. It waits for its
    peers before one of its streams waits for the collective. In between, the host continues,
    because no stream has the collective before the host's other work.

    Barriers pair by position, and so do the collectives for which hosts meet. So each arrival
    carries a tag of its collective. If tags differ, no rank passes, and later calls raise as well.
    So ranks raise before a stream waits for values that belong to another collective. Backwards and
    steps may interleave differently on each rank, so steps have their own barrier.

    Args:
        group: The process group. Each of its ranks creates the barrier.
        name: A name that all ranks have agreed on, and that no other barrier has. Default: the
            ranks agree on a new name when they first arrive.
        topic: The topic under which ranks agree on the name.

    Attributes:
        devices: The devices whose collectives the hosts synchronize for. The backwards of several
            devices reach the barrier in any order, so the flag of one may be read as the flag of
            another. Flags are valid only if there is a single device.
    """

    # Barriers with even and odd numbers have one number each in the store. Its fields are, from the
    # lowest bits, the count of arrivals, the sum of the ranks' tags, and the count of ranks that
    # have ever aborted. An arriving rank replaces its last tag in the sum. No rank is ahead of its
    # peers by more than one barrier, because it waits for them. So while a rank reads the number of
    # its barrier, no peer has arrived at the next barrier with the same number. The last rank to
    # arrive polls the store once, and a long job leaves few keys. If any rank has aborted, each peer
    # looks for the key of its barrier.

    def __init__(self, group: dist.ProcessGroup, name: str = "", topic: str = _TOPIC) -> None:
        store = group_store(group)
        assert store is not None, "the process group was destroyed"
        # Whether a failed deferred wait aborts the group's own collectives; see `for_group`.
        self._should_abort_collectives = False
        # The barrier must not keep the group alive after destroy_process_group().
        self._group = weakref.ref(group)
        self._world = group.size()
        self._timeout_s = group_timeout_s(group)
        self.devices: set[torch.device] = set()

        # - Store
        self._store = store
        self._is_in_file = _is_in_file(store)
        self._name = name
        self._topic = topic
        rank_bits = self._world.bit_length()
        count_bits = (_BLOCK_BARRIERS // 2 * self._world).bit_length()
        tag_bits = max(0, min(_MAX_TAG_BITS, _NUMBER_BITS - count_bits - 2 * rank_bits))
        self._tag_mask = (1 << tag_bits) - 1
        # One tag, and one abort, in the number of a barrier.
        self._tag_unit = 1 << count_bits
        self._abort_unit = self._tag_unit << (tag_bits + rank_bits)
        # All ranks poll one store, so each rank of a large group must poll less often.
        self._max_pause_s = max(_MAX_PAUSE_S, _MAX_PAUSE_PER_RANK_S * self._world)

        # - State
        # The backwards of two devices run on one thread each. A signal handler may interrupt a
        # wait and read a gradient, which waits as well, so the lock must be reentrant.
        self._lock = threading.RLock()
        # Barriers that this rank has arrived at.
        self._arrivals = 0
        # The newest tag of this rank in the numbers of barriers with even and odd numbers.
        self._tags = [0, 0]
        # The keys whose numbers count this rank among those that have aborted.
        self._aborted_keys: set[str] = set()
        # The reason why no rank passes again, "" without one.
        self._failure = ""
        # Whether this rank has arrived at a barrier that it has not passed.
        self._has_arrived = False
        # Whether all ranks had arrived when this rank did.
        self._is_open = False
        # Whether this rank must wait in `finish`.
        self._must_finish = False
        # The key of the flag that this rank raised at the last barrier, "" without one.
        self._raised_key = ""

    @classmethod
    def for_group(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> HostBarrier:
        """Return the barrier of a process group, created by the first call.

        Every rank of the group must call this before its peers wait at the barrier. A rank that
        has deferred a wait has collectives in flight. If a peer does not arrive, the rank aborts
        them, because they would never end.

        Args:
            group: The process group.
            device: The device to add to :attr:`devices`. Default: none.
        """
        barrier = group_state(group).get_or_create(HostBarrier, lambda: cls(group))
        barrier._should_abort_collectives = True
        if device is not None:
            barrier.devices.add(device)
        return barrier

    @classmethod
    def for_steps(cls, group: dist.ProcessGroup) -> HostBarrier:
        """Return the barrier of the steps over a group's models, created by the first call.

        A failed deferred wait aborts collectives, as that of :meth:`for_group` does.
        """
        barrier = group_state(group).get_or_create(
            (HostBarrier, "steps"), lambda: cls(group, topic=f"{_TOPIC} of steps")
        )
        barrier._should_abort_collectives = True
        return barrier

    def arrive(self, tag: int = 0) -> None:
        """Count this rank at the next barrier; a second call before :meth:`wait` does nothing.

        The rank must not call peers until it has waited, and must wait without a flag.

        Args:
            tag: A number that names the collective. It must be the same on all ranks.
        """
        with self._lock:
            self.finish()
            if self._world > 1 and not self._has_arrived:
                self._arrive(tag)

    def defer_wait(self) -> None:
        """Arrive, unless this rank has arrived, and leave the wait to :meth:`finish`."""
        with self._lock:
            self.arrive()
            self._must_finish = self._world > 1

    def finish(self) -> None:
        """Do the wait that :meth:`defer_wait` deferred; do nothing without one.

        Every other method does so first. The collectives for which the hosts meet are in flight, so
        a failure aborts them, whichever method finds it.

        Raises:
            RuntimeError: See :meth:`wait`.
        """
        if self._failure:
            raise RuntimeError(self._failure)
        if self._must_finish:
            with self._lock:
                # Another thread may have waited while this one waited for the lock.
                if self._must_finish:
                    try:
                        self._pass(None)
                    except RuntimeError:
                        self._abort_collectives()
                        raise

    def _abort_collectives(self) -> None:
        group = self._group()
        if self._should_abort_collectives and group is not None:
            abort_step_communicators(group)
            abort_transport(group)

    def wait(self, flag: bool | None = None, tag: int = 0) -> bool:
        """Arrive, wait until all ranks have arrived, and return whether any rank raised its flag.

        Args:
            flag: Whether this rank raises its flag. Default: ranks exchange no flags; then all of
                them must omit it.
            tag: As for :meth:`arrive`.

        Raises:
            RuntimeError: Some rank does not arrive within the timeout of the process group, or
                aborts, or has another tag.
        """
        if self._world == 1:
            return bool(flag)
        with self._lock:
            self.finish()
            return self._pass(flag, tag)

    def abort(self) -> None:
        """Pass the next barrier without waiting, and make the ranks that wait there raise an error.

        Several ranks may abort the same barrier. If no rank has ever arrived, this rank waits for
        its peers, but not forever: see the remark on names below.

        Raises:
            RuntimeError: A deferred wait failed, see :meth:`wait`.
        """
        with self._lock:
            self.finish()
            if self._world == 1:
                return
            try:
                key = self._get_key(is_aborting=True)
            except RankMismatchError:
                # Peers that wait at the barrier would have agreed on its name. There are none.
                return
            share = 0 if self._has_arrived else self._count_arrival(0)
            number_key = self._get_number_key()
            if number_key not in self._aborted_keys:
                self._aborted_keys.add(number_key)
                share += self._abort_unit
            # A peer that reads the number must find the key.
            self._store.set(f"{key}/aborted at {self._arrivals}", "")
            self._store.add(number_key, share)
            self._has_arrived = False

    def _pass(self, flag: bool | None, tag: int = 0) -> bool:
        number = self._arrivals + (not self._has_arrived)
        key = f"{self._get_key()}/raised at {number}"
        # Peers read the flag as soon as the last rank has arrived.
        if flag:
            self._store.set(key, "")
        if not self._has_arrived:
            self._arrive(tag)
        if not self._is_open:
            self._poll_store()
        self._has_arrived = False
        self._must_finish = False
        # All ranks have arrived again, so they have read the flag of the barrier before.
        if self._raised_key:
            self._store.delete_key(self._raised_key)
        self._raised_key = key if flag else ""
        return flag is not None and (flag or self._store.check([key]))

    def _arrive(self, tag: int) -> None:
        # Ranks may still have to agree on the name, so this precedes the count.
        self._get_key()
        share = self._count_arrival(tag & self._tag_mask)
        count = self._store.add(self._get_number_key(), share)
        # If a peer has aborted this barrier, the check raises, and this rank continues with the
        # next barrier, as the peer does. A rank that had arrived before stays at this barrier, so
        # that each later read of the step's values raises as well.
        self._is_open = self._have_all_arrived(count)
        # From here on, an interrupted rank returns to the same barrier.
        self._has_arrived = True

    def _count_arrival(self, tag: int) -> int:
        """Count this rank at its next barrier; return the addend for the barrier's number."""
        place = self._arrivals % _BLOCK_BARRIERS
        # The first two barriers of a block have new keys, whose numbers are 0.
        replaced = self._tags[place % 2] if place >= 2 else 0
        self._tags[place % 2] = tag
        self._arrivals += 1
        return 1 + (tag - replaced) * self._tag_unit

    def _have_all_arrived(self, count: int) -> bool:
        aborts, count = divmod(count, self._abort_unit)
        # The number keeps the aborts of earlier barriers, so only the key names the barrier.
        if aborts and self._store.check([f"{self._get_key()}/aborted at {self._arrivals}"]):
            raise RuntimeError(_ERROR_ABORTED)
        tags, arrivals = divmod(count, self._tag_unit)
        place = (self._arrivals - 1) % _BLOCK_BARRIERS
        if arrivals < (place // 2 + 1) * self._world:
            return False
        if tags != self._tags[place % 2] * self._world:
            self._failure = _ERROR_OTHER_TAG
            self._abort_collectives()
            raise RuntimeError(self._failure)
        return True

    def _poll_store(self) -> None:
        begin = time.monotonic()
        waited_s = 0.0
        while not self._have_all_arrived(self._read_count()):
            waited_s = time.monotonic() - begin
            if waited_s > self._timeout_s:
                # The store has the number of arrivals alone, so the missing ranks are unknown.
                missing = describe_missing("the same collective", self._timeout_s)
                raise RuntimeError(f"ovpatch: {missing}. {_REMEDY_MISSING}")
            # Short waits are common and must end quickly.
            time.sleep(min(waited_s / 8, self._max_pause_s))

    def _read_count(self) -> int:
        key = self._get_number_key()
        # Adding 0 takes one message, while get() takes two. But a store in a file grows by each
        # addition.
        return int(self._store.get(key)) if self._is_in_file else self._store.add(key, 0)

    # The ranks agree on the name at their first arrival and not when they create the barrier,
    # because a rank may create it in a forward that its peers do not run. The first barrier waits
    # for all ranks anyway. `abort` must not: it gives up before peers that wait for this rank in a
    # collective do.

    def _get_key(self, *, is_aborting: bool = False) -> str:
        if not self._name:
            group = self._group()
            assert group is not None
            limit_s = wait_limit_s(group, LATE_START_S) if is_aborting else self._timeout_s
            self._name = agree_on_name(
                group, self._topic, timeout_s=limit_s, remedy=_REMEDY_MISSING
            )
        return f"ovpatch/host barrier/{self._name}"

    def _get_number_key(self) -> str:
        """Return the key of the number of the barrier at which this rank has last arrived."""
        block, place = divmod(self._arrivals - 1, _BLOCK_BARRIERS)
        return f"{self._get_key()}/{block}/{place % 2}"


def _is_in_file(store: dist.Store) -> bool:
    return isinstance(unwrap_store(store), dist.FileStore)


_REMEDY_MISSING: Final = (
    "Check the output of its peers: a rank may have exited, hang, or run other steps "
    "than this rank."
)
_ERROR_OTHER_TAG: Final = (
    "ovpatch: ranks have stepped, clipped or unscaled optimizers in orders that differ, or over "
    "different parameters, so the values of the last step could not be gathered. Use the same "
    "order on every rank (a set has none), or turn dist_optimizer off."
)
_ERROR_ABORTED: Final = (
    "ovpatch: a rank does not join this collective, because it stepped its optimizer with "
    "gradients that DistributedDataParallel had not reduced (no_sync(), or a forward around the "
    "wrapper), or stepped another optimizer than this rank. Do the same on every rank, or turn "
    "dist_optimizer off."
)

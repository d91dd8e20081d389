"""Calls to the other ranks of a process group, each of which answers on a thread of its own.

User code may read on one rank alone what is sharded over all. No collective can serve that read. So every rank runs a
small server, and the reading rank calls it. A rank keeps answering, and keeps what peers may still read, until all of
them have said that they read no more, or have joined a later backward.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)
from ovpatch.overlap.peer_rpc.client import ENDED, MAX_CONNECTIONS, Endpoints, Replies, Request, list_own_addresses
from ovpatch.overlap.peer_rpc.server import Handler, Server

AT_EXIT_S = 300.0  # without a call, after which a process that exits no longer waits for its peers


class PeerError(RuntimeError):
    """A rank did not answer, or could not. The text names ranks, reasons and remedy."""


class PeerRpc:
    """Calls to the other ranks of a process group; one object per group, from :meth:`for_group`.

    A forked child is no rank: it neither calls nor serves.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size, self._pid = group.rank(), group.size(), os.getpid()
        self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self._size)]
        self._timeout_s = group_timeout_s(group)
        self._endpoints = Endpoints(group)
        endpoints = self._endpoints  # not self, which the server's threads would keep alive
        self._server = Server(
            str(group.group_name),
            list_own_addresses(group_store(group)),
            lambda: endpoints.is_destroyed() and not _exiting,
        )
        self._shutdown_barrier = Shutdown(self._rank, self._global_ranks, self._endpoints, self._server)
        self._endpoints.publish(self._rank, self._server.endpoint)
        weakref.finalize(group, self._server.close).atexit = False

    @classmethod
    def for_group(cls, group: dist.ProcessGroup) -> PeerRpc:
        """Return the group's object; the first call starts this process's server. No collective.

        Ranks find each other by this call: every rank makes it before the feature's first collective. PeerError in a
        fork of a rank that had none.
        """
        state = group_state(group)
        if state.is_forked and PeerRpc not in state.values:
            raise PeerError(_FORKED)
        with state.lock:
            return state.get_or_create(PeerRpc, lambda: cls._start(group))

    @classmethod
    def _start(cls, group: dist.ProcessGroup) -> PeerRpc:
        for _, other in group_values(PeerRpc):
            if other._endpoints.is_destroyed():  # the group object may still be referenced
                other._server.close()
        register_at_exit(_at_exit)
        return cls(group)

    def register(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Answer calls for a topic from now on, on threads of the server; return a function that withdraws the handler.

        The handler maps the arguments, JSON values, to JSON values and dense CPU tensors, which are read until the peer
        has received them. It may block, and runs on several threads at a time. It is kept until withdrawn, so it should
        reference its owner weakly. The caller raises what it raises. Calls after the withdrawal wait for a new one.
        ValueError if the topic is registered already, PeerError in a fork.
        """
        self._check_process()
        self._shutdown_barrier.used = True
        return self._server.register(topic, handler)

    def call(
        self,
        topic: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Replies:
        """Call several ranks at the same time, by default all others; return header and CPU tensors by group rank.

        The arguments are JSON values. A rank that has not registered the topic yet is waited for, by default until the
        process group's time-out. PeerError if a rank failed, has ended or did not answer in time, or in a fork.
        """
        wanted = [rank for rank in range(self._size) if rank != self._rank] if ranks is None else list(ranks)
        self._check_process()
        self._check(wanted)
        self._shutdown_barrier.used = True
        limit_s, begin = self._timeout_s if timeout_s is None else timeout_s, time.monotonic()
        request = Request(
            self._endpoints,
            sorted(wanted, key=lambda rank: (rank - self._rank) % self._size),  # each rank begins with other peers
            {"topic": topic, "arguments": dict(arguments)},
            begin + limit_s,
            retry=not self._endpoints.is_destroyed(),  # peers that destroyed the group refuse all calls, for good
            max_connections=MAX_CONNECTIONS,
        )
        try:
            request.run()
        except RuntimeError as error:
            raise PeerError(_NO_STORE) from error
        if request.failures or request.pending():
            self._raise(topic, request, time.monotonic() - begin)
        return {rank: request.replies[rank] for rank in wanted}

    @staticmethod
    def is_destroyed(group: dist.ProcessGroup) -> bool:
        """Return whether the group had an object and was destroyed, so that its ranks cannot be called any more."""
        return any(rpc._endpoints.is_destroyed() for _, rpc in group_values(PeerRpc, group))

    @staticmethod
    def shutdown_all(group: dist.ProcessGroup | None = None) -> None:
        """Keep answering, in all groups or in one, until all ranks have called this; see :class:`Shutdown`.

        Runs by itself when the interpreter exits without an exception, if this rank has registered or called. Call it
        before ``destroy_process_group()``: after that, ranks cannot find each other. A rank that never called
        :meth:`for_group`, or that has died, is not waited for. This rank gives up after :data:`AT_EXIT_S` seconds
        without a call.
        """
        run_shutdown([rpc._shutdown_barrier for _, rpc in group_values(PeerRpc, group)], AT_EXIT_S)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PeerError(_FORKED)

    def _check(self, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if not 0 <= rank < self._size]
        if unknown:
            raise ValueError(f"ovpatch: group ranks are 0 to {self._size - 1}, not {unknown}; pass ranks of the group")
        if self._endpoints.is_destroyed() and not all(map(self._endpoints.verified.get, ranks)):
            raise PeerError(_DESTROYED)

    def _raise(self, topic: str, request: Request, seconds: float) -> None:
        # A rank whose reply was only cut short by another's failure is not to blame.
        reasons = request.failures or request.pending()
        text = "; ".join(f"rank {self._global_ranks[rank]} {reason}" for rank, reason in sorted(reasons.items()))
        causes = [f"on rank {self._global_ranks[rank]}:\n{trace}" for rank, trace in sorted(request.tracebacks.items())]
        has_ended = any(reason in ENDED for reason in reasons.values())
        remedy = _REMEDY_ENDED if has_ended else _REMEDY if request.retry else _REMEDY_DESTROYED
        remedy = _REMEDY_FAILED if causes else remedy
        message = f"ovpatch: no answer to '{topic}' within {seconds:.3g} s: {text.rstrip('.')}. {remedy}"
        if causes:
            raise PeerError(message) from RuntimeError("\n".join(causes))
        raise PeerError(message)  # without "from": what is in flight, as in a finally, is to be seen


def _at_exit() -> None:
    global _exiting
    _exiting = True
    if not is_exiting_by_error():
        PeerRpc.shutdown_all()
    for _, rpc in group_values(PeerRpc):
        rpc._server.close()


_exiting = False

_REMEDY = (
    "Look at that rank's output: it may have ended, hang, or run without ovpatch, which is active where "
    "ovpatch.apply() was called before the model was wrapped. If it only needs longer, give init_process_group() a "
    "larger timeout."
)
_REMEDY_ENDED = (
    "Look for the first error in the output of the rank that has ended, correct it, and start the job again."
)
_REMEDY_FAILED = "The cause is on that rank: correct it there."
_NO_STORE = (
    "ovpatch: the process group's store does not answer, so ranks cannot be found. Look at the output of the rank that "
    "hosts it, normally rank 0: keep that process until all others have ended."
)
_REMEDY_DESTROYED = (
    "The process group was destroyed, so its other ranks cannot be asked any more. Read what needs them, such as "
    "optimizer.state_dict(), before destroy_process_group()."
)
_DESTROYED = f"ovpatch: {_REMEDY_DESTROYED[0].lower()}{_REMEDY_DESTROYED[1:]}"
_FORKED = (
    "ovpatch: gradients or optimizer state are sharded over ranks, and a forked process is not a rank of its parent's "
    "process group. Read it before the fork, or in the parent."
)


# --- how long a rank keeps answering, and keeps what peers may read ---


_log = logging.getLogger("ovpatch.peers")


class Shutdown:
    """One rank's part in the shutdown of a process group: it answers until its peers have finished, too.

    [Note: shutdown order] Group rank 0 asks every other rank to reply once it has finished, and the others ask rank 0
    to reply once all have. These connections break by themselves when a process dies, so there is no polling, and no
    wait for the dead. The store, which may end with its host, is needed to look up addresses only. A process with
    several groups first reports in all of them that it has finished, then collects where it is rank 0, then waits where
    it is not: so no two ranks wait for each other.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int], endpoints: Endpoints, server: Server) -> None:
        self.rank, self.used, self.entered = rank, False, False
        self._global_ranks, self._endpoints, self.server, self.pid = global_ranks, endpoints, server, os.getpid()

    def is_needed(self) -> bool:
        """Return whether peers may still call: this rank has registered, called or been called."""
        return self.used or self.server.called_at > 0

    def wait(self, timeout_s: float) -> None:
        """Wait until the ranks that this rank collects from have finished or died."""
        ranks = [0] if self.rank else range(1, len(self._global_ranks))
        begin = time.monotonic()
        request = Request(self._endpoints, ranks, {"shutdown": True}, begin + timeout_s, retry=False)
        try:
            while request.pending() and time.monotonic() < request.deadline:
                request.poll()
                request.deadline = max(begin, self.server.called_at) + timeout_s
        except RuntimeError as error:
            _log.debug("the store is gone, and so are the addresses of ranks to wait for: %s", error)
        finally:
            request.close()
        if request.pending():
            late = ", ".join(str(self._global_ranks[rank]) for rank in request.pending())
            _log.warning("rank %s has not come to its end in %g s and is not waited for any longer", late, timeout_s)


def run_shutdown(barriers: Iterable[Shutdown], timeout_s: float) -> None:
    """Shut several process groups down; see [Note: shutdown order].

    A group is left anyway after ``timeout_s`` seconds without a call.
    """
    due = [barrier for barrier in barriers if not barrier.entered and os.getpid() == barrier.pid]  # a fork has none
    for barrier in due:
        barrier.entered = True
        if barrier.rank or not barrier.is_needed():
            barrier.server.finish()
    needed = [barrier for barrier in due if barrier.is_needed()]
    for barrier in [barrier for barrier in needed if barrier.rank == 0]:
        barrier.wait(timeout_s)
        barrier.server.finish()
    for barrier in [barrier for barrier in needed if barrier.rank]:
        barrier.wait(timeout_s)

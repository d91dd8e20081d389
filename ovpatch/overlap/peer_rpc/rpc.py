"""Calls to the peers of a process group, which reply on the threads of their servers.

A script may read on one rank alone what is sharded over all ranks, so no collective can serve that
read. Therefore every rank runs a small server, and the reading rank calls it. A rank serves calls
until all of its peers have finished, see :class:`Shutdown`.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist

from ovpatch.overlap.comm.consensus import describe_missing, known_hosts, name_ranks
from ovpatch.overlap.comm.lifetimes import (
    drop_destroyed,
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.client import (
    EXIT_REASONS,
    MAX_CONNECTIONS,
    REASON_UNREACHABLE,
    Endpoints,
    Replies,
    Request,
    list_own_addresses,
)
from ovpatch.overlap.peer_rpc.server import Handler, Server

# A rank at its end stops waiting for its peers if it has received no call for this time.
AT_EXIT_S = 300.0


class PeerError(RuntimeError):
    """A rank did not reply, or could not. The message has the ranks, reasons and remedy."""


class PeerRpc:
    """Calls between the ranks of one process group, see :meth:`for_group`.

    A forked child is not a rank, so it can neither call nor serve.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        self._size = group.size()
        self._pid = os.getpid()
        self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self._size)]
        # Errors need the names after the group was destroyed as well.
        self._hosts = known_hosts(group)
        self._timeout_s = group_timeout_s(group)
        self._endpoints = Endpoints(group)
        reference = weakref.ref(group)
        # The threads of the server would keep `self` alive, so they get a function without it.
        self._server = Server(
            str(group.group_name),
            list_own_addresses(group_store(group)),
            functools.partial(_should_refuse, self._endpoints, reference),
        )
        self._shutdown = Shutdown(
            self._rank,
            self._global_ranks,
            self._endpoints,
            self._server,
            self._hosts,
            lambda: retention.list_awaited_ranks(reference()),
        )
        self._endpoints.publish(self._rank, self._server.endpoint)
        # At exit, `_at_exit` closes the server, after the shutdown.
        weakref.finalize(group, self._server.close).atexit = False

    @classmethod
    def for_group(cls, group: dist.ProcessGroup) -> PeerRpc:
        """Return the object of a process group; the first call starts the server of this process.

        The call is not a collective. But ranks find each other only after it, so every rank must
        make it before the first collective of the feature.

        Raises:
            PeerError: This process is a fork of a rank that had not made the call.
        """
        state = group_state(group)
        if state.is_forked and PeerRpc not in state.values:
            raise PeerError(_ERROR_FORKED)
        # Two threads must not start two servers.
        with state.lock:
            return state.get_or_create(PeerRpc, lambda: cls._start(group))

    @classmethod
    def _start(cls, group: dist.ProcessGroup) -> PeerRpc:
        # A script may hold a destroyed group, and so may the objects that peers still read. Then its
        # finalizer would not close the server.
        drop_destroyed()
        for _, rpc in group_values(PeerRpc):
            if rpc._endpoints.is_destroyed():
                rpc._server.close()
        register_at_exit(_at_exit)
        return cls(group)

    def register(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Serve calls for a topic on threads of the server.

        The handler may block, and several threads may run it. It is referenced until it is
        withdrawn, so it should reference its owner weakly. A call that finds no handler waits for
        one until the caller's timeout, also after a withdrawal.

        Args:
            topic: A name that no other handler has in the process group.
            handler: Maps the arguments, JSON values, to a header of JSON values and dense CPU
                tensors. The server reads the tensors until the caller has received them. If the
                handler raises, the caller raises :class:`PeerError`.

        Returns:
            A function that withdraws the handler.

        Raises:
            ValueError: The topic has a handler.
            PeerError: This process is a fork.
        """
        self._check_process()
        self._shutdown.is_used = True
        return self._server.register(topic, handler)

    def call(
        self,
        topic: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Replies:
        """Call several ranks concurrently and return their headers and CPU tensors.

        A rank that has not registered the topic has until the timeout to do so.

        Args:
            topic: The name of the handler on the called ranks.
            arguments: JSON values.
            ranks: The group ranks to call. Default: all peers.
            timeout_s: Default: the timeout of the process group.

        Returns:
            The replies, by group rank.

        Raises:
            PeerError: A rank failed, has exited, or did not reply in time, or this process is a
                fork.
        """
        self._check_process()
        if ranks is None:
            ranks = [rank for rank in range(self._size) if rank != self._rank]
        self._check_ranks(ranks)
        self._shutdown.is_used = True
        begin = time.monotonic()
        request = Request(
            self._endpoints,
            # If all ranks call all ranks, each must start with different peers.
            sorted(ranks, key=lambda rank: (rank - self._rank) % self._size),
            {"topic": topic, "arguments": dict(arguments)},
            begin + (self._timeout_s if timeout_s is None else timeout_s),
            # Peers that have destroyed the group refuse all calls, so a retry cannot succeed.
            should_retry=not self._endpoints.is_destroyed(),
            max_connections=MAX_CONNECTIONS,
        )
        try:
            request.run()
        except RuntimeError as error:
            raise PeerError(_ERROR_NO_STORE) from error
        if request.failures or request.list_pending():
            self._raise_failures(topic, request, time.monotonic() - begin)
        return {rank: request.replies[rank] for rank in ranks}

    @staticmethod
    def is_destroyed(group: dist.ProcessGroup) -> bool:
        """Return whether the ranks of a group can no longer be called, because it was destroyed.

        The result is False if no call or handler has ever used the group.
        """
        return any(rpc._endpoints.is_destroyed() for _, rpc in group_values(PeerRpc, group))

    @staticmethod
    def shutdown_all(group: dist.ProcessGroup | None = None) -> None:
        """Serve calls until all ranks have called this function; see :class:`Shutdown`.

        It runs at exit of an interpreter that no exception ends, if this rank has registered or
        called. Call it before ``destroy_process_group()``, after which ranks cannot find each
        other. It does not wait for ranks that are dead or have never used :meth:`for_group`, and
        for live ones at most :data:`AT_EXIT_S` seconds after the last call.

        Args:
            group: The process group. Default: all groups.
        """
        run_shutdown([rpc._shutdown for _, rpc in group_values(PeerRpc, group)], AT_EXIT_S)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PeerError(_ERROR_FORKED)

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if not 0 <= rank < self._size]
        if unknown:
            raise ValueError(
                f"ovpatch: group ranks are 0 to {self._size - 1}, not {unknown}. Pass ranks of the "
                "group."
            )
        # The store of a destroyed group is unknown, but a rank that was reached before has an
        # endpoint.
        if self._endpoints.is_destroyed() and not all(map(self._endpoints.verified.get, ranks)):
            raise PeerError(_ERROR_DESTROYED)

    def _raise_failures(self, topic: str, request: Request, seconds: float) -> None:
        # The failure of one rank cuts the calls of the pending ranks short, so the message must
        # not blame these.
        reasons = request.failures or request.list_pending()
        names = {
            rank: f"rank {name_ranks([global_rank], self._hosts)}"
            for rank, global_rank in enumerate(self._global_ranks)
        }
        details = "; ".join(f"{names[rank]} {reason}" for rank, reason in sorted(reasons.items()))
        causes = [
            f"on {names[rank]}:\n{trace}" for rank, trace in sorted(request.tracebacks.items())
        ]
        if causes:
            remedy = _REMEDY_FAILED
        elif any(reason in EXIT_REASONS for reason in reasons.values()):
            remedy = _REMEDY_EXITED
        elif self._hosts and any(map(_is_unreachable, reasons.values())):
            remedy = _REMEDY_ROUTE
        else:
            remedy = _REMEDY_SILENT if request.should_retry else _REMEDY_DESTROYED
        message = f"ovpatch: no reply to '{topic}' within {seconds:.3g} s: {details.rstrip('.')}. {remedy}"
        if causes:
            raise PeerError(message) from RuntimeError("\n".join(causes))
        # Without "from", the traceback shows an exception in flight, as in a finally block.
        raise PeerError(message)


def _should_refuse(
    endpoints: Endpoints,
    group: weakref.ref[dist.ProcessGroup],
    message: Mapping[str, Any] | None,
) -> bool:
    """Return whether a server refuses a message, or all messages if it is None.

    A rank that has destroyed its group refuses calls, see [Note: stale endpoints]. But a rank may
    turn a feature off and destroy the group before its peers have read, so it serves their final
    calls. At exit, it serves all calls.
    """
    if _is_exiting or not endpoints.is_destroyed():
        return False
    if message is not None:
        return not retention.is_final(message.get("arguments", {}))
    return not retention.has_retained(group())


def _is_unreachable(reason: str) -> bool:
    return reason.startswith(REASON_UNREACHABLE)


def _at_exit() -> None:
    global _is_exiting
    _is_exiting = True
    if not is_exiting_by_error():
        PeerRpc.shutdown_all()
    for _, rpc in group_values(PeerRpc):
        rpc._server.close()


_is_exiting = False

_REMEDY_SILENT: Final = (
    "Check the output of that rank: it may have exited, hang, or run without ovpatch, which is "
    "active if ovpatch.apply() was called before the model was wrapped. If it only needs more "
    "time, "
    "give init_process_group() a larger timeout."
)
_REMEDY_ROUTE: Final = (
    "Check the output of that rank, and whether its host has a route from here that is open for "
    "all ports: ranks read from each other at ports that the system chooses. If it is closed, turn "
    "dist_optimizer off."
)
_REMEDY_EXITED: Final = (
    "Look for the first error in the output of the rank that has exited, correct it, and "
    "start the job again."
)
_REMEDY_FAILED: Final = "The cause is on that rank: correct it there."
_REMEDY_DESTROYED: Final = (
    "The process group was destroyed, so its ranks can no longer be called. Read the tensors that "
    "need them, such as those of optimizer.state_dict(), before destroy_process_group()."
)
_ERROR_DESTROYED: Final = (
    "ovpatch: a rank was called after its process group had been destroyed. Read the tensors that "
    "need it, such as those of optimizer.state_dict(), before destroy_process_group()."
)
_ERROR_NO_STORE: Final = (
    "ovpatch: the store of the process group does not reply, so ranks cannot find each other. "
    "Check "
    "the output of the rank that hosts the store, normally rank 0: keep that process until all "
    "ranks have finished."
)
_ERROR_FORKED: Final = (
    "ovpatch: gradients or optimizer state are sharded over ranks, and a forked process is not a "
    "rank of its parent's process group. Read it before the fork, or in the parent."
)


# --- the end of a rank ---


_log = logging.getLogger("ovpatch.peers")


class Shutdown:
    """The part of one rank in the shutdown of a process group: it serves calls until all finish.

    [Note: shutdown order] Group rank 0 calls every peer, which replies once it has finished. Every
    peer calls rank 0, which replies once all have finished. If a process dies, its connections
    break, so ranks need neither poll nor wait for it. They need the store only to look up
    addresses, because it may end with its host. A process with several groups first reports in all
    of them that it has finished. Then it collects in the groups where it is rank 0, and waits in
    the remaining groups last. So no two ranks wait for each other.

    Args:
        rank: The group rank of this process.
        global_ranks: The global rank of each group rank.
        endpoints: The endpoints of the ranks.
        server: The server of this process.
        hosts: The known host names of the ranks, by global rank.
        list_awaited: Returns the group ranks whose final calls this rank has not served.

    Attributes:
        is_used: Whether this rank has registered a handler or called a peer.
        has_started: Whether this rank has started its shutdown, which it does once.
        pid: The process of the rank. A fork has no part in the shutdown.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        endpoints: Endpoints,
        server: Server,
        hosts: Mapping[int, str],
        list_awaited: Callable[[], Sequence[int]],
    ) -> None:
        self.rank = rank
        self.server = server
        self.is_used = False
        self.has_started = False
        self.pid = os.getpid()
        self._global_ranks = global_ranks
        self._endpoints = endpoints
        self._list_awaited = list_awaited
        self._hosts = hosts

    def is_needed(self) -> bool:
        """Return whether peers may still call: this rank has registered, called or been called."""
        return self.is_used or self.server.last_call_time > 0

    def wait(self, timeout_s: float) -> None:
        """Wait until rank 0, or each peer of rank 0, has finished or died.

        Give up after ``timeout_s`` seconds in which this rank received no call. After the end of
        the group, rank 0 may be unknown, so this rank waits for the peers that still read from it.
        """
        is_destroyed = self._endpoints.is_destroyed()
        ranks: Sequence[int] = range(1, len(self._global_ranks)) if self.rank == 0 else [0]
        if is_destroyed:
            ranks = self._list_awaited()
        begin = time.monotonic()
        request = Request(
            self._endpoints, ranks, {"shutdown": True}, begin + timeout_s, should_retry=False
        )
        try:
            while request.list_pending() and time.monotonic() < request.deadline:
                if is_destroyed and not self._list_awaited():
                    break
                request.poll()
                # A peer that calls is alive, and may need more replies.
                request.deadline = max(begin, self.server.last_call_time) + timeout_s
        except RuntimeError as error:
            _log.debug("the store was closed, so no addresses of ranks are known: %s", error)
        finally:
            request.close()
        if is_destroyed:
            # The last peer that reads may not have received all of its reply.
            self.server.wait_for_replies(timeout_s)
        if request.list_pending() and not (is_destroyed and not self._list_awaited()):
            late = [self._global_ranks[rank] for rank in request.list_pending()]
            missing = describe_missing("its end", timeout_s, late, self._hosts)
            _log.warning("%s, and this rank stops waiting", missing)


def run_shutdown(shutdowns: Iterable[Shutdown], timeout_s: float) -> None:
    """Shut down several process groups; see [Note: shutdown order].

    Args:
        shutdowns: One object per process group.
        timeout_s: Seconds without a call after which this rank stops waiting in a group.
    """
    # A fork inherits the objects, but no peer waits for it.
    due = [
        shutdown
        for shutdown in shutdowns
        if not shutdown.has_started and os.getpid() == shutdown.pid
    ]
    for shutdown in due:
        shutdown.has_started = True
        if shutdown.rank or not shutdown.is_needed():
            shutdown.server.finish()
    needed = [shutdown for shutdown in due if shutdown.is_needed()]
    # Ranks that wait for rank 0 of several groups would hang if it waited elsewhere first.
    for shutdown in needed:
        if shutdown.rank == 0:
            shutdown.wait(timeout_s)
            shutdown.server.finish()
    for shutdown in needed:
        if shutdown.rank:
            shutdown.wait(timeout_s)

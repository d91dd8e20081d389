"""Questions to the other ranks of a process group, answered by a thread of each, without their taking part.

User code may read on one rank alone what is spread over all of them: no collective can serve it there. Every rank runs
a small server; who needs something asks for it.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ovpatch.overlap.comm.group_state import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)
from ovpatch.overlap.peer_rpc.client import AT_ONCE, Replies, Request
from ovpatch.overlap.peer_rpc.rendezvous import Endpoints, own_addresses
from ovpatch.overlap.peer_rpc.server import Answer, Server
from ovpatch.overlap.peer_rpc.shutdown import ShutdownBarrier, leave

# Seconds without a question after which a process that has come to its end no longer waits for its peers.
AT_EXIT_S = 300.0


class PeerError(RuntimeError):
    """A rank did not answer, or could not. The text names ranks, reasons and remedy."""


class PeerRpc:
    """Questions to the other ranks of a process group; one object per process group, from :meth:`of`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size, self._pid = group.rank(), group.size(), os.getpid()
        self._names = [dist.get_global_rank(group, rank) for rank in range(self._size)]
        self._timeout_s = group_timeout_s(group)
        self._directory = Endpoints(group)
        directory = self._directory  # not self: the server's threads would keep it
        self._server = Server(
            str(group.group_name), own_addresses(group_store(group)), lambda: directory.destroyed() and not _exiting
        )
        self._departure = ShutdownBarrier(self._rank, self._names, self._directory, self._server)
        self._directory.publish(self._rank, self._server.card)
        weakref.finalize(group, self._server.close).atexit = False

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> PeerRpc:
        """Return the group's peers; the first call starts this process's server. No collective.

        Ranks come to know of each other by this call: every rank makes it before the feature's first collective.

        Raises:
            PeerError: This process is a fork of the rank, not the rank.
        """
        state = group_state(group)
        if state.is_forked:
            raise PeerError(_FORKED)
        with state.lock:
            return state.get_or_create(PeerRpc, lambda: cls._start(group))

    @classmethod
    def _start(cls, group: dist.ProcessGroup) -> PeerRpc:
        for _, other in group_values(PeerRpc):
            if other._directory.destroyed():  # though somebody still holds the group
                other._server.close()
        register_at_exit(_at_exit)
        return cls(group)

    def serve(self, topic: str, answer: Answer) -> Callable[[], None]:
        """Answer questions on a topic from now on, on threads of the server.

        Args:
            topic: Name, served once per process group.
            answer: Gets the question, JSON values; returns JSON values and dense tensors on the CPU, which are read
                until the peer has them. It may block, and runs on several threads if it is asked so. It is kept until
                withdrawn, so it should hold its owner weakly. What it raises is raised by who asked.

        Returns:
            What withdraws the answer; who asks from then on waits until the topic is served again.

        Raises:
            ValueError: The topic is served already.
        """
        self._departure.used = True
        return self._server.serve(topic, answer)

    def ask(
        self,
        topic: str,
        question: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Replies:
        """Ask ranks at the same time and wait for what they answer.

        Args:
            topic: What they serve; one that does not serve it yet is waited for.
            question: JSON values.
            ranks: Group ranks; by default all others.
            timeout_s: Seconds to wait; by default the process group's own time-out.

        Returns:
            Header and CPU tensors by group rank.

        Raises:
            PeerError: A rank failed, has ended or did not answer in time.
        """
        wanted = [rank for rank in range(self._size) if rank != self._rank] if ranks is None else list(ranks)
        self._check(wanted)
        self._departure.used = True
        patience, begin = self._timeout_s if timeout_s is None else timeout_s, time.monotonic()
        asked = {"topic": topic, "question": dict(question)}
        in_turn = sorted(wanted, key=lambda rank: (rank - self._rank) % self._size)
        inquiry = Request(
            self._directory,
            in_turn,
            asked,
            begin + patience,
            insist=not self._directory.destroyed(),  # peers that have destroyed the group turn everybody away, for good
            at_once=AT_ONCE,
        )
        try:
            inquiry.run()
        except RuntimeError as error:
            raise PeerError(_NO_STORE) from error
        if inquiry.lost or inquiry.late():
            self._raise(topic, inquiry, time.monotonic() - begin)
        return {rank: inquiry.replies[rank] for rank in wanted}

    def drain(self, timeout_s: float = AT_EXIT_S) -> None:
        """Go on answering until all ranks have come here, or to their end; see [Note: who leaves last] in `leaving.py`.

        Happens by itself when the interpreter exits without an exception, if this rank has served or asked. Call it
        before ``destroy_process_group()``: after that, ranks cannot find each other. A rank that never called
        :meth:`of`, or that has died, is not waited for.

        Args:
            timeout_s: Seconds without a question after which this rank gives up.
        """
        leave([self._departure], timeout_s)

    @staticmethod
    def destroyed(group: dist.ProcessGroup) -> bool:
        """Tell whether the group was destroyed, so that nobody in it can be asked any more."""
        return any(peers._directory.destroyed() for _, peers in group_values(PeerRpc, group))

    @staticmethod
    def drain_all(group: dist.ProcessGroup | None = None, timeout_s: float = AT_EXIT_S) -> None:
        """As :meth:`drain`, for all process groups, or for one if it has peers at all."""
        leave([peers._departure for _, peers in group_values(PeerRpc, group)], timeout_s)

    def _check(self, ranks: Sequence[int]) -> None:
        if os.getpid() != self._pid:
            raise PeerError(_FORKED)
        unknown = [rank for rank in ranks if not 0 <= rank < self._size]
        if unknown:
            raise ValueError(f"ovpatch: group ranks are 0 to {self._size - 1}, not {unknown}; pass ranks of the group")
        if self._directory.destroyed() and not all(map(self._directory.proven, ranks)):
            raise PeerError(_DESTROYED)

    def _raise(self, topic: str, inquiry: Request, seconds: float) -> None:
        # Who was merely cut short by another's failure is not to blame.
        reasons = inquiry.lost or inquiry.late()
        text = "; ".join(f"rank {self._names[rank]} {reason}" for rank, reason in sorted(reasons.items()))
        causes = [f"on rank {self._names[rank]}:\n{trace}" for rank, trace in sorted(inquiry.causes.items())]
        remedy = _REMEDY_FAILED if causes else _REMEDY if inquiry.insist else _REMEDY_DESTROYED
        message = f"ovpatch: no answer to '{topic}' within {seconds:.3g} s: {text}. {remedy}"
        raise PeerError(message) from (RuntimeError("\n".join(causes)) if causes else None)


def _at_exit() -> None:
    global _exiting
    _exiting = True
    if not is_exiting_by_error():
        PeerRpc.drain_all()
    for _, peers in group_values(PeerRpc):
        peers._server.close()


_exiting = False

_REMEDY = (
    "Look at that rank's output: it may have ended, hang, or run without ovpatch, which is active where "
    "ovpatch.apply() was called before the model was wrapped. If it only needs longer, give init_process_group() a "
    "larger timeout."
)
_REMEDY_FAILED = "The cause is on that rank: remedy it there."
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
    "ovpatch: a forked process is no rank of its parent's process group and cannot ask its peers. Read what needs them "
    "in the parent, before the fork."
)

"""One request to several ranks at a time, on the calling thread."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ovpatch.overlap.peer_rpc.rendezvous import Endpoint, Endpoints
from ovpatch.overlap.peer_rpc.wire import Connection

# Seconds that the other ranks may still take once one has failed, so that the error names all that fail.
_GRACE_S = 1.0

# Seconds until a peer that accepts a connection but sends nothing is taken for another process.
_GREETING_S = 5.0

# Seconds between two attempts to reach a rank, at first and at most.
_PAUSE_S = (0.001, 0.25)

# Seconds after which a poll returns though nothing happened.
_POLL_S = 10.0

# Open connections of one request. All ranks of a large job may call all others at the same time, as for a checkpoint
# that each of them saves, and a process may open some thousand files at most.
MAX_CONNECTIONS = 64

_SILENT = "accepts connections but sends nothing"

Replies = dict[int, tuple[dict[str, Any], list[Tensor]]]


class _CallError(Exception):
    """A rank will not reply; the text says why."""


@dataclass
class _Call:
    rank: int
    state: str = "has not been looked up"
    connection: Connection | None = None
    endpoint: Endpoint | None = None
    stage: str = ""
    signature: bytes = b""
    begun: float = 0.0
    attempt: int = 0


@dataclass
class Request:
    """Sends a message of JSON values to ranks of a group and collects their replies until a deadline.

    A late rank does not hold up the others. With ``retry`` a rank that cannot be reached is looked up again until the
    deadline; without, it fails at once. At most ``max_connections`` ranks are called at the same time. The deadline is
    in seconds of ``time.monotonic()``.
    """

    endpoints: Endpoints
    ranks: Iterable[int]
    message: Mapping[str, Any]
    deadline: float
    retry: bool = True
    max_connections: float = math.inf
    replies: Replies = field(default_factory=dict)  # header and tensors by rank
    failures: dict[int, str] = field(default_factory=dict)  # why a rank will not reply, by rank
    tracebacks: dict[int, str] = field(default_factory=dict)  # the traceback of a handler that raised, by rank

    def __post_init__(self) -> None:
        self._calls = {rank: _Call(rank) for rank in self.ranks}
        self._selector = selectors.DefaultSelector()
        self._pause = _PAUSE_S[0]
        self._open = 0

    def run(self) -> None:
        """Poll until every rank has replied or failed, or the deadline has passed; close the connections."""
        try:
            while self._calls and time.monotonic() < self.deadline:
                self.poll()
        finally:
            self.close()

    def pending(self) -> dict[int, str]:
        """Return the ranks that have neither replied nor failed, with how far each call got."""
        return {call.rank: call.state for call in self._calls.values()}

    def poll(self, limit_s: float = _POLL_S) -> None:
        """Connect to ranks and read what they sent; wait ``limit_s`` seconds at most."""
        for call in [call for call in self._calls.values() if call.connection is None]:
            if self._open >= self.max_connections:
                break
            self._attempt(call, self._connect)
        left = max(0.0, min(self.deadline - time.monotonic(), limit_s, self._until_retry()))
        for key, _ in self._selector.select(left):
            self._attempt(key.data, self._read)
        for call in [call for call in self._calls.values() if call.stage == "greeting"]:
            if time.monotonic() > call.begun + _GREETING_S:
                self._reset(call, _SILENT)

    def close(self) -> None:
        """Close all connections."""
        for call in self._calls.values():
            if call.connection is not None:
                call.connection.close()
        self._selector.close()

    def _until_retry(self) -> float:
        if not self._calls:
            return 0.0  # the last of them has just failed
        if self._open >= min(self.max_connections, len(self._calls)):
            return _GREETING_S if any(call.stage == "greeting" for call in self._calls.values()) else _POLL_S
        self._pause = min(1.2 * self._pause, _PAUSE_S[1])
        return self._pause

    def _attempt(self, call: _Call, action: Callable[[_Call], None]) -> None:
        try:
            action(call)
        except _CallError as error:
            self._fail(call, str(error))
        except OSError as error:
            self._handle_error(call, error)

    def _connect(self, call: _Call) -> None:
        known = self.endpoints.verified(call.rank)
        call.endpoint = known if known and not call.attempt else self.endpoints.look_up(call.rank)
        if call.endpoint is None:
            call.state = "has not published its address"
            if not self.retry:
                raise _CallError(call.state)
            return
        call.connection = call.endpoint.connect(call.attempt, self.deadline)
        call.stage, call.begun = "greeting", time.monotonic()
        if not call.attempt:  # later, why an attempt failed tells more
            call.state = _SILENT
        self._open += 1
        self._selector.register(call.connection, selectors.EVENT_READ, call)

    def _read(self, call: _Call) -> None:
        assert call.connection is not None
        assert call.endpoint is not None
        call.connection.deadline = self.deadline
        if call.stage == "greeting":
            call.signature = call.connection.answer_challenge(bytes.fromhex(call.endpoint.secret))
            call.connection.send({**self.message, "timeout_s": self.deadline - time.monotonic()})
            call.stage = "proof"
        elif call.stage == "proof":
            call.connection.verify_signature(call.signature)
            self.endpoints.set_verified(call.rank, call.endpoint)
            call.stage, call.state = "reply", "was asked and has not answered"
        else:
            self._handle_message(call, *call.connection.receive())

    def _handle_message(self, call: _Call, message: Mapping[str, Any], tensors: list[Tensor]) -> None:
        if message["state"] == "unregistered":
            call.state = "does not serve this"
        elif message["state"] == "running":
            call.state = "works on its answer"
        elif message["state"] == "failed":
            self.tracebacks[call.rank] = message["traceback"]
            raise _CallError(f"failed: {message['error']}")
        else:
            self.replies[call.rank] = (message["reply"], tensors)
            self._finish(call)

    def _handle_error(self, call: _Call, error: OSError) -> None:
        """Look the rank up again, unless it is known to have ended; see [Note: stale endpoints]."""
        current = call.attempt > 0 and call.endpoint == self.endpoints.verified(call.rank)
        ended = current and isinstance(error, ConnectionRefusedError)
        cut = call.stage == "reply" and not isinstance(error, TimeoutError)
        unreachable = f"cannot be reached: {error.strerror or error}"
        if ended or cut or not self.retry:
            self._fail(call, "has ended" if ended else "ended before it had answered" if cut else unreachable)
        else:
            self._reset(call, call.state if call.stage == "reply" else unreachable)

    def _reset(self, call: _Call, state: str) -> None:
        self._disconnect(call)
        call.state, call.stage, call.attempt = state, "", call.attempt + 1

    def _fail(self, call: _Call, reason: str) -> None:
        self._finish(call)
        self.failures[call.rank] = reason
        self.deadline = min(self.deadline, time.monotonic() + _GRACE_S) if self.retry else self.deadline

    def _finish(self, call: _Call) -> None:
        self._disconnect(call)
        del self._calls[call.rank]

    def _disconnect(self, call: _Call) -> None:
        if call.connection is not None:
            self._selector.unregister(call.connection)
            call.connection.close()
            call.connection = None
            self._open -= 1

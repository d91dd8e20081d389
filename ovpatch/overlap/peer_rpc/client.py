"""One question to several ranks at a time, on the asker's own thread.

[Note: so many at once] All ranks of a large job may ask all others at the same time, as for a checkpoint that each of
them saves. A process has some thousand files at most, so a question is under way to a few dozen ranks at once, of which
each rank begins with others.
"""

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

# Seconds that the others may still take, once one rank has failed: who else fails is worth knowing.
_GRACE_S = 1.0

# Seconds until who does not say a word is taken for somebody else, and the next way to the rank is tried.
_GREETING_S = 5.0

# Seconds between two attempts to reach a rank, at first and once it is late.
_PAUSE_S = (0.001, 0.25)

# Seconds after which a step ends though nothing happened.
_SELDOM_S = 10.0

# Lines that a question has open; see [Note: so many at once].
AT_ONCE = 64

_SILENT = "accepts connections but does not say a word"

Replies = dict[int, tuple[dict[str, Any], list[Tensor]]]


class _Lost(Exception):
    """A rank that will not answer, and why."""


@dataclass
class _Call:
    rank: int
    state: str = "has not been looked up"
    line: Connection | None = None
    card: Endpoint | None = None
    stage: str = ""
    signature: bytes = b""
    begun: float = 0.0
    attempt: int = 0


@dataclass
class Request:
    """Asks ranks of a group and collects what they say; one that is late does not hold up the others.

    Args:
        directory: Where the ranks are found.
        ranks: Group ranks.
        question: Message for all of them.
        deadline: When to give up, in seconds of ``time.monotonic()``.
        insist: Whether to look for a rank that cannot be reached until the deadline; otherwise it is lost at once.
        at_once: How many may be asked at the same time.
    """

    directory: Endpoints
    ranks: Iterable[int]
    question: Mapping[str, Any]
    deadline: float
    insist: bool = True
    at_once: float = math.inf
    replies: Replies = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # why a rank will not answer
    causes: dict[int, str] = field(default_factory=dict)  # the traceback of a rank that failed

    def __post_init__(self) -> None:
        self._calls = {rank: _Call(rank) for rank in self.ranks}
        self._selector = selectors.DefaultSelector()
        self._pause = _PAUSE_S[0]
        self._open = 0

    def run(self) -> None:
        """Ask until everybody has answered or is lost, or the time is over."""
        try:
            while self._calls and time.monotonic() < self.deadline:
                self.step()
        finally:
            self.close()

    def late(self) -> dict[int, str]:
        """Return the ranks that have neither answered nor been lost, with how far each got."""
        return {call.rank: call.state for call in self._calls.values()}

    def step(self, limit_s: float = _SELDOM_S) -> None:
        """Reach who can be reached, and hear who has something to say; wait ``limit_s`` seconds at most."""
        for call in [call for call in self._calls.values() if call.line is None]:
            if self._open >= self.at_once:
                break
            self._attempt(call, self._dial)
        left = max(0.0, min(self.deadline - time.monotonic(), limit_s, self._until_retry()))
        for key, _ in self._selector.select(left):
            self._attempt(key.data, self._hear)
        for call in [call for call in self._calls.values() if call.stage == "greeting"]:
            if time.monotonic() > call.begun + _GREETING_S:
                self._hang_up(call, _SILENT)

    def close(self) -> None:
        """Hang up everywhere."""
        for call in self._calls.values():
            if call.line is not None:
                call.line.close()
        self._selector.close()

    def _until_retry(self) -> float:
        if not self._calls:
            return 0.0  # the last of them was just lost
        if self._open >= min(self.at_once, len(self._calls)):
            return _GREETING_S if any(call.stage == "greeting" for call in self._calls.values()) else _SELDOM_S
        self._pause = min(1.2 * self._pause, _PAUSE_S[1])
        return self._pause

    def _attempt(self, call: _Call, action: Callable[[_Call], None]) -> None:
        try:
            action(call)
        except _Lost as loss:
            self._finish(call)
            self._lose(call.rank, str(loss))
        except OSError as error:
            self._broken(call, error)

    def _dial(self, call: _Call) -> None:
        known = self.directory.proven(call.rank)
        call.card = known if known and not call.attempt else self.directory.look_up(call.rank)
        if call.card is None:
            call.state = "has not published its address"
            if not self.insist:
                raise _Lost(call.state)
            return
        call.line = call.card.dial(call.attempt, self.deadline)
        call.stage, call.begun = "greeting", time.monotonic()
        if not call.attempt:  # later, why an attempt failed tells more
            call.state = _SILENT
        self._open += 1
        self._selector.register(call.line, selectors.EVENT_READ, call)

    def _hear(self, call: _Call) -> None:
        assert call.line is not None
        assert call.card is not None
        call.line.deadline = self.deadline
        if call.stage == "greeting":
            call.signature = call.line.introduce(bytes.fromhex(call.card.secret))
            call.line.send({**self.question, "patience_s": self.deadline - time.monotonic()})
            call.stage = "proof"
        elif call.stage == "proof":
            call.line.verify(call.signature)
            self.directory.prove(call.rank, call.card)
            call.stage, call.state = "reply", "was asked and has not answered"
        else:
            self._take(call, *call.line.receive())

    def _take(self, call: _Call, message: Mapping[str, Any], tensors: list[Tensor]) -> None:
        if message["state"] == "unserved":
            call.state = "does not serve this"
        elif message["state"] == "answering":
            call.state = "works on its answer"
        elif message["state"] == "failed":
            self.causes[call.rank] = message["traceback"]
            raise _Lost(f"failed: {message['error']}")
        else:
            self.replies[call.rank] = (message["answer"], tensors)
            self._finish(call)

    def _broken(self, call: _Call, error: OSError) -> None:
        """Look for the rank again, unless it is known to be gone; see [Note: stale cards]."""
        current = call.attempt > 0 and call.card == self.directory.proven(call.rank)
        ended = current and isinstance(error, ConnectionRefusedError)
        cut = call.stage == "reply" and not isinstance(error, TimeoutError)
        if ended or cut or not self.insist:
            reason = "has ended" if ended else "ended before it had answered" if cut else _why(error)
            self._finish(call)
            self._lose(call.rank, reason)
        else:
            self._hang_up(call, call.state if call.stage == "reply" else _why(error))

    def _hang_up(self, call: _Call, state: str) -> None:
        self._disconnect(call)
        call.state, call.stage, call.attempt = state, "", call.attempt + 1

    def _lose(self, rank: int, why: str) -> None:
        self.lost[rank] = why
        self.deadline = min(self.deadline, time.monotonic() + _GRACE_S) if self.insist else self.deadline

    def _finish(self, call: _Call) -> None:
        self._disconnect(call)
        del self._calls[call.rank]

    def _disconnect(self, call: _Call) -> None:
        if call.line is not None:
            self._selector.unregister(call.line)
            call.line.close()
            call.line = None
            self._open -= 1


def _why(error: OSError) -> str:
    return f"cannot be reached: {error.strerror or error}"

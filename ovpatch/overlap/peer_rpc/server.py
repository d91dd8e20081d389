"""The server of one rank: answers the peers' questions on threads of its own.

[Note: threads made before] At the interpreter's exit some versions of Python start no thread any more (3.12 does not),
and just then a rank that finished early has to go on answering. So there are always threads to spare, made before the
questions come. All of them sleep in the system while nobody asks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ovpatch.overlap.peer_rpc.rendezvous import Endpoint
from ovpatch.overlap.peer_rpc.wire import Connection, Message, pack

# What answers a question: a header in JSON to a header in JSON and tensors.
Answer = Callable[[dict[str, Any]], tuple[dict[str, Any], list[Tensor]]]

# Threads that wait for questions, beyond those that are busy.
_SPARE = 3

# Seconds that somebody who connects may take to show that he knows the secret and to ask.
_GREETING_S = 10.0

# Connections that the system holds until they are accepted: a thousand ranks may ask at once.
_BACKLOG = 1024

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("ovpatch.peers")


class Server:
    """Listens on all interfaces and lets in who knows the secret.

    Args:
        name: For the threads' names.
        addresses: This machine's, for the card.
        deaf: Whether it shall turn everybody away for now.
    """

    def __init__(self, name: str, addresses: tuple[str, ...], deaf: Callable[[], bool]) -> None:
        self._name, self._deaf, self._pid = name, deaf, os.getpid()
        self._listener = _listen()
        self._wake, self._awake = socket.socketpair()
        secret = secrets.token_hex(32)
        self.card = Endpoint(secret, socket.gethostname(), addresses, self._listener.getsockname()[1])
        self.asked_at = 0.0  # when the newest question came, by time.monotonic(); 0 before the first
        self._answers: dict[str, Answer] = {}
        self._arrivals: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._idle = 0
        self._released = self._closed = False
        self._parked: list[Connection] = []
        _servers.add(self)
        self._start("accept", self._accept)
        with self._changed:
            self._keep_spare()

    def serve(self, topic: str, answer: Answer) -> Callable[[], None]:
        """Answer a topic from now on; return what withdraws it."""
        with self._changed:
            if topic in self._answers:
                raise ValueError(f"ovpatch: '{topic}' is served already in this process group; withdraw that first")
            self._answers[topic] = answer
            self._changed.notify_all()
        return lambda: self._withdraw(topic, answer)

    def release(self) -> None:
        """Tell all who have asked to be told, or will, that this rank needs nobody any more."""
        with self._changed:
            self._released = True
            parked, self._parked = self._parked, []
        for line in parked:
            _tell(line)

    def close(self) -> None:
        """Stop listening. Takes no lock: the garbage collector may call it anywhere."""
        if os.getpid() == self._pid:  # a forked child would wake its parent's thread
            with contextlib.suppress(OSError):  # closed before
                self._wake.send(b"x")

    def forget(self) -> None:
        """Close a forked child's copies of the sockets; with those open, peers would not see its parent end."""
        for sock in (self._listener, self._wake, self._awake):
            with contextlib.suppress(OSError):
                sock.close()

    def _withdraw(self, topic: str, answer: Answer) -> None:
        with self._changed:
            if self._answers.get(topic) is answer:
                del self._answers[topic]

    # --- threads ---

    def _accept(self) -> None:
        try:
            with selectors.DefaultSelector() as selector, self._listener, self._wake, self._awake:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._awake, selectors.EVENT_READ)
                while all(key.fileobj is self._listener for key, _ in selector.select()):
                    self._take_in()
        finally:
            self._end()

    def _take_in(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(0.1)  # until somebody closes a file; the connection waits
            elif not isinstance(error, (BlockingIOError, ConnectionError)):
                raise
            return
        with self._changed:
            self._idle -= 1
            self._keep_spare()
        self._arrivals.put(sock)

    def _keep_spare(self) -> None:
        """Start threads until enough are idle. Holds the lock."""
        while self._idle < _SPARE:
            try:
                self._start("answer", self._work)
            except RuntimeError:  # the interpreter is exiting: the spare ones have to do
                return
            self._idle += 1

    def _work(self) -> None:
        while (sock := self._arrivals.get()) is not None:
            self._converse(sock)
            with self._changed:
                if self._idle >= 2 * _SPARE:
                    return
                self._idle += 1
        self._arrivals.put(None)  # for the next thread

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._answers.clear()
            parked, self._parked = self._parked, []
            self._changed.notify_all()
        self._arrivals.put(None)
        for line in parked:
            line.close()

    def _start(self, role: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"ovpatch-peers-{role}-{self._name}", daemon=True).start()

    # --- a question ---

    def _converse(self, sock: socket.socket) -> None:
        kept = False
        try:
            kept = self._hear(Connection(sock, time.monotonic() + _GREETING_S))
        except OSError as error:  # who asked is gone, has no more time, or is a stranger
            _log.debug("a question was broken off: %s", error)
        finally:
            if not kept:
                sock.close()

    def _hear(self, line: Connection) -> bool:
        """Let one in and take his question; return whether the line stays open."""
        if self._closed or self._deaf():
            return False
        line.challenge(bytes.fromhex(self.card.secret))
        question, _ = line.receive()
        line.deadline = time.monotonic() + question["patience_s"]
        if question.get("leave"):
            return self._park(line)
        self._reply(line, question)
        return False

    def _park(self, line: Connection) -> bool:
        """Keep a line until this rank is released; tell at once if it is."""
        with self._changed:
            if not self._released and not self._closed:
                self._parked.append(line)
                return True
        if not self._closed:
            _tell(line)
        return False

    def _reply(self, line: Connection, question: dict[str, Any]) -> None:
        self.asked_at = time.monotonic()
        answer = self._find(line, question["topic"])
        if answer is not None:
            line.send({"state": "answering"})
            line.post(_message(answer, question["question"]))
            self.asked_at = time.monotonic()

    def _find(self, line: Connection, topic: str) -> Answer | None:
        """Return what answers a topic; it may be served a little later than it is asked for."""
        if topic not in self._answers:
            line.send({"state": "unserved"})
        with self._changed:
            left = line.deadline - time.monotonic()
            self._changed.wait_for(lambda: topic in self._answers or self._closed, max(0.0, left))
            return self._answers.get(topic)


def _message(answer: Answer, question: dict[str, Any]) -> Message:
    try:
        header, tensors = answer(question)
        return pack({"state": "done", "answer": header}, tensors)
    except Exception as error:  # noqa: BLE001 - it travels to the asker, who raises it
        text = "".join(traceback.format_exception_only(error)).strip()
        return pack({"state": "failed", "error": text, "traceback": traceback.format_exc()})


def _tell(line: Connection) -> None:
    with contextlib.suppress(OSError), line:  # who asked may be gone
        line.deadline = time.monotonic() + _GREETING_S
        line.send({"state": "done", "answer": {}})


def _listen() -> socket.socket:
    """Listen on all interfaces: which one peers come by is theirs to find out, by the card's addresses."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
    listener.setblocking(False)  # who connects may be gone before he is accepted
    return listener


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _forget_in_child() -> None:
    for server in list(_servers):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

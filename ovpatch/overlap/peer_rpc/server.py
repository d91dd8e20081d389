"""The server of one rank: answers the peers' calls on threads of its own."""

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
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ovpatch.overlap.comm.lifetimes import reset_after_fork
from ovpatch.overlap.peer_rpc.client import Endpoint
from ovpatch.overlap.peer_rpc.wire import Connection, Message, close_after_fork, pack

# Maps a call's arguments, JSON values, to a header in JSON and tensors.
Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], list[Tensor]]]

_SPARE = 3  # threads that wait for connections, beyond those that are busy
_GREETING_S = 10.0  # that a peer may take to show that it knows the secret and to send its call
_BACKLOG = 1024  # connections that the system queues until they are accepted: a thousand ranks may connect at once
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("ovpatch.peers")


class Server:
    """Listens on all interfaces and answers peers that know its secret, unless ``refuses()`` says so for now.

    At the interpreter's exit some versions of Python (3.12) start no thread any more, and just
    then a rank that finished early has to keep answering. So spare threads are started before the calls arrive. A fixed
    pool would not do: handlers may block until this rank's main thread gets somewhere.
    """

    def __init__(self, name: str, addresses: Sequence[str], refuses: Callable[[], bool]) -> None:
        self._name, self._refuses, self._pid = name, refuses, os.getpid()
        self._listener = _listen()
        self._wake, self._awake = socket.socketpair()
        close_after_fork(self._listener, self._wake, self._awake)
        secret = secrets.token_hex(32)
        # How peers reach this server.
        self.endpoint = Endpoint(secret, socket.gethostname(), addresses, self._listener.getsockname()[1])
        # When the newest call arrived or was answered, by ``time.monotonic()``; 0 before the first.
        self.last_call_time = 0.0
        self._handlers: dict[str, Handler] = {}
        self._accepted: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        reset_after_fork(self, "_changed", threading.Condition)
        self._idle = 0
        self._finished = self._closed = False
        self._parked: list[Connection] = []
        self._start_thread("accept", self._accept_loop)
        with self._changed:
            self._start_spare_threads()

    def register(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Answer calls for a topic from now on; return a function that withdraws the handler."""
        with self._changed:
            if topic in self._handlers:
                raise ValueError(f"ovpatch: '{topic}' is served already in this process group; withdraw that first")
            self._handlers[topic] = handler
            self._changed.notify_all()

        def withdraw() -> None:
            with self._changed:
                if self._handlers.get(topic) is handler:
                    del self._handlers[topic]

        return withdraw

    def finish(self) -> None:
        """Tell the peers that take part in the shutdown barrier, now or later, that this rank needs none of them."""
        with self._changed:
            self._finished = True
            parked, self._parked = self._parked, []
        for connection in parked:
            _send_done(connection)

    def close(self) -> None:
        """Stop listening. Takes no lock: the garbage collector may call it anywhere."""
        if os.getpid() == self._pid:  # a forked child would wake its parent's thread
            with contextlib.suppress(OSError):  # closed before
                self._wake.send(b"x")

    # --- threads ---

    def _accept_loop(self) -> None:
        try:
            with selectors.DefaultSelector() as selector, self._listener, self._wake, self._awake:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._awake, selectors.EVENT_READ)
                while all(key.fileobj is self._listener for key, _ in selector.select()):
                    self._accept()
        finally:
            self._shut_down()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(0.1)  # until a file is closed; the connection waits
            elif not isinstance(error, (BlockingIOError, ConnectionError)):
                raise
            return
        with self._changed:
            self._idle -= 1
            self._start_spare_threads()
        self._accepted.put(sock)

    def _start_spare_threads(self) -> None:
        """Start threads until enough are idle. The caller holds the lock."""
        while self._idle < _SPARE:
            try:
                self._start_thread("answer", self._work_loop)
            except RuntimeError:  # the interpreter is exiting; the spare threads have to do
                return
            self._idle += 1

    def _work_loop(self) -> None:
        while (sock := self._accepted.get()) is not None:
            self._serve(sock)
            with self._changed:
                if self._idle >= 2 * _SPARE:
                    return
                self._idle += 1
        self._accepted.put(None)  # for the next thread

    def _shut_down(self) -> None:
        with self._changed:
            self._closed = True
            self._handlers.clear()
            parked, self._parked = self._parked, []
            self._changed.notify_all()
        self._accepted.put(None)
        for connection in parked:
            connection.close()

    def _start_thread(self, role: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"ovpatch-peers-{role}-{self._name}", daemon=True).start()

    # --- a call ---

    def _serve(self, sock: socket.socket) -> None:
        kept = False
        try:
            kept = self._handle(Connection(sock, time.monotonic() + _GREETING_S))
        except OSError as error:  # the caller is gone, has no more time, or is a stranger
            _log.debug("a call was broken off: %s", error)
        finally:
            if not kept:
                sock.close()

    def _handle(self, connection: Connection) -> bool:
        """Authenticate a peer and handle its message; return whether the connection stays open."""
        if self._closed or self._refuses():
            return False
        connection.authenticate(bytes.fromhex(self.endpoint.secret))
        message, _ = connection.receive()
        connection.deadline = time.monotonic() + message["timeout_s"]
        if message.get("shutdown"):
            return self._park(connection)
        self._reply(connection, message)
        return False

    def _park(self, connection: Connection) -> bool:
        """Keep a connection until this rank has finished; answer at once if it has."""
        with self._changed:
            if not self._finished and not self._closed:
                self._parked.append(connection)
                return True
        if not self._closed:
            _send_done(connection)
        return False

    def _reply(self, connection: Connection, message: dict[str, Any]) -> None:
        self.last_call_time = time.monotonic()
        handler = self._wait_for_handler(connection, message["topic"])
        if handler is not None:
            connection.send({"state": "running"})
            connection.send_packed(_run_handler(handler, message["arguments"]))
            self.last_call_time = time.monotonic()

    def _wait_for_handler(self, connection: Connection, topic: str) -> Handler | None:
        """Return the handler of a topic, which may be registered a little after the call."""
        if topic not in self._handlers:
            connection.send({"state": "unregistered"})
        with self._changed:
            left = connection.deadline - time.monotonic()
            self._changed.wait_for(lambda: topic in self._handlers or self._closed, max(0.0, left))
            return self._handlers.get(topic)


def _run_handler(handler: Handler, arguments: dict[str, Any]) -> Message:
    try:
        header, tensors = handler(arguments)
        return pack({"state": "done", "reply": header}, tensors)
    except Exception as error:  # noqa: BLE001 - it is sent to the caller, which raises it
        text = "".join(traceback.format_exception_only(error)).strip()
        return pack({"state": "failed", "error": text, "traceback": traceback.format_exc()})


def _send_done(connection: Connection) -> None:
    with contextlib.suppress(OSError), contextlib.closing(connection):  # the caller may be gone
        connection.deadline = time.monotonic() + _GREETING_S
        connection.send({"state": "done", "reply": {}})


def _listen() -> socket.socket:
    """Listen on all interfaces; peers find one that reaches them by the endpoint's addresses."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
    listener.setblocking(False)  # a peer that connected may be gone before it is accepted
    return listener

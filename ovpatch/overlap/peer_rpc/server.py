"""The server of one rank, which replies to calls of peers on its own threads."""

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from ovpatch.overlap.comm.lifetimes import reset_after_fork
from ovpatch.overlap.peer_rpc.client import Endpoint
from ovpatch.overlap.peer_rpc.wire import Connection, Message, close_after_fork, pack

#: A function that maps the arguments of a call, JSON values, to a JSON header and tensors.
Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], list[Tensor]]]

# Threads that wait for connections, in addition to the busy ones.
_NUM_SPARE_THREADS: Final = 3
# A caller must prove within this time that it knows the secret, and send its call.
_GREETING_TIMEOUT_S: Final = 10.0
# The system queues this number of connections until the server accepts them. A thousand ranks may
# connect at once.
_BACKLOG: Final = 1024
# Errors of a process or machine that has no more files or memory for a connection.
_EXHAUSTED_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_PAUSE_S: Final = 0.1

_log = logging.getLogger("ovpatch.peers")


class Server:
    """A server on all network interfaces for callers that know its secret.

    Some versions of Python, such as 3.12, start no threads at exit of the interpreter. At that time
    a rank that finishes early must still serve its peers. So the server starts spare threads before
    calls arrive. A pool of fixed size would not do: handlers may block until the main thread of
    this rank has made progress.

    Args:
        name: A name for the threads.
        addresses: The addresses of this machine.
        should_refuse: Returns whether the server must refuse a message at the moment; its argument
            is None before the message arrives, and true then means all messages.

    Attributes:
        endpoint: The address of this server.
        last_call_time: The time when the newest call arrived or was served, by
            ``time.monotonic()``; 0 before the first call.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        should_refuse: Callable[[Mapping[str, Any] | None], bool],
    ) -> None:
        self._name = name
        self._should_refuse = should_refuse
        self._pid = os.getpid()

        # - Sockets
        self._listener = _listen()
        # `close` writes to the first socket, and the accepting thread polls the second one.
        self._wake, self._awake = socket.socketpair()
        close_after_fork(self._listener, self._wake, self._awake)
        secret = secrets.token_hex(32)
        port = self._listener.getsockname()[1]
        self.endpoint = Endpoint(secret, socket.gethostname(), addresses, port)
        # None makes a waiting thread exit.
        self._accepted: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()

        # - State, guarded by the condition
        self._changed = threading.Condition()
        reset_after_fork(self, "_changed", threading.Condition)
        self.last_call_time = 0.0
        self._handlers: dict[str, Handler] = {}
        # The calls to which a thread replies.
        self._num_replies = 0
        # Threads that wait for connections.
        self._num_idle_threads = 0
        # Whether this rank no longer needs its peers.
        self._has_finished = False
        self._is_closed = False
        # Connections of peers that wait until this rank has finished.
        self._parked: list[Connection] = []

        self._start_thread("accept", self._accept_loop)
        self._start_spare_threads()

    def register(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Serve calls for a topic, and return a function that withdraws the handler.

        Raises:
            ValueError: The topic has a handler.
        """
        with self._changed:
            if topic in self._handlers:
                raise ValueError(
                    f"ovpatch: '{topic}' is served already in this process group. Withdraw its "
                    "handler first."
                )
            self._handlers[topic] = handler
            self._changed.notify_all()

        def withdraw() -> None:
            # This is a finalizer, so the garbage collector may call it on any thread and at any
            # line. It must not take a lock: this thread may be one for which the owner of the lock
            # waits. Another handler may have been registered since.
            if self._handlers.get(topic) is handler:
                self._handlers.pop(topic, None)

        return withdraw

    def finish(self) -> None:
        """Reply to peers that wait in the shutdown, now or later, that this rank has finished."""
        with self._changed:
            self._has_finished = True
            parked = self._parked
            self._parked = []
        for connection in parked:
            _send_done(connection)

    def wait_for_replies(self, timeout_s: float) -> None:
        """Wait until no reply is in flight, for at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_replies == 0, timeout_s)

    def close(self) -> None:
        """Stop listening."""
        # The garbage collector may call this anywhere, so it must not take a lock. A forked child
        # would wake the thread of its parent.
        if os.getpid() == self._pid:
            # The server may be closed already.
            with contextlib.suppress(OSError):
                self._wake.send(b"x")

    # --- threads ---

    def _accept_loop(self) -> None:
        try:
            with (
                selectors.DefaultSelector() as selector,
                self._listener,
                self._wake,
                self._awake,
            ):
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
            if error.errno in _EXHAUSTED_ERRORS:
                # The connection waits in the backlog until a file is closed.
                time.sleep(_EXHAUSTED_PAUSE_S)
            elif not isinstance(error, (BlockingIOError, ConnectionError)):
                raise
            return
        with self._changed:
            self._num_idle_threads -= 1
        self._start_spare_threads()
        self._accepted.put(sock)

    def _start_spare_threads(self) -> None:
        """Start threads until enough are idle."""
        # The start of a thread waits for that thread, so the lock must be free.
        while self._count_spare_thread():
            try:
                self._start_thread("reply", self._work_loop)
            except RuntimeError:
                # The interpreter is exiting, so the spare threads must suffice.
                with self._changed:
                    self._num_idle_threads -= 1
                return

    def _count_spare_thread(self) -> bool:
        """Count one more idle thread, if one must be started, and return whether it must."""
        with self._changed:
            is_missing = self._num_idle_threads < _NUM_SPARE_THREADS
            self._num_idle_threads += is_missing
        return is_missing

    def _work_loop(self) -> None:
        while (sock := self._accepted.get()) is not None:
            self._serve(sock)
            with self._changed:
                # A burst of calls may have started many threads.
                if self._num_idle_threads >= 2 * _NUM_SPARE_THREADS:
                    return
                self._num_idle_threads += 1
        # The next thread must exit as well.
        self._accepted.put(None)

    def _shut_down(self) -> None:
        with self._changed:
            self._is_closed = True
            self._handlers.clear()
            parked = self._parked
            self._parked = []
            self._changed.notify_all()
        self._accepted.put(None)
        for connection in parked:
            connection.close()

    def _start_thread(self, role: str, target: Callable[[], None]) -> None:
        name = f"ovpatch-peers-{role}-{self._name}"
        threading.Thread(target=target, name=name, daemon=True).start()

    # --- a call ---

    def _serve(self, sock: socket.socket) -> None:
        is_parked = False
        try:
            is_parked = self._handle(Connection(sock, time.monotonic() + _GREETING_TIMEOUT_S))
        except OSError as error:
            # The caller has exited, has no time left, or does not know the secret.
            _log.debug("a call was cut off: %s", error)
        finally:
            if not is_parked:
                sock.close()

    def _handle(self, connection: Connection) -> bool:
        """Authenticate a peer and handle its message; return whether to keep the connection."""
        if self._is_closed or self._should_refuse(None):
            return False
        connection.authenticate(bytes.fromhex(self.endpoint.secret))
        message, _ = connection.receive()
        if self._should_refuse(message):
            return False
        connection.deadline = time.monotonic() + message["timeout_s"]
        if message.get("shutdown"):
            return self._park(connection)
        self._reply(connection, message)
        return False

    def _park(self, connection: Connection) -> bool:
        """Keep a connection until this rank has finished; reply at once if it has."""
        with self._changed:
            if not self._has_finished and not self._is_closed:
                self._parked.append(connection)
                return True
        if not self._is_closed:
            _send_done(connection)
        return False

    def _reply(self, connection: Connection, message: dict[str, Any]) -> None:
        self.last_call_time = time.monotonic()
        handler = self._wait_for_handler(connection, message["topic"])
        if handler is None:
            return
        connection.send({"state": "running"})
        self._count_reply(1)
        try:
            connection.send_packed(_run_handler(handler, message["arguments"]))
            # A handler may run for long, and the caller may call again after it.
            self.last_call_time = time.monotonic()
        finally:
            self._count_reply(-1)

    def _count_reply(self, change: int) -> None:
        with self._changed:
            self._num_replies += change
            self._changed.notify_all()

    def _wait_for_handler(self, connection: Connection, topic: str) -> Handler | None:
        """Return the handler of a topic, which may be registered shortly after the call."""
        if topic not in self._handlers:
            connection.send({"state": "unregistered"})
        with self._changed:
            remaining_s = connection.deadline - time.monotonic()
            self._changed.wait_for(
                lambda: topic in self._handlers or self._is_closed, max(0.0, remaining_s)
            )
            return self._handlers.get(topic)


def _run_handler(handler: Handler, arguments: dict[str, Any]) -> Message:
    try:
        header, tensors = handler(arguments)
        return pack({"state": "done", "reply": header}, tensors)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        message = "".join(traceback.format_exception_only(error)).strip()
        return pack({"state": "failed", "error": message, "traceback": traceback.format_exc()})


def _send_done(connection: Connection) -> None:
    # The caller may have exited.
    with contextlib.suppress(OSError), contextlib.closing(connection):
        connection.deadline = time.monotonic() + _GREETING_TIMEOUT_S
        connection.send({"state": "done", "reply": {}})


def _listen() -> socket.socket:
    # Peers may reach this machine by different interfaces, so the server listens on all of them.
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
    # A peer may close its connection before this process accepts it, and accept() must not block.
    listener.setblocking(False)
    return listener

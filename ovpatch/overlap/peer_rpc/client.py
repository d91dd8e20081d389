"""Calls of several servers at a time on the calling thread, and the addresses of the servers.

The store of the process group has the addresses.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import queue
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import group_store, unwrap_store
from ovpatch.overlap.peer_rpc.wire import Connection

# After this time without a connection, the next address is tried.
_CONNECT_TIMEOUT_S: Final = 3.0
# Addresses outside of this network, for lookups of routes. They are reserved for documentation, and
# nothing is sent to them.
_OUTSIDE_ADDRESSES: Final = ("192.0.2.1", "2001:db8::1")
# Prefixes of loopback and link-local addresses, which other machines cannot reach.
_LOCAL_PREFIXES: Final = ("127.", "::1", "fe80:")


# --- addresses ---


@dataclass(frozen=True)
class Endpoint:
    """The address of a server.

    Attributes:
        secret: A secret of the server in hexadecimal digits. Both sides of a connection prove that
            they know it.
        host: The name of the machine. A server on the same machine is reached by loopback.
        addresses: Numeric addresses that other machines may reach, the likeliest one first.
        port: The port of the server.
    """

    secret: str
    host: str
    addresses: Sequence[str]
    port: int

    def list_addresses(self) -> list[str]:
        """Return the addresses to try from this process, in order."""
        loopback = ["127.0.0.1", "::1"]
        remote = [address for address in self.addresses if address not in loopback]
        if self.host == socket.gethostname() or not remote:
            return [*loopback, *remote]
        # Many machines have the same address on a bridge of containers. There this process would
        # reach its own machine, whose refusal says nothing about the peer.
        own = _list_interface_addresses()
        return [address for address in remote if address not in own] or remote

    def connect(self, attempt: int, deadline: float) -> Connection:
        """Connect to the server.

        Args:
            attempt: The number of earlier connections that reached another process or got no
                reply. Each attempt starts at another address.
            deadline: The deadline of the connection, by ``time.monotonic()``.

        Returns:
            A connection on which nothing has been sent.

        Raises:
            OSError: No process listens at any of the addresses.
        """
        addresses = self.list_addresses()
        first = attempt % len(addresses)
        failure: OSError = ConnectionError("no address")
        for address in addresses[first:] + addresses[:first]:
            # A timeout of 0 would make the socket non-blocking.
            limit_s = max(0.001, min(_CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            try:
                return Connection(socket.create_connection((address, self.port), limit_s), deadline)
            except OSError as error:
                # A refusal says that the server has exited, so later timeouts must not hide it.
                failure = failure if isinstance(failure, ConnectionRefusedError) else error
        raise failure


class Endpoints:
    """The endpoints of the ranks of a process group, by group rank.

    [Note: stale endpoints] The store may outlive the group, the processes and a full attempt of the
    launcher, with the endpoints of earlier servers. Each server has its own secret, so no caller
    mistakes another process at an old port for the server. A caller looks up an unreachable rank
    again until the new server of the rank has published its endpoint. A server refuses calls after
    its group was destroyed. Otherwise a new group might read the tensors of an old one.

    Args:
        group: The process group; only a weak reference is stored.

    Attributes:
        verified: The endpoints at which this process has reached ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._base = f"ovpatch/peers/{group.size()}"
        self.verified: dict[int, Endpoint] = {}
        # The thread that has read the store for longer than its caller could wait.
        self._stuck_thread: threading.Thread | None = None

    def publish(self, rank: int, endpoint: Endpoint) -> None:
        """Write the endpoint of this process into the store, where all ranks then see it."""
        store = self._find_store()
        assert store is not None, "the process group was destroyed"
        key = f"{self._base}/{rank}"
        store.set(key, json.dumps(asdict(endpoint)))
        # A TCPStore returns before the value arrives, which takes 40 ms with delayed
        # acknowledgements. A peer that reads the store in this time would miss this rank.
        store.check([key])

    def look_up(self, rank: int, timeout_s: float) -> Endpoint | None:
        """Return the newest endpoint of a rank; None without one.

        Args:
            rank: The group rank.
            timeout_s: Seconds to wait for the store.

        Raises:
            TimeoutError: The store has not replied, and the rank was never reached.
            RuntimeError: The store has exited, and the rank was never reached.
        """
        store = self._find_store()
        if store is None:
            return self.verified.get(rank)
        try:
            return self._read(store, f"{self._base}/{rank}", timeout_s)
        except (RuntimeError, TimeoutError):
            if rank in self.verified:
                return self.verified[rank]
            raise

    def is_destroyed(self) -> bool:
        """Return whether the process group was destroyed."""
        return self._find_store() is None

    def _read(self, store: dist.Store, key: str, timeout_s: float) -> Endpoint | None:
        """Return the endpoint that the store has for a key, if any.

        A client of the store waits forever if the link to the host of the store is down, so another
        thread reads.
        """
        # Each thread that waited would delay the calls of ranks that can be reached.
        if self._stuck_thread is not None and self._stuck_thread.is_alive():
            raise TimeoutError(_REASON_NO_STORE)
        results: queue.SimpleQueue[Endpoint | RuntimeError | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_read_endpoint,
            args=(store, key, results),
            name="ovpatch-peers-look-up",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            # Some versions of Python start no threads at exit of the interpreter.
            _read_endpoint(store, key, results)
        try:
            found = results.get(timeout=timeout_s)
        except queue.Empty:
            self._stuck_thread = thread
            raise TimeoutError(_REASON_NO_STORE) from None
        if isinstance(found, RuntimeError):
            raise found
        return found

    def _find_store(self) -> dist.Store | None:
        # A reference to the store would keep its server alive, which has a port that the next
        # group may need.
        group = self._group()
        return None if group is None else group_store(group)


def _read_endpoint(
    store: dist.Store, key: str, results: queue.SimpleQueue[Endpoint | RuntimeError | None]
) -> None:
    try:
        # get() of a missing key blocks, and with it all threads that use the connection.
        is_there = store.check([key])
        results.put(Endpoint(**json.loads(store.get(key))) if is_there else None)
    except RuntimeError as error:
        results.put(error)


def list_own_addresses(store: dist.Store | None) -> list[str]:
    """Return the addresses of this machine, starting with the one on the route to the store."""
    root = unwrap_store(store)
    main_host = root.host if isinstance(root, dist.TCPStore) else os.environ.get("MASTER_ADDR", "")
    found = [_find_source_address(host) for host in (main_host, *_OUTSIDE_ADDRESSES) if host]
    found += _list_interface_addresses()
    unique = dict.fromkeys(found)
    return [address for address in unique if address and not address.startswith(_LOCAL_PREFIXES)]


@functools.cache
def _find_source_address(host: str) -> str:
    """Return the address from which this machine would send to ``host``; "" without a route."""
    with suppress(OSError):
        info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        family, kind, protocol, _, address = info
        with socket.socket(family, kind, protocol) as probe:
            # To connect a UDP socket only looks up the route, and sends nothing.
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


@functools.cache
def _list_interface_addresses() -> list[str]:
    """Return the IPv4 addresses of all interfaces, since a cluster may have no route outside."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # An interface without an IPv4 address raises.
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return found


_SIOCGIFADDR: Final = 0x8915


# --- calls ---

# Once a rank has failed, the remaining ranks have this time, so that the error names all that fail.
_GRACE_S: Final = 1.0
# A peer that accepts a connection but sends nothing for this time is taken for another process.
_GREETING_TIMEOUT_S: Final = 5.0
# The first and the longest pause between two attempts to reach a rank.
_MIN_PAUSE_S: Final = 0.001
_MAX_PAUSE_S: Final = 0.25
# A store that does not reply for this time is taken for unreachable.
_LOOK_UP_TIMEOUT_S: Final = 10.0
# A poll returns after this time, although nothing happened.
_POLL_TIMEOUT_S: Final = 10.0

# The open connections of one request. All ranks of a large job may call all others at the same
# time, as for a checkpoint that each of them saves, and a process has about a thousand files.
MAX_CONNECTIONS: Final = 64

_REASON_EXITED: Final = "has exited"
_REASON_EXITED_IN_CALL: Final = "exited before it had replied"
#: The reasons for failures of ranks whose processes have exited.
EXIT_REASONS: Final = (_REASON_EXITED, _REASON_EXITED_IN_CALL)
#: The beginning of the reason if no address of a rank leads to its server.
REASON_UNREACHABLE: Final = "cannot be reached"
_REASON_NO_STORE: Final = "the store that has its address does not reply"
_REASON_SILENT: Final = "accepts connections but sends nothing"

#: Headers and tensors, by rank.
Replies = dict[int, tuple[dict[str, Any], list[Tensor]]]


@dataclass
class _Call:
    rank: int
    # Shown in the error if the call does not complete in time.
    state: str = "has not been looked up"
    connection: Connection | None = None
    endpoint: Endpoint | None = None
    # The message that the rank must send next: "greeting", "proof" or "reply"; "" if not connected.
    stage: str = ""
    signature: bytes = b""
    connect_time: float = 0.0
    attempt: int = 0


@dataclass
class Request:
    """A message of JSON values that is sent to ranks of a group, and their replies.

    A late rank does not delay its peers.

    Attributes:
        endpoints: The endpoints of the group.
        ranks: The group ranks to call.
        message: The JSON values to send.
        deadline: The end of the request, by ``time.monotonic()``.
        should_retry: Whether an unreachable rank is looked up again until the deadline. Otherwise
            it fails at once. Default: True.
        max_connections: The number of ranks to call at the same time. Default: all.
        replies: Headers and tensors of the ranks that have replied.
        failures: The reason why a rank will not reply, by rank.
        tracebacks: The traceback of a handler that raised, by rank.
    """

    endpoints: Endpoints
    ranks: Iterable[int]
    message: Mapping[str, Any]
    deadline: float
    should_retry: bool = True
    max_connections: float = math.inf
    replies: Replies = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    tracebacks: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The ranks that have neither replied nor failed.
        self._calls = {rank: _Call(rank) for rank in self.ranks}
        # The addresses of hosts that did not reply. Each of a lost host's ranks would take as long again.
        self._silent_hosts: list[Sequence[str]] = []
        self._selector = selectors.DefaultSelector()
        self._pause_s = _MIN_PAUSE_S

    def run(self) -> None:
        """Poll until every rank has replied or failed, or until the deadline; then close.

        Raises:
            RuntimeError: The store does not reply.
        """
        try:
            while self._calls and time.monotonic() < self.deadline:
                self.poll()
        finally:
            self.close()

    def list_pending(self) -> dict[int, str]:
        """Return the states of the calls that have neither replied nor failed, by rank."""
        return {call.rank: call.state for call in self._calls.values()}

    def poll(self) -> None:
        """Connect to ranks and read their messages; return after some seconds without any."""
        for call in [call for call in self._calls.values() if call.connection is None]:
            if len(self._selector.get_map()) >= self.max_connections:
                break
            self._attempt(call, self._connect)
        timeout_s = min(self.deadline - time.monotonic(), self._choose_timeout_s())
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            self._attempt(key.data, self._read)
        for call in [call for call in self._calls.values() if call.stage == "greeting"]:
            if time.monotonic() > call.connect_time + _GREETING_TIMEOUT_S:
                self._reset(call, _REASON_SILENT)

    def close(self) -> None:
        """Close all connections."""
        for call in self._calls.values():
            if call.connection is not None:
                call.connection.close()
        self._selector.close()

    def _choose_timeout_s(self) -> float:
        # The last call may have failed in this poll, so no message will arrive.
        if not self._calls:
            return 0.0
        if len(self._selector.get_map()) >= min(self.max_connections, len(self._calls)):
            is_greeting = any(call.stage == "greeting" for call in self._calls.values())
            return _GREETING_TIMEOUT_S if is_greeting else _POLL_TIMEOUT_S
        # Some rank must be looked up again.
        self._pause_s = min(1.2 * self._pause_s, _MAX_PAUSE_S)
        return self._pause_s

    def _attempt(self, call: _Call, action: Callable[[_Call], None]) -> None:
        try:
            action(call)
        except OSError as error:
            self._handle_error(call, error)

    def _connect(self, call: _Call) -> None:
        known = self.endpoints.verified.get(call.rank)
        if known is not None and call.attempt == 0:
            call.endpoint = known
        else:
            limit_s = min(_LOOK_UP_TIMEOUT_S, self.deadline - time.monotonic())
            call.endpoint = self.endpoints.look_up(call.rank, max(0.001, limit_s))
        if call.endpoint is None:
            call.state = "has not published its address"
            if not self.should_retry:
                self._fail(call, call.state)
            return
        if call.endpoint.addresses in self._silent_hosts:
            raise TimeoutError("its host did not reply")
        call.connection = call.endpoint.connect(call.attempt, self.deadline)
        call.stage = "greeting"
        call.connect_time = time.monotonic()
        # In later attempts, the state has the reason why an earlier one failed.
        if call.attempt == 0:
            call.state = _REASON_SILENT
        self._selector.register(call.connection, selectors.EVENT_READ, call)

    def _read(self, call: _Call) -> None:
        assert call.connection is not None
        assert call.endpoint is not None
        # A failure of another rank may have moved the deadline.
        call.connection.deadline = self.deadline
        if call.stage == "greeting":
            secret = bytes.fromhex(call.endpoint.secret)
            call.signature = call.connection.reply_to_challenge(secret)
            remaining_s = self.deadline - time.monotonic()
            call.connection.send({**self.message, "timeout_s": remaining_s})
            call.stage = "proof"
        elif call.stage == "proof":
            call.connection.verify_signature(call.signature)
            self.endpoints.verified[call.rank] = call.endpoint
            call.stage = "reply"
            call.state = "received the call and has not replied"
        else:
            self._handle_message(call, *call.connection.receive())

    def _handle_message(
        self, call: _Call, message: Mapping[str, Any], tensors: list[Tensor]
    ) -> None:
        if message["state"] == "unregistered":
            call.state = "does not serve this topic"
        elif message["state"] == "running":
            call.state = "is working on its reply"
        elif message["state"] == "failed":
            self.tracebacks[call.rank] = message["traceback"]
            self._fail(call, f"failed: {message['error']}")
        else:
            self.replies[call.rank] = (message["reply"], tensors)
            self._finish(call)

    def _handle_error(self, call: _Call, error: OSError) -> None:
        """Look the rank up again, unless it is known to have exited; see [Note: stale endpoints]."""
        unreachable = f"{REASON_UNREACHABLE}: {error.strerror or error}"
        is_cut_off = call.stage == "reply" and not isinstance(error, TimeoutError)
        # A first attempt uses the verified endpoint without a lookup, and a new server of the rank
        # may have replaced it.
        is_newest = call.attempt > 0 and call.endpoint == self.endpoints.verified.get(call.rank)
        if is_newest and isinstance(error, ConnectionRefusedError):
            self._fail(call, _REASON_EXITED)
        elif is_cut_off:
            self._fail(call, _REASON_EXITED_IN_CALL)
        elif not self.should_retry:
            # A host that refuses a connection is there.
            if call.connection is None and call.endpoint and not isinstance(error, ConnectionError):
                self._silent_hosts.append(call.endpoint.addresses)
            self._fail(call, unreachable)
        else:
            self._reset(call, call.state if call.stage == "reply" else unreachable)

    def _reset(self, call: _Call, state: str) -> None:
        self._disconnect(call)
        call.state = state
        call.stage = ""
        call.attempt += 1

    def _fail(self, call: _Call, reason: str) -> None:
        self._finish(call)
        self.failures[call.rank] = reason
        if self.should_retry:
            self.deadline = min(self.deadline, time.monotonic() + _GRACE_S)

    def _finish(self, call: _Call) -> None:
        self._disconnect(call)
        del self._calls[call.rank]

    def _disconnect(self, call: _Call) -> None:
        if call.connection is not None:
            self._selector.unregister(call.connection)
            call.connection.close()
            call.connection = None

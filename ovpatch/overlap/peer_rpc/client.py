"""One request to several ranks at a time, on the calling thread, and the addresses of their servers.

The addresses are kept in the group's store.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import group_store, unwrap_store
from ovpatch.overlap.peer_rpc.wire import Connection

_CONNECT_S = 3.0  # until one attempt to connect is given up and the next address is tried
# Addresses outside of this network, for route lookups. Reserved for documentation; nothing is sent to them.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")
_LOCAL_ONLY = ("127.", "::1", "fe80:")  # of no use to other machines: loopback and link-local addresses


@dataclass(frozen=True)
class Endpoint:
    """How to reach a server."""

    secret: str  # shared secret that both sides prove to know, in hexadecimal digits
    host: str  # the machine's name; servers of the same machine are reached over its loopback device
    addresses: Sequence[str]  # numeric addresses by which other machines may reach it, the likeliest first
    port: int  # where it listens

    def addresses_to_try(self) -> list[str]:
        """Return the addresses to try from this process, in order."""
        loopback = ["127.0.0.1", "::1"]
        others = [address for address in self.addresses if address not in loopback]
        return [*loopback, *others] if self.host == socket.gethostname() or not others else others

    def connect(self, attempt: int, deadline: float) -> Connection:
        """Return a connection, with a deadline, on which nothing has been sent.

        ``attempt`` tells how many connections led to another process or to silence; each starts at another address.
        OSError if no process listens at any of them.
        """
        addresses = self.addresses_to_try()
        first = attempt % len(addresses)
        failure: OSError = ConnectionError("no address")
        for address in addresses[first:] + addresses[:first]:
            limit = max(0.001, min(_CONNECT_S, deadline - time.monotonic()))
            try:
                return Connection(socket.create_connection((address, self.port), limit), deadline)
            except OSError as error:
                # Where one address refuses and another does not respond, the refusal tells more.
                failure = failure if isinstance(failure, ConnectionRefusedError) else error
        raise failure


class Endpoints:
    """The endpoints of a process group's ranks, by group rank; the group is referenced weakly.

    [Note: stale endpoints] The store may outlive the group, the processes and a launcher's whole attempt, with the
    endpoints of earlier servers in it. Each server has a secret of its own, so another process that listens at an old
    port is not taken for it. A rank that cannot be reached is looked up again until its new server has published an
    endpoint. A server whose group was destroyed refuses calls, or a new group could read what an old one held.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._base = f"ovpatch/peers/{group.size()}"
        self.verified: dict[int, Endpoint] = {}  # at which this process has reached ranks before

    def publish(self, rank: int, endpoint: Endpoint) -> None:
        """Put this process's endpoint into the store; all ranks can see it when this returns."""
        store, key = self._store(), f"{self._base}/{rank}"
        assert store is not None, "the process group was destroyed"
        store.set(key, json.dumps(asdict(endpoint)))
        # A TCPStore does not wait until a value has arrived, which takes 40 ms under delayed acknowledgements. A peer
        # that looks meanwhile would think that this rank takes no part.
        store.check([key])

    def look_up(self, rank: int) -> Endpoint | None:
        """Return the newest endpoint of a rank, None if there is none; RuntimeError if the store does not answer."""
        store, key = self._store(), f"{self._base}/{rank}"
        if store is None:
            return self.verified.get(rank)
        try:
            # By check(): get() of a missing key blocks, and with it everything else that uses the store's connection.
            if not store.check([key]):
                return None
            return Endpoint(**json.loads(store.get(key)))
        except RuntimeError:  # its host has ended
            if rank in self.verified:
                return self.verified[rank]
            raise

    def is_destroyed(self) -> bool:
        """Return whether the process group was destroyed."""
        return self._store() is None

    def _store(self) -> dist.Store | None:
        # Looked up each time: a reference to the store would keep its server, and so the next group's port, in use.
        group = self._group()
        return None if group is None else group_store(group)


def list_own_addresses(store: dist.Store | None) -> list[str]:
    """Return this machine's addresses; the one on the route to the store's host comes first."""
    root = unwrap_store(store)
    store_host = root.host if isinstance(root, dist.TCPStore) else os.environ.get("MASTER_ADDR", "")
    found = [_source(host) for host in (store_host, *_OUTSIDE) if host] + _interface_addresses()
    return list(dict.fromkeys(address for address in found if address and not address.startswith(_LOCAL_ONLY)))


@functools.cache
def _source(host: str) -> str:
    """Return the address from which this machine would send to ``host``, "" if there is no route. Sends nothing."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


@functools.cache
def _interface_addresses() -> list[str]:
    """Return the IPv4 addresses of all interfaces: a cluster's nodes may have no route to the outside."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(reply[20:24]))
    return found


_GRACE_S = 1.0  # that the other ranks may still take once one has failed, so that the error names all that fail
_GREETING_S = 5.0  # until a peer that accepts a connection but sends nothing is taken for another process
_PAUSE_S = (0.001, 0.25)  # between two attempts to reach a rank, at first and at most
_POLL_S = 10.0  # after which a poll returns though nothing happened

# Open connections of one request. All ranks of a large job may call all others at the same time, as for a checkpoint
# that each of them saves, and a process may open some thousand files at most.
MAX_CONNECTIONS = 64

# Reasons of failures of a rank whose process has ended.
ENDED = ("has ended", "ended before it had answered")
_SILENT = "accepts connections but sends nothing"

Replies = dict[int, tuple[dict[str, Any], list[Tensor]]]


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

    def poll(self) -> None:
        """Connect to ranks and read what they sent; wait for one of them, for some seconds at most."""
        for call in [call for call in self._calls.values() if call.connection is None]:
            if len(self._selector.get_map()) >= self.max_connections:
                break
            self._attempt(call, self._connect)
        left = max(0.0, min(self.deadline - time.monotonic(), self._until_retry()))
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
        if len(self._selector.get_map()) >= min(self.max_connections, len(self._calls)):
            return _GREETING_S if any(call.stage == "greeting" for call in self._calls.values()) else _POLL_S
        self._pause = min(1.2 * self._pause, _PAUSE_S[1])
        return self._pause

    def _attempt(self, call: _Call, action: Callable[[_Call], None]) -> None:
        try:
            action(call)
        except OSError as error:
            self._handle_error(call, error)

    def _connect(self, call: _Call) -> None:
        known = self.endpoints.verified.get(call.rank)
        call.endpoint = known if known and not call.attempt else self.endpoints.look_up(call.rank)
        if call.endpoint is None:
            call.state = "has not published its address"
            if not self.retry:
                self._fail(call, call.state)
            return
        call.connection = call.endpoint.connect(call.attempt, self.deadline)
        call.stage, call.begun = "greeting", time.monotonic()
        if not call.attempt:  # later, why an attempt failed tells more
            call.state = _SILENT
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
            self.endpoints.verified[call.rank] = call.endpoint
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
            self._fail(call, f"failed: {message['error']}")
        else:
            self.replies[call.rank] = (message["reply"], tensors)
            self._finish(call)

    def _handle_error(self, call: _Call, error: OSError) -> None:
        """Look the rank up again, unless it is known to have ended; see [Note: stale endpoints]."""
        current = call.attempt > 0 and call.endpoint == self.endpoints.verified.get(call.rank)
        ended = current and isinstance(error, ConnectionRefusedError)
        cut = call.stage == "reply" and not isinstance(error, TimeoutError)
        unreachable = f"cannot be reached: {error.strerror or error}"
        if ended or cut or not self.retry:
            self._fail(call, ENDED[0] if ended else ENDED[1] if cut else unreachable)
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

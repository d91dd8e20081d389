"""Where the servers of a process group's ranks listen, kept in the group's store.

[Note: stale cards] The store may outlive the group, the processes and a launcher's whole attempt, with the cards of
earlier servers in it. Each server has a secret of its own, so nobody takes another process for it that happens to
listen at its old port; and one that cannot be reached is looked up again, until its successor has published a card.
A server whose group was destroyed no longer answers, or a new group could hear what an old one held.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ovpatch.overlap.comm.group_state import group_store
from ovpatch.overlap.peer_rpc.wire import Connection

# Seconds until one attempt to connect is given up and the next address is tried.
_CONNECT_S = 3.0

# Stands for everything outside: reserved for documentation, so no host. Nothing is sent to it.
_SOMEWHERE = ("192.0.2.1", "2001:db8::1")

# Addresses that mean another machine elsewhere: loopback and link-local ones.
_OF_NO_USE = ("127.", "::1", "fe80:")


@dataclass(frozen=True)
class Endpoint:
    """How to reach a server.

    Args:
        secret: What lets one in, in hexadecimal digits.
        host: The machine's name; servers of the same machine are reached over its loopback device.
        addresses: Numeric addresses by which other machines may reach it, the likeliest first.
        port: Where it listens.
    """

    secret: str
    host: str
    addresses: tuple[str, ...]
    port: int

    def ways(self) -> list[str]:
        """Return the addresses to try from this process, in order."""
        loopback = ["127.0.0.1", "::1"]
        others = [address for address in self.addresses if address not in loopback]
        return [*loopback, *others] if self.host == socket.gethostname() or not others else others

    def dial(self, attempt: int, deadline: float) -> Connection:
        """Connect, without a word said yet.

        Args:
            attempt: How many connections led to somebody else or to nobody who spoke; the next way is tried first.
            deadline: When everything on the line has to be through.

        Raises:
            OSError: No way led to anybody who listens.
        """
        ways = self.ways()
        first = attempt % len(ways)
        failure: OSError = ConnectionError("no address")
        for way in ways[first:] + ways[:first]:
            limit = max(0.001, min(_CONNECT_S, deadline - time.monotonic()))
            try:
                return Connection(socket.create_connection((way, self.port), limit), deadline)
            except OSError as error:
                # Where one way is refused and another leads nowhere, the refusal tells more.
                failure = failure if isinstance(failure, ConnectionRefusedError) else error
        raise failure


class Endpoints:
    """The cards of a process group's ranks, by group rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._base = f"ovpatch/peers/{group.size()}"
        self._proven: dict[int, Endpoint] = {}

    def publish(self, rank: int, card: Endpoint) -> None:
        """Put this process's card into the store, for all to see when this returns."""
        store, key = self._store(), f"{self._base}/{rank}"
        assert store is not None, "the process group was destroyed"
        store.set(key, json.dumps(asdict(card)))
        # A TCPStore does not wait until a value has arrived, which takes 40 ms if its end waits for an acknowledgement.
        # A peer that looks meanwhile would think that this rank takes no part.
        store.check([key])

    def look_up(self, rank: int) -> Endpoint | None:
        """Return the newest card of a rank; None where there is none yet.

        Raises:
            RuntimeError: The store does not answer.
        """
        store, key = self._store(), f"{self._base}/{rank}"
        if store is None:
            return self._proven.get(rank)
        try:
            # By check(): get() of a missing key blocks, and with it everything else that uses the store's connection.
            if not store.check([key]):
                return None
            fields = json.loads(store.get(key))
        except RuntimeError:  # its host has ended
            if rank in self._proven:
                return self._proven[rank]
            raise
        return Endpoint(fields["secret"], fields["host"], tuple(fields["addresses"]), fields["port"])

    def proven(self, rank: int) -> Endpoint | None:
        """Return the card by which this process has reached a rank's server before."""
        return self._proven.get(rank)

    def prove(self, rank: int, card: Endpoint) -> None:
        """Remember the card by which a rank was reached."""
        self._proven[rank] = card

    def destroyed(self) -> bool:
        """Whether the process group was destroyed."""
        return self._store() is None

    def _store(self) -> dist.Store | None:
        # Looked up each time: a store that is kept would keep its server, and so the port for the next group, in use.
        group = self._group()
        return None if group is None else group_store(group)


def own_addresses(store: dist.Store | None) -> tuple[str, ...]:
    """Return this machine's addresses, the one that its route to the store's host has first."""
    found = [_source(host) for host in (_store_host(store), *_SOMEWHERE) if host] + _of_interfaces()
    return tuple(dict.fromkeys(address for address in found if address and not address.startswith(_OF_NO_USE)))


def _store_host(store: dist.Store | None) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else os.environ.get("MASTER_ADDR", "")


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
def _of_interfaces() -> list[str]:
    """Return the IPv4 addresses of all interfaces: a cluster's nodes may have no route to elsewhere."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(reply[20:24]))
    return found

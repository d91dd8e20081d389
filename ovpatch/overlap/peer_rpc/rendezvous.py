"""The addresses of the servers of a process group's ranks, kept in the group's store."""

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
from typing import Any

import torch.distributed as dist

from ovpatch.overlap.comm.group_state import group_store
from ovpatch.overlap.peer_rpc.wire import Connection

# Seconds until one attempt to connect is given up and the next address is tried.
_CONNECT_S = 3.0

# Addresses outside of this network, for route lookups. Reserved for documentation; nothing is sent to them.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")

# Addresses that are of no use to other machines: loopback and link-local ones.
_LOCAL_ONLY = ("127.", "::1", "fe80:")


@dataclass(frozen=True)
class Endpoint:
    """How to reach a server."""

    secret: str  # shared secret that both sides prove to know, in hexadecimal digits
    host: str  # the machine's name; servers of the same machine are reached over its loopback device
    addresses: tuple[str, ...]  # numeric addresses by which other machines may reach it, the likeliest first
    port: int  # where it listens

    def addresses_to_try(self) -> list[str]:
        """Return the addresses to try from this process, in order."""
        loopback = ["127.0.0.1", "::1"]
        others = [address for address in self.addresses if address not in loopback]
        return [*loopback, *others] if self.host == socket.gethostname() or not others else others

    def connect(self, attempt: int, deadline: float) -> Connection:
        """Return a connection, with a deadline, on which nothing has been sent.

        ``attempt`` tells how many connections led to another process or to silence; each starts at another address.

        Raises:
            OSError: No process listens at any of the addresses.
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
        self._size, self._pid = group.size(), os.getpid()
        self._verified: dict[int, Endpoint] = {}
        self._for_forks: dict[int, Endpoint] = {}

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
        if os.getpid() != self._pid:  # the store's connection is the parent's
            return self._verified.get(rank) or self._for_forks.get(rank)
        store, key = self._store(), f"{self._base}/{rank}"
        if store is None:
            return self._verified.get(rank)
        try:
            # By check(): get() of a missing key blocks, and with it everything else that uses the store's connection.
            if not store.check([key]):
                return None
            return _endpoint(store.get(key))
        except RuntimeError:  # its host has ended
            if rank in self._verified:
                return self._verified[rank]
            raise

    def look_up_for_forks(self) -> None:
        """Look up the ranks that children of this process could not find, if all ranks can be found.

        Raises:
            RuntimeError: The store does not answer.
        """
        ranks = [rank for rank in range(self._size) if rank not in self._verified and rank not in self._for_forks]
        keys = [f"{self._base}/{rank}" for rank in ranks]
        store: Any = self._store() if ranks else None
        if store is not None and os.getpid() == self._pid and store.check(keys):
            # At once where the store can: all ranks of a large job may fork at the same time.
            values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
            self._for_forks.update(zip(ranks, map(_endpoint, values), strict=True))

    def verified(self, rank: int) -> Endpoint | None:
        """Return the endpoint at which this process has reached a rank's server before."""
        return self._verified.get(rank)

    def set_verified(self, rank: int, endpoint: Endpoint) -> None:
        """Remember the endpoint at which a rank was reached."""
        self._verified[rank] = endpoint

    def is_destroyed(self) -> bool:
        """Return whether the process group was destroyed."""
        return self._store() is None

    def _store(self) -> dist.Store | None:
        # Looked up each time: a reference to the store would keep its server, and so the next group's port, in use.
        group = self._group()
        return None if group is None else group_store(group)


def _endpoint(value: bytes) -> Endpoint:
    fields = json.loads(value)
    return Endpoint(fields["secret"], fields["host"], tuple(fields["addresses"]), fields["port"])


def own_addresses(store: dist.Store | None) -> tuple[str, ...]:
    """Return this machine's addresses; the one on the route to the store's host comes first."""
    found = [_source(host) for host in (_store_host(store), *_OUTSIDE) if host] + _interface_addresses()
    return tuple(dict.fromkeys(address for address in found if address and not address.startswith(_LOCAL_ONLY)))


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
def _interface_addresses() -> list[str]:
    """Return the IPv4 addresses of all interfaces: a cluster's nodes may have no route to the outside."""
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

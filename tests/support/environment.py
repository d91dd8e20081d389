"""The environment that tests give to processes: the caller's, without what would change a result."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

# Ranks talk over the loopback device, however the host name resolves.
_LOOPBACK: Final = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)


# torch's store looks up the names of its peers' addresses, in the client and in the server's only thread. Where a name
# server loses a query, that costs 5 seconds by default.
_QUICK_RESOLVER: Final = "timeout:1 attempts:1"


def resolve_quickly() -> None:
    """Let this process wait for a name server no longer than a second. Call it before the first look-up."""
    os.environ.setdefault("RES_OPTIONS", _QUICK_RESOLVER)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without ovpatch's and the launcher's variables, with one thread a process."""
    ours = ("OVPATCH", "TORCHELASTIC_")
    theirs = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCH_LOGS",
    }
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(ours) and name not in theirs
    }
    kept |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    kept.setdefault("RES_OPTIONS", _QUICK_RESOLVER)
    # Inductor would start processes for compiling Triton's kernels next to each rank, although no kernel is compiled.
    kept.setdefault("TORCH_WARM_POOL", "0")
    if _LOOPBACK is not None:
        kept.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    return kept


def updated(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment with changes; None removes a variable."""
    result = dict(environment)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def launched(world: int) -> dict[str, str]:
    """Return the variables that torchrun sets for all ranks of a job on this machine.

    ``RANK`` and ``LOCAL_RANK`` are missing.
    """
    size = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {**size, **agent, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def free_port() -> int:
    """Return a port that no process listens on and that no outgoing connection will take before it is used.

    Port 0 would choose from the range of outgoing connections, of which a program makes dozens before its last group.
    """
    while True:
        port = _ports.randrange(15000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# Tests seed the generator of the module, and forked processes share the state of any other generator.
_ports = random.SystemRandom()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove ovpatch's variables from this process's environment, because the user may have set some."""
    for name in [name for name in os.environ if name.startswith("OVPATCH")]:
        monkeypatch.delenv(name)


def cleaned(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Set this process's environment to a clean one and ``more``, for code under test that hands it on to programs."""
    wanted = clean(os.environ) | more
    for name in set(os.environ) - set(wanted):
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)


@contextmanager
def exactly(wanted: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment for a while, for processes that inherit it."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)

"""Hosts that are real to the code, on one Linux machine: network namespaces on a bridge, with links of a limited rate.

Each host has its own address, host name, loopback, name table and shared memory. It shares the boot id and the clock
of the machine. No traffic leaves the machine, and nothing remains once the hosts' processes have ended. Root is needed,
and :func:`reason_to_skip` reports a lack.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.support import patience
from tests.support.environment import clean, updated
from tests.support.pool import start_server
from tests.support.scripts import Result

_TOOLS: Final = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
_NAMESPACES: Final = ("net", "uts", "mnt")
_CLONE_FLAGS: Final = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
_RATE: Final = re.compile(r"[1-9]\d{0,5}(k|m|g)bit")
_NETWORK: Final = "10.77.0"
# A queue must hold a segment that the kernel has not split yet (64 KiB).
_BURST: Final = "256kb"
_PORT: Final = 29400
# A test that is killed cannot remove its hosts, so the kernel ends their processes with it.
_DIE_WITH_TEST: Final = ("setpriv", "--pdeathsig", "KILL")
# Launchers end their workers after this signal.
_END_WITH_TEST: Final = ("setpriv", "--pdeathsig", "TERM")

_ERROR_RATE: Final = (
    "the rate of a link is {!r}, which tc would not understand. Write a number and a unit: 200mbit."
)
_ERROR_COUNT: Final = (
    "the test bed has addresses for 1 to 254 hosts, not for {}. Give one of these."
)
_ERROR_HOST: Final = "there is no host {}, only hosts 0 to {}. Name one of these."


@functools.cache
def reason_to_skip() -> str:
    """Return the reason why this machine can have no hosts; "" if it can."""
    if sys.platform != "linux":
        return "hosts are network namespaces, which only Linux has"
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts need the commands {', '.join(missing)}"
    link = "ip link add name probe0 type veth peer name probe1"
    probe = f"{link} && tc qdisc add dev probe0 root tbf rate 1mbit burst 64kb latency 1s"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True, check=False
    )
    return (
        f"network namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else ""
    )


@contextmanager
def fake_hosts(per_host: int | Sequence[int]) -> Iterator[None]:
    """Let the ranks of one machine count as hosts while the block runs, for tests that need no network.

    Args:
        per_host: The number of ranks on each host, or the host of each rank.
    """
    import torch.distributed as dist

    from ovpatch.overlap.comm import consensus

    rank, world = dist.get_rank(), dist.get_world_size()
    by_rank = (
        [rank // per_host for rank in range(world)] if isinstance(per_host, int) else list(per_host)
    )
    place = {
        "LOCAL_RANK": str(by_rank[:rank].count(by_rank[rank])),
        "LOCAL_WORLD_SIZE": str(by_rank.count(by_rank[rank])),
    }
    with (
        mock.patch.object(consensus, "identify_host", return_value=f"host{by_rank[rank]} boot"),
        # Launchers number the ranks of a host consecutively.
        mock.patch.dict(os.environ, place if by_rank == sorted(by_rank) else {}),
    ):
        yield


class Cluster:
    """Several hosts on one bridge; see :func:`hosts`.

    Attributes:
        addresses: The address of each host.
        names: The host name of each host.
    """

    def __init__(self, count: int, rate: str | None, folder: Path) -> None:
        self.addresses = [f"{_NETWORK}.{host + 1}" for host in range(count)]
        self.names = [f"host{host}" for host in range(count)]
        self._folder = folder
        # The last job may still hold its port.
        self._ports = itertools.count(_PORT)
        self._holders: list[subprocess.Popen[bytes]] = []
        # The bridge has a namespace without any host in it.
        self._switch = self._hold("ip link add bridge type bridge && ip link set bridge up")
        table = folder / "hosts"
        pairs = zip(self.addresses, self.names, strict=True)
        table.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in pairs)
        )
        self._pids = [
            self._hold(
                f"hostname {name} && mount --bind {table} /etc/hosts && mount -t tmpfs none "
                "/dev/shm"
            )
            for name in self.names
        ]
        for host, pid in enumerate(self._pids):
            self._in_switch(f"ip link add port{host} type veth peer name eth0 netns {pid}")
            self._in_switch(f"ip link set port{host} master bridge up")
            up = f"ip address add {self.addresses[host]}/24 dev eth0 && ip link set eth0 up && ip link set lo up"
            # Docker gives each of its machines this address.
            up += " && ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0"
            up += " && ip link set docker0 up"
            _run(["nsenter", "-t", str(pid), "--net", "sh", "-c", up])
        if rate is not None:
            for host in range(count):
                self.limit(host, rate)

    # ---------------------------------------------------------------- links

    def limit(self, host: int, rate: str) -> None:
        """Limit the rate of a host's link in both directions, such as ``200mbit``."""
        _check_rate(rate)
        queue = f"root tbf rate {rate} burst {_BURST} latency 400ms"
        pid = self._pid(host)
        self._in_switch(f"tc qdisc replace dev port{host} {queue}")
        _run(["nsenter", "-t", str(pid), "--net", *f"tc qdisc replace dev eth0 {queue}".split()])

    def queues(self, host: int) -> list[Any]:
        """Return the queues at both ends of a host's link as ``tc`` describes them, with their counters."""
        ends = ((self._switch, f"port{host}"), (self._pid(host), "eth0"))
        command = "nsenter -t {} --net tc -s -j qdisc show dev {}"
        shown = [subprocess.check_output(command.format(*end).split()) for end in ends]
        return [queue for text in shown for queue in json.loads(text)]

    def set_link(self, host: int, *, up: bool) -> None:
        """Take a host's link down, or up again; connections only stall."""
        self._pid(host)
        self._in_switch(f"ip link set port{host} {'up' if up else 'down'}")

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each host has sent over its link since it exists."""
        return [read_sent_bytes(pid) for pid in self._pids]

    def kill(self, host: int) -> None:
        """Let a host lose its power: its peers see silence."""
        self.set_link(host, up=False)
        _kill_processes_of(self._pid(host))

    # ---------------------------------------------------------------- programs

    def enter(self, host: int) -> list[str]:
        """Return the words before a command that runs on a host, in this process's folder."""
        names = ["--net", "--uts", "--mount"]
        return ["nsenter", "-t", str(self._pid(host)), *names, f"--wd={os.getcwd()}", "--"]

    def start(
        self,
        host: int,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on a host; its output goes to files until :meth:`finish`."""
        argv = shlex.split(command) if isinstance(command, str) else list(command)
        if shutil.which(argv[0]) is None:
            argv[0] = str(Path(sys.executable).with_name(argv[0]))
        # Gloo finds its address by the host name, as on most clusters.
        environment = updated(clean(os.environ), {"GLOO_SOCKET_IFNAME": None, **(env or {})})
        with (
            (self._folder / f"out{host}").open("w") as out,
            (self._folder / f"err{host}").open("w") as err,
        ):
            return subprocess.Popen(
                [*_END_WITH_TEST, *self.enter(host), *argv],
                stdout=out,
                stderr=err,
                env=environment,
                text=True,
            )

    def finish(self, host: int, program: subprocess.Popen[str], deadline: float) -> Result:
        """Wait for a program until ``deadline`` by ``time.monotonic()``, and return its result."""
        timed_out = False
        try:
            program.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            _kill_processes_of(self._pid(host))
            program.wait(60)
        out, err = (
            (self._folder / f"{name}{host}").read_text(errors="replace") for name in ("out", "err")
        )
        return Result(tuple(map(str, program.args)), program.returncode, out, err, 0.0, timed_out)

    def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 120,
    ) -> list[Result]:
        """Run a program on each host, and return the results by host.

        ``{host}`` in the command is the number of the host, ``{master}`` the address of host 0.
        """
        deadline = time.monotonic() + patience.scale(timeout)
        text = command if isinstance(command, str) else shlex.join(command)
        programs = [
            self.start(host, text.format(host=host, master=self.addresses[0]), env=env)
            for host in range(len(self._pids))
        ]
        return [self.finish(host, program, deadline) for host, program in enumerate(programs)]

    @contextmanager
    def ranks(
        self,
        per_host: int | Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str | None] | None = None,
    ) -> Iterator[Job]:
        """Start ``function`` on ranks of all hosts; they come from a server that has imported torch.

        Args:
            per_host: The number of ranks of each host.
            function: A function at module level, which makes its process group itself.
            args: Its arguments.
            env: Changes to the environment.
        """
        counts = [per_host] * len(self._pids) if isinstance(per_host, int) else list(per_host)
        places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
        shared = {
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(next(self._ports)),
        }
        start_server(clean(os.environ))
        job = Job()
        try:
            for rank, (host, local) in enumerate(places):
                own = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(counts[host]),
                }
                changes = {"GLOO_SOCKET_IFNAME": None, **shared, **own, **(env or {})}
                job.add(self._pid(host), changes, function, args)
            yield job
        finally:
            job.close()

    # ---------------------------------------------------------------- namespaces

    def close(self) -> None:
        """End everything that runs on the hosts, which removes them."""
        for holder in self._holders:
            _kill_processes_of(holder.pid)
            holder.wait(60)

    def _hold(self, prepare: str) -> int:
        """Start a process that keeps new namespaces; return its id."""
        holder = subprocess.Popen(
            [
                *_DIE_WITH_TEST,
                "unshare",
                "--net",
                "--uts",
                "--mount",
                "sh",
                "-c",
                f"{prepare} && echo ready && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"a host could not be made by: {prepare}")
        return holder.pid

    def _in_switch(self, command: str) -> None:
        _run(["nsenter", "-t", str(self._switch), "--net", *command.split()])

    def _pid(self, host: int) -> int:
        if not 0 <= host < len(self._pids):
            raise ValueError(_ERROR_HOST.format(host, len(self._pids) - 1))
        return self._pids[host]


def _check_rate(rate: object) -> None:
    if not _RATE.fullmatch(str(rate)):
        raise ValueError(_ERROR_RATE.format(rate))


@contextmanager
def hosts(count: int, *, rate: str | None = None) -> Iterator[Cluster]:
    """Make hosts on one bridge, and remove them after the block.

    Args:
        count: The number of hosts.
        rate: The limit of each link in both directions, such as ``200mbit``. Default: none.
    """
    if rate is not None:
        _check_rate(rate)
    if not 1 <= count <= 254:
        raise ValueError(_ERROR_COUNT.format(count))
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        cluster = Cluster.__new__(Cluster)
        cluster._holders = []
        try:
            cluster.__init__(count, rate, Path(folder))  # type: ignore[misc]
            yield cluster
        finally:
            cluster.close()


class Job:
    """The ranks of one function on all hosts."""

    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def add(
        self, host_pid: int, env: Mapping[str, str | None], function: Callable[..., Any], args: Any
    ) -> None:
        """Start one more rank."""
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        name = f"{function.__module__}:{function.__qualname__}"
        process = context.Process(
            target=_rank_main, args=(host_pid, dict(env), name, args, sender), daemon=True
        )
        process.start()
        sender.close()
        self._processes.append(process)
        self._connections.append(receiver)

    def results(self, timeout: float = 120) -> list[Any]:
        """Return the results by rank. The result of a rank that raised is its exception's text.

        A rank that died, or that does not end in time, has the result None.
        """
        deadline = time.monotonic() + patience.scale(timeout)
        results: list[Any] = [None] * len(self._connections)
        pending = dict(enumerate(self._connections))
        while pending and time.monotonic() < deadline:
            ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                with suppress(EOFError, OSError):
                    results[rank] = pending[rank].recv()
                del pending[rank]
        return results

    def close(self) -> None:
        """Kill the ranks that still run."""
        for process in self._processes:
            process.kill()
            process.join(60)
        for connection in self._connections:
            connection.close()


def _rank_main(
    host_pid: int, env: Mapping[str, str | None], name: str, args: Any, sender: Connection
) -> None:
    """Enter a host and call a function; the main function of a rank."""
    os.environ.update({key: value for key, value in env.items() if value is not None})
    for key in [key for key, value in env.items() if value is None]:
        os.environ.pop(key, None)
    folder = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in _NAMESPACES:
        with Path(f"/proc/{host_pid}/ns/{kind}").open() as file:
            if libc.setns(file.fileno(), _CLONE_FLAGS[kind]):
                raise OSError(ctypes.get_errno(), f"the rank could not enter namespace {kind}")
    os.chdir(folder)
    threading.Thread(target=_end_with_test, daemon=True).start()
    module, _, qualname = name.partition(":")
    try:
        __import__(module)
        result = getattr(sys.modules[module], qualname)(*args)
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        # The process ends like a script that fails, so it does not wait for its peers.
        raise
    sender.send(result)
    sender.close()
    # The exit handlers of the process run now, as after a script: a rank serves its peers until they have finished.


def _end_with_test() -> None:
    """Wait for the end of the test's process. The parent in the kernel is the fork server, which ranks keep alive."""
    test = multiprocessing.parent_process()
    assert test is not None
    wait([test.sentinel])
    os._exit(1)


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")


def read_sent_bytes(process: int | str = "self", interface: str = "eth0") -> int:
    """Return the bytes that an interface in the network namespace of a process has sent."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            # The first eight numbers count what was received.
            return int(numbers.split()[8])
    raise RuntimeError(f"process {process} has no interface {interface}")


def read_namespace(pid: int) -> str:
    """Return the name of the network namespace of a process; "" if it has ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def find_processes_in(namespace: str) -> list[int]:
    """Return the ids of the processes in a network namespace."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if read_namespace(pid) == namespace]


def _kill_processes_of(pid: int) -> None:
    """Kill all processes in the network namespace of a process, which is the last."""
    namespace = read_namespace(pid)
    # A holder that failed may not have left the namespace of this machine.
    if namespace not in ("", read_namespace(os.getpid())):
        for member in find_processes_in(namespace):
            if member != pid:
                with suppress(OSError):
                    os.kill(member, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)

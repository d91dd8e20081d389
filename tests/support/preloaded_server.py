"""The server of ``preloaded``: forks processes that have imported torch, one for each client.

The server and the processes that it has forked end when its stdin is closed by the process that started it. A forked
process is ended when its client ends.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.support.compiler import skip_guard_timing
from tests.support.environment import launched
from tests.support.preloaded import HELP_GLOO

MAX_CALL_BYTES = 1 << 18
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Server:
    """The clients, each with the process that was forked for it."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._clients: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._woken, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Serve clients. Return the call in each forked process, and None at the end of the server itself."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno())
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is sys.stdin:
                    for client in list(self._clients):
                        self._drop(client)
                    return None
                if source is self._listener:
                    if (call := self._fork()) is not None:
                        return call
                elif source is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                elif source in self._clients:
                    self._receive(source)

    def _fork(self) -> list[str] | None:
        client, _ = self._listener.accept()
        message, streams, _, _ = socket.recv_fds(client, MAX_CALL_BYTES, 3)
        pid = os.fork()
        if not pid:
            self._leave(client)
            return _become(message, streams)
        for stream in streams:
            os.close(stream)
        self._clients[client] = pid
        self._selector.register(client, selectors.EVENT_READ)
        return None

    def _leave(self, client: socket.socket) -> None:
        """Close everything of the server in a forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for connection in (client, self._listener, self._woken, self._wake, *self._clients):
            connection.close()

    def _reap(self) -> None:
        for client, pid in list(self._clients.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                # The client may have ended.
                with suppress(OSError):
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
                self._drop(client)

    def _receive(self, client: socket.socket) -> None:
        """Forward a signal, or end the process if its client has ended."""
        number = client.recv(1)
        if number:
            _signal(self._clients[client], number[0])
        else:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        """End the remaining processes of a client."""
        pid = self._clients.pop(client)
        self._selector.unregister(client)
        client.close()
        _signal(pid, signal.SIGKILL)
        # The process may have been reaped.
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _show_environment() -> None:
    """Write the environment to the memory that /proc shows.

    The tools under test find their processes by it. Without this, /proc would show the environment of the start.
    """
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    text = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    assert len(text) < end - start, "too little room"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _become(message: bytes, streams: list[int]) -> list[str]:
    """Adopt the client's folder, environment and streams, and return its call."""
    os.setsid()
    folder, count, *rest = message.decode("utf-8", "surrogateescape").split("\0")
    call, variables = rest[: int(count)], rest[int(count) :]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variable.split("=", 1) for variable in variables)
    _show_environment()
    sys.path[0:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    return call


def import_all(*modules: str) -> None:
    """Import what each process would import, without what torch loads by itself."""
    wanted = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    # There is nothing to find yet, and looking is a fifth of these imports' time.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    # Each process would look through all of torch, and copy it for that.
    gc.freeze()
    if wanted is None:
        del os.environ[SWITCH]
    else:
        os.environ[SWITCH] = wanted


def become_rank(world: int, program: list[str]) -> None:
    """Fork the ranks; return in each of them, with torchrun's variables, unless they are set. This process waits.

    FIRST_RANK is the rank of the first of them, where other hosts have ranks as well.
    """
    os.environ.update({**launched(world), **os.environ})
    local_rank = _fork_ranks(world)
    rank = int(os.environ.get("FIRST_RANK", "0")) + local_rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
    _show_environment()
    sys.orig_argv = [sys.executable, "-u", *program]


def _fork_ranks(count: int) -> int:
    """Return the rank, in each of the ranks; end with them, all of which one that fails ends."""
    ranks = set()
    for rank in range(count):
        pid = os.fork()
        if not pid:
            return rank
        ranks.add(pid)
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not code:
            code = 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    os._exit(code)


def run_program(program: list[str]) -> None:
    """Run a program as Python would, with ovpatch loaded where torch's import would have loaded it."""
    import torch

    if os.environ.pop(HELP_GLOO, ""):
        from tests.support import gloo

        gloo.keep_groups()
        gloo.use_one_thread()
    sys.argv = program
    sys.path[0] = os.path.dirname(program[0])
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    runpy.run_path(program[0], run_name="__main__")


def run(ranks: int, program: list[str]) -> int:
    """Run a client's program, on ranks or alone; return the exit code that Python would give it."""
    try:
        if ranks:
            become_rank(ranks, program)
        run_program(program)
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    address, *modules = sys.argv[1:]
    import_all("torch", "torch._dynamo", *modules)
    skip_guard_timing()
    server = Server(address)
    print("ready", flush=True)
    call = server.serve()
    code = 0
    if call is not None:
        code = run(int(call[0]), call[1:])
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # To take all of torch apart costs more than most programs.
    os._exit(code)

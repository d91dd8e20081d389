"""The server of ``preloaded``: forks processes that have imported torch, one for each client.

It ends, and all that it has forked, when its stdin does, which is that of whoever started it. A process that it forks
is ended when its client is.
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

from tests.support.environment import launched
from tests.support.preloaded import HELP_GLOO

LONGEST = 1 << 18  # bytes of a call
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Server:
    """Its clients, each with the process that was forked for it."""

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
        """Return in each forked process with its call, and with None in the server itself, at the end."""
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
                    self._hear(source)

    def _fork(self) -> list[str] | None:
        client, _ = self._listener.accept()
        message, streams, _, _ = socket.recv_fds(client, LONGEST, 3)
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
        """Take nothing of the server into a process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (client, self._listener, self._woken, self._wake, *self._clients):
            one.close()

    def _reap(self) -> None:
        for client, pid in list(self._clients.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with suppress(OSError):  # the client has gone
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
                self._drop(client)

    def _hear(self, client: socket.socket) -> None:
        """Hand a signal on, or end the process whose client has gone."""
        number = client.recv(1)
        if number:
            _signal(self._clients[client], number[0])
        else:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        """End what is left of a client's processes."""
        pid = self._clients.pop(client)
        self._selector.unregister(client)
        client.close()
        _signal(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # it has been reaped
            os.waitpid(pid, 0)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _show_environment() -> None:
    """Let others read it in /proc, where the tools under test find their processes by it: it is that of the start."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    text = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    assert len(text) < end - start, "too little room"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _become(message: bytes, streams: list[int]) -> list[str]:
    """Take the client's folder, environment and streams; return its call."""
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
    gc.disable()  # there is nothing to find yet, and looking is a fifth of these imports' time
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # each process would look through all of torch, and copy it for that
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
    os._exit(code)  # to take all of torch apart costs more than most programs

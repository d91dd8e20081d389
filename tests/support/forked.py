"""Runs programs as ranks forked from a server that has imported torch, and the program's libraries, already.

For runs of which the start is not what is tested: what a program computes, stock or patched, does not depend on who
started it. Such a run costs a second instead of the ten that a launcher and its ranks need for their imports. Each kind
of program is started once as users start it, see ``scripts``.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch

from tests.support.environment import clean, exactly, updated
from tests.support.gloo import keep_groups, use_one_thread
from tests.support.scripts import Result, free_port
from tests.support.worker import die_with_parent

REPORT_DIR = "OVPATCH_REPORT_DIR"

#: Seconds that the other ranks may go on once one has failed.
GRACE = 5.0

# What a process is started by is a function of a module, which other threads of ours use as well.
_starting = threading.Lock()


class Server:
    """The pool's server or, with modules, one of its own, since one cannot take back an import.

    Args:
        modules: What it imports besides torch, and torch._dynamo, which the first optimizer would import in each
            rank. They must not start threads, nor CUDA: neither survives a fork.
    """

    def __init__(self, *modules: str) -> None:
        self._is_own = bool(modules)
        if not modules:
            from tests.support.pool import start_server  # here: it imports pytest, which no library shall find

            start_server(clean(os.environ))
            self._server = forkserver._forkserver
            return
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", __name__, *modules])
        with exactly(clean(os.environ)):
            self._server.ensure_running()

    def close(self) -> None:
        """End a server of its own; what it has forked has ended by then."""
        if self._is_own:
            os.kill(self._server._forkserver_pid, signal.SIGKILL)  # to take down its modules would take a second
            self._server._stop()

    def torchrun(
        self,
        processes: int,
        script: str | os.PathLike[str],
        *args: str,
        env: Mapping[str, str | None] | None = None,
        report: Path | None = None,
        timeout: float = 120,
    ) -> Result:
        """Run a script on several ranks, in an environment as torchrun's.

        Args:
            processes: Number of ranks.
            script: The program.
            args: Its arguments.
            env: Changes to the environment, as for :func:`tests.support.scripts.run`.
            report: Gets the merged report as from ``ovpatch run --report``, which with this is imitated: ovpatch is
                loaded where torch's import would have loaded it.
            timeout: Seconds; then all ranks write their stacks.
        """
        argv = (os.fspath(script), *args)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
        common |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        with tempfile.TemporaryDirectory(prefix="forked-") as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            err.touch()
            if report is not None:
                common |= {"OVPATCH_AUTO": "1", REPORT_DIR: folder}
            ranks = []
            for rank in range(processes):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environment = updated(clean(os.environ) | common | place, env or {})
                ranks.append(self._start(rank, (argv, environment, out, err)))
            began = time.monotonic()
            try:
                timed_out = not _wait(ranks, began + timeout)
                if timed_out:
                    _abort(ranks)
                seconds = time.monotonic() - began
            finally:
                for rank in ranks:
                    _kill(rank)
            rc = int(any(rank.exitcode for rank in ranks))  # 1, whatever the rank's own, as torchrun does
            if report is not None:
                _merge_reports(Path(folder), report)
            texts = (file.read_text(errors="replace") for file in (out, err))
            return Result(argv, rc, *texts, seconds, timed_out)

    def _start(self, rank: int, what: tuple[object, ...]) -> BaseProcess:
        # Not daemonic: the program may use DataLoader workers.
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=what, name=f"rank {rank}")
        connect = self._server.connect_to_new_process
        with _starting, mock.patch.object(forkserver, "connect_to_new_process", connect):
            process.start()
        return process


def _merge_reports(folder: Path, report: Path) -> None:
    from ovpatch.session import workers  # here: in stock ranks, which import this module, nothing of ovpatch is

    if reports := workers.read_reports(folder, "worker"):
        workers.save_json(report, workers.merge_reports(reports))


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> bool:
    """Wait for all, not for long once one has failed; return whether they ended in time."""
    while running := [rank for rank in ranks if rank.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            return any(rank.exitcode for rank in ranks)
        connection.wait([rank.sentinel for rank in running], left)
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)
    return True


def _abort(ranks: Sequence[BaseProcess]) -> None:
    """Make those that run write their stacks and die, one by one; stopped first, so that none reacts to a death."""
    running = [rank for rank in ranks if rank.exitcode is None]
    for rank in running:
        _signal(rank, signal.SIGSTOP)
    for rank in running:
        _signal(rank, signal.SIGABRT)
        _signal(rank, signal.SIGCONT)
        rank.join(5)


def _signal(rank: BaseProcess, number: int) -> None:
    assert rank.pid is not None
    with suppress(ProcessLookupError):
        os.kill(rank.pid, number)


def _kill(rank: BaseProcess) -> None:
    """End a rank and what it has started, which is in its session."""
    assert rank.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    if rank.exitcode is None:
        rank.kill()  # it may not have reached setsid() yet
    rank.join(10)


def _run(argv: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Become a rank: the program, as Python would run it."""
    gc.freeze()  # else a collection writes to all that it shares with the server, which is copied for that
    os.setsid()
    threading.Thread(target=die_with_parent, name="die with pytest", daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, file in ((1, out), (2, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable(file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, "-u", *argv]
    sys.path[0] = str(Path(argv[0]).parent)
    if REPORT_DIR in environment:
        if torch._is_device_backend_autoload_enabled():
            torch._import_device_backends()
    else:  # what is ours needs no help with gloo
        keep_groups()
        use_one_thread()
    runpy.run_path(argv[0], run_name="__main__")

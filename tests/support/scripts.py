"""Runs of complete programs, of which no process survives.

A launcher gives each of its workers a separate session, so no process group contains all of them. Instead the
environment of a run has a mark that all descendants inherit, including those whose parent has ended.

All processes of a program that exceeds its time are stopped. Then they are continued one by one with SIGABRT, the
deepest first, and Python's fault handler writes the stacks of all threads. A stopped process cannot react to the first
death, as a launcher would.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support import patience
from tests.support.environment import clean, updated

_MARK: Final = "TEST_RUN_MARK"


@dataclass(frozen=True)
class Result:
    """The result of a program. ``left`` has the commands of processes that outlived it and had to be killed."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    left: tuple[str, ...] = ()

    def check(self) -> Result:
        """Return self if the program succeeded within its time and left nothing running."""
        __tracebackhide__ = True
        if self.timed_out or self.rc or self.left:
            raise AssertionError(self.describe())
        return self

    def describe(self) -> str:
        end = (
            f"exceeded its time ({self.seconds:.0f} s)"
            if self.timed_out
            else f"ended with {self.rc}"
        )
        left = "".join(f"\nleft running: {command}" for command in self.left)
        streams = (
            f"\n-------- stdout:\n{self.stdout[-8000:]}\n-------- stderr:\n{self.stderr[-12000:]}"
        )
        return f"{' '.join(self.argv)} {end}{left}{streams}"


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run a program to its end, or until ``timeout``; then the stacks of its processes are in ``stderr``.

    Unless ``PYTHONUNBUFFERED`` is set, a program that is cut off has not yet written the last of its output.

    Args:
        argv: Program and arguments.
        timeout: Seconds.
        env: Changes to the environment, which is pytest's without ovpatch's variables; None removes one.
        cwd: Where to run.
    """
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        program = _Program(argv, Path(folder), env or {}, cwd)
        try:
            program.start()
            program.wait(patience.scale(timeout))
            timed_out = program.running()
            if timed_out:
                program.stop()
                program.abort()
            return program.result(timed_out=timed_out)
        finally:
            program.kill()


def torchrun(
    processes: int,
    script: str | os.PathLike[str],
    *args: str,
    launcher: Sequence[str] = (),
    node: Sequence[str] = ("--standalone",),
    env: Mapping[str, str | None] | None = None,
    ovpatch: bool | Sequence[str] = False,
    timeout: float = 120,
    cwd: Path | None = None,
) -> Result:
    """Run a script under torchrun.

    torchrun starts Python unbuffered, and ``print`` then writes a line and its end separately. So that lines of ranks
    do not mix, scripts print ``text + "\\n"`` with ``end=""``.

    Args:
        processes: Processes per node.
        script: The program.
        args: Its arguments.
        launcher: More options of torchrun.
        node: Options of torchrun for the rank of this node. Several nodes are several agents on this machine.
        env: See :func:`run`.
        ovpatch: Whether to run under ``ovpatch run``; a sequence holds its options.
        timeout: Seconds.
        cwd: Where to run.
    """
    head = (
        [str(Path(sys.executable).with_name("ovpatch")), "run", *_options(ovpatch), "--"]
        if ovpatch
        else []
    )
    head += [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        *launcher,
        *node,
    ]
    return run([*head, script, *args], timeout=timeout, env=env, cwd=cwd)


def _options(ovpatch: bool | Sequence[str]) -> Sequence[str]:
    return () if isinstance(ovpatch, bool) else ovpatch


class _Program:
    """A process with all its descendants. Output goes to files: a pipe would stay open in whoever inherits it."""

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        files: Path,
        env: Mapping[str, str | None],
        cwd: Path | None,
    ) -> None:
        self._argv = tuple(os.fspath(part) for part in argv)
        self._stdout, self._stderr = files / "out", files / "err"
        self._mark = uuid.uuid4().hex
        ours = {_MARK: self._mark, "PYTHONFAULTHANDLER": "1"}
        self._env = updated(clean(os.environ) | ours, env)
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._ended = 0.0

    def start(self) -> None:
        self._started = time.monotonic()
        with self._stdout.open("ab") as out, self._stderr.open("ab") as err:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        if sys.platform == "linux":
            resource.prlimit(
                self._process.pid, resource.RLIMIT_CORE, (0, 0)
            )  # an abort shall not write core files

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout: float) -> None:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self._ended = time.monotonic()

    def stop(self) -> None:
        """Stop all processes."""
        for pid in self._alive():
            _signal(pid, signal.SIGSTOP)

    def abort(self) -> None:
        """Make all processes write their stacks and die; they, and those that they talk to, have been stopped."""
        for pid in sorted(self._alive(), key=_depth, reverse=True):
            with self._stderr.open("a") as err:
                err.write(f"\n-------- stacks of process {pid}{_rank(pid)}: {_command(pid)}\n")
            _signal(pid, signal.SIGABRT)
            _signal(pid, signal.SIGCONT)
            until(lambda pid=pid: not _runs(pid))

    def result(self, *, timed_out: bool) -> Result:
        left = (
            ()
            if timed_out or until(lambda: not self._alive(), 10)
            else tuple(map(_command, self._alive()))
        )
        self.kill()
        assert self._process is not None
        return Result(
            self._argv,
            self._process.returncode,
            self._stdout.read_text(errors="replace"),
            self._stderr.read_text(errors="replace"),
            self._ended - self._started,
            timed_out,
            left,
        )

    def kill(self) -> None:
        if self._process is None:
            return
        while alive := self._alive():
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(60)

    def _alive(self) -> list[int]:
        mark = f"{_MARK}={self._mark}".encode()
        return [
            pid for pid in _processes() if mark in _read(pid, "environ").split(b"\0") and _runs(pid)
        ]


def _processes() -> list[int]:
    with suppress(FileNotFoundError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    # Not Linux: only the program itself is ended.
    return []


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _stat(pid: int) -> list[bytes]:
    """State, parent and so on; the command before them may hold spaces and parentheses."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _runs(pid: int) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] not in (b"Z", b"X")


def _depth(pid: int) -> int:
    depth = 0
    while pid > 1 and (stat := _stat(pid)):
        pid, depth = int(stat[1]), depth + 1
    return depth


def _rank(pid: int) -> str:
    variables = dict(item.partition(b"=")[::2] for item in _read(pid, "environ").split(b"\0"))
    return f", rank {variables[b'RANK'].decode()}" if b"RANK" in variables else ""


def _command(pid: int) -> str:
    return " ".join(_read(pid, "cmdline").decode(errors="replace").split("\0")).strip()[:300]


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait for a condition; return whether it came true in time."""
    deadline = time.monotonic() + patience.scale(seconds)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

"""Start the user's command as a child process, forward signals to it, and end it with everything it started."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Final

from ovpatch.exit_codes import ExitCode

# Seconds to end without a signal, and again after SIGTERM.
_END_TIMEOUT_S: Final = 1.5


def end_processes(variable: str) -> None:
    """End every process with a variable, written ``NAME=value``, in its environment: wait, then SIGTERM, then SIGKILL.

    A tool ends a run at a step by ``os._exit``, so workers of data loaders and other children of the script survive.
    All of them inherit the command's environment, whatever their session is.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _wait(lambda: not find_processes(variable), _END_TIMEOUT_S):
            return
        for pid in find_processes(variable):
            send_signal(pid, number)
    # A killed process exists until the system has reaped it.
    _wait(lambda: not find_processes(variable), _END_TIMEOUT_S)


def find_processes(variable: str) -> list[int]:
    """Return the ids of all other processes that started with a variable, written ``NAME=value``."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and variable.encode() in _environment(pid)]


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    # The process has ended, or belongs to another user.
    except OSError:
        return []


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED: Final = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
# Seconds between ticks.
_POLL: Final = 0.5
# Seconds for the system to end killed processes.
_DYING: Final = 5.0
# Seconds; torchrun gives its workers 30 before it kills them.
GRACE: Final = 40.0


class NotStartedError(Exception):
    """The command could not be started."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        # The exit code of a shell in this case.
        self.exit_code = exit_code


def check_executable(command: Sequence[str]) -> None:
    """Check that a command can be started, before anything else is done; raise NotStartedError if not."""
    name = command[0]
    if shutil.which(name) is not None:
        return
    path = Path(name) if os.path.dirname(name) else None
    remedy = f". Put its launcher before it: torchrun {name}" if name.endswith(".py") else ""
    if path is None or not path.exists():
        raise NotStartedError(f"{name}: command not found{remedy}", ExitCode.NOT_FOUND)
    why = os.strerror(errno.EISDIR if path.is_dir() else errno.EACCES)
    raise NotStartedError(f"{name}: not executable ({why}){remedy}", ExitCode.NOT_EXECUTABLE)


class Command:
    """A command, from before its start to its end.

    Without ``own_session`` it shares the terminal's process group (``ovpatch run``): Ctrl-C reaches the command
    directly. With it (``verify``, ``bench``, ``timeline``) the command can be ended with all its processes; Ctrl-C is
    forwarded to the whole group, as a terminal does: a shell alone would wait for its child.
    """

    def __init__(self, *, own_session: bool) -> None:
        self._own_session = own_session
        self._process: subprocess.Popen[bytes] | None = None
        # Signals that arrived before the start.
        self._early: list[int] = []
        # The forwarded signal that should end the command, if any.
        self.interrupted: signal.Signals | None = None
        # The number of signals to end the command.
        self.interrupts = 0

    def start_process(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None
    ) -> None:
        """Start the process; raise NotStartedError if it does not exist or cannot be executed."""
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL if self._own_session else None,
                stdout=output,
                stderr=output,
                start_new_session=self._own_session,
            )
        except FileNotFoundError:
            raise NotStartedError(f"{command[0]}: command not found", ExitCode.NOT_FOUND) from None
        # There is no permission, or it is a folder or a script without its first line.
        except OSError as error:
            raise NotStartedError(
                f"{command[0]}: not executable ({error.strerror})", ExitCode.NOT_EXECUTABLE
            ) from None
        for number in self._early:
            self._send(number)

    def wait_for_exit(self, tick: Callable[[], None] = lambda: None) -> int:
        """Wait for the command's end; return its exit code, or 128 plus the number of the signal that ended it.

        ``tick`` is called about twice a second; it may call :meth:`terminate` or :meth:`stop_process`.
        """
        while True:
            try:
                code = self._running.wait(_POLL)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                tick()

    def terminate(self) -> None:
        """Send the command SIGTERM."""
        self._send(signal.SIGTERM)

    def stop_process(self, grace: float = GRACE) -> None:
        """Send SIGTERM, and kill the rest of the process group after ``grace`` seconds."""
        if not self._lives():
            return
        self.terminate()
        if not _wait(lambda: not self._lives(), grace):
            self._send(signal.SIGKILL)
            _wait(lambda: not self._lives(), _DYING)
        self._running.wait()

    def _lives(self) -> bool:
        """Return whether the command, or any process in the command's session, still runs."""
        running = self._running.poll() is None
        return running or (self._own_session and _group_lives(self._running.pid))

    def _send(self, number: int) -> None:
        if not self._own_session or number not in (*_ENDING, signal.SIGKILL):
            self._running.send_signal(number)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._running.pid, number)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the command was not started: call start() first")
        return self._process

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal; this is a signal handler."""
        if number == signal.SIGINT and not self._own_session and _terminal_sends_it():
            # The terminal has sent SIGINT to the command already, which would take a second one as a harder stop.
            return
        if number in _ENDING:
            self.interrupted = signal.Signals(number)
            self.interrupts += 1
        if self._process is None:
            self._early.append(number)
        else:
            self._send(number)


def _group_lives(group: int) -> bool:
    """Return whether a process of the group runs; zombies do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    states = map(_state, Path("/proc").glob("[0-9]*/stat"))
    return any(its == group and state not in "ZX" for state, its in states)


def _state(file: Path) -> tuple[str, int]:
    """Return a process's state and group from its ``/proc/<pid>/stat``."""
    try:
        state, _, group, *_ = (
            file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    # The process has ended, so its file has disappeared.
    except (OSError, ValueError):
        return "X", 0
    return state, int(group)


@contextmanager
def running_command(
    command: Sequence[str], environment: Mapping[str, str], *, log: Path | None = None
) -> Iterator[Command]:
    """Run a command for the duration of the block, and forward signals to it; raise NotStartedError if it cannot start.

    ``environment`` is its full environment. With a log, to which stdout and stderr are appended, the command runs in
    its own session without stdin; without one it shares this process's streams.
    """
    job = Command(own_session=log is not None)
    with _forwarding(job):
        with nullcontext() if log is None else log.open("ab") as output:
            job.start_process(command, environment, output)
        try:
            yield job
        finally:
            job.stop_process()


@contextmanager
def _forwarding(job: Command) -> Iterator[None]:
    # nohup, and "&" in sh, make a process ignore signals, and the command must ignore them as well.
    numbers = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, job.forward_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_sends_it() -> bool:
    """Return whether this process is in the foreground of a terminal.

    The terminal then sends Ctrl-C to the command as well.
    """
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False

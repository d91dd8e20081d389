"""Programs that are forked from a server that has imported torch already.

A tool runs its user's command several times, and Python would import torch again each time, which costs more than most
runs of the tests. So the command is a client that starts in a few milliseconds. The client makes the server fork a
process with the client's arguments, environment, folder and streams, forwards signals, and exits as that process does:

    [*preloaded(), "train.py"]             # as [sys.executable, "train.py"]
    [*preloaded(ranks=2), "train.py"]      # as torchrun --nproc-per-node 2 train.py
    forks.torchrun(2, "train.py")          # the same run from a test, which gets the result

Use it for runs in which neither the start of Python nor the import of torch is tested: the results of a program, stock
or patched, do not depend on the process that started it. Each kind of program is started once as users start it, see
``scripts``. Unlike torchrun, the server has no restarts, and no processes that start without torch.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from tests.support import patience, scripts
from tests.support.environment import clean

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
REPORT_DIR: Final = "OVPATCH_REPORT_DIR"

#: Variable of a process that the server forks: whether gloo needs the workarounds of our module ``gloo``.
HELP_GLOO: Final = "TESTS_HELP_GLOO"

# The time in which a server must import torch.
_START_TIMEOUT_S = 60.0
# A variable of the server, whose memory a forked process needs for the client's environment.
_ROOM = "." * (1 << 16)


class Server:
    """A process that has imported torch, and that ends when this process does.

    Args:
        modules: Modules to import as well. The server always imports torch and torch._dynamo, which the first optimizer
            would import in each process. They must not start threads or CUDA, which do not survive a fork.
        enter: Words before the command of the server, such as nsenter for another host.
        variables: Environment variables that these modules need.
    """

    def __init__(self, *modules: str, enter: Sequence[str] = (), **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        self._address = os.path.join(self._folder.name, "socket")
        environment = {
            name: value for name, value in clean(os.environ).items() if name != "PYTHONPATH"
        }
        self._process = subprocess.Popen(
            [
                *enter,
                sys.executable,
                "-u",
                "-m",
                "tests.support.preloaded_server",
                self._address,
                *modules,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**environment, **variables, "ROOM": _ROOM},
        )
        atexit.register(self.close)
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], patience.scale(_START_TIMEOUT_S))[0], (
            "the server does not start"
        )
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the server and the processes that it has forked."""
        atexit.unregister(self.close)
        # This closes the server's stdin, and then the server ends.
        self._process.communicate()
        self._folder.cleanup()

    def command(self, ranks: int = 0) -> list[str]:
        """Return the words before a script in a command.

        Args:
            ranks: The number of processes that run the script, as under torchrun; 0 for one, as under ``python``.
        """
        return [
            sys.executable,
            "-I",
            "-S",
            str(HERE / "preloaded_client.py"),
            self._address,
            str(ranks),
        ]

    def torchrun(
        self,
        processes: int,
        script: str | os.PathLike[str],
        *args: str,
        env: Mapping[str, str | None] | None = None,
        report: Path | None = None,
        timeout: float = 120,
    ) -> scripts.Result:
        """Run a script on several ranks, which a rank that fails ends.

        Args:
            processes: Number of ranks.
            script: The program.
            args: Its arguments.
            env: Changes to the environment, as for :func:`tests.support.scripts.run`.
            report: The file for the merged report. If it is given, the run imitates ``ovpatch run --report``.
            timeout: Seconds after which all ranks write their stacks.
        """
        command = [*self.command(processes), script, *args]
        # Patched programs need no workarounds for gloo.
        if report is None:
            return scripts.run(command, env={HELP_GLOO: "1", **(env or {})}, timeout=timeout)
        with tempfile.TemporaryDirectory(prefix="reports-") as folder:
            run = {"OVPATCH_AUTO": "1", REPORT_DIR: folder}
            result = scripts.run(command, env={**run, **(env or {})}, timeout=timeout)
            _merge_reports(Path(folder), report)
            return result


def _merge_reports(folder: Path, report: Path) -> None:
    # The server imports this module, and must not import ovpatch.
    from ovpatch.session import worker_reports

    if reports := worker_reports.read_reports(folder, "worker"):
        worker_reports.save_json(report, worker_reports.merge_reports(reports))


@cache
def plain_server() -> Server:
    """Return the session's server, which has imported torch alone."""
    return Server()


def preloaded(ranks: int = 0) -> list[str]:
    """Return the words before a script in a command, see :meth:`Server.command`."""
    return plain_server().command(ranks)

"""Programs that are forked from a server that has imported torch already.

A tool runs its user's command several times, and Python would import torch anew each time, which costs more than most
runs of the tests. So the command is a client, which starts in a few milliseconds: it asks the server to fork a process
with its own arguments, environment, folder and streams, hands on signals, and ends as that does:

    [*preloaded(), "train.py"]             # as [sys.executable, "train.py"]
    [*preloaded(ranks=2), "train.py"]      # as torchrun --nproc-per-node 2 train.py
    forks.torchrun(2, "train.py")          # a test's own run of that, with what it yields

It is for runs in which neither the start of Python nor the import of torch is tested: what a program computes, stock or
patched, does not depend on who started it. Each kind of program is started once as users start it, see ``scripts``. Not
torchrun's are restarts, and processes that begin without torch.
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

from tests.support import scripts
from tests.support.environment import clean

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
REPORT_DIR: Final = "OVPATCH_REPORT_DIR"

#: Variable of a process that the server forks: whether gloo needs the help of our own module ``gloo``.
HELP_GLOO: Final = "TESTS_HELP_GLOO"

_SECONDS = 60.0  # until a server has imported torch
_ROOM = "." * (1 << 16)  # for a client's environment, where the system keeps that of the server


class Server:
    """A process that has imported torch, and that ends when this one does.

    Args:
        modules: What it imports besides torch, and torch._dynamo, which the first optimizer would import in each
            process. They must not start threads, nor CUDA: neither survives a fork.
        enter: What comes before its command, such as nsenter for another host.
        variables: What these are to find in the environment.
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
        assert select.select([self._process.stdout], [], [], _SECONDS)[0], (
            "the server does not start"
        )
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the server, and what it has forked."""
        atexit.unregister(self.close)
        self._process.communicate()  # closes its stdin, by which it ends
        self._folder.cleanup()

    def command(self, ranks: int = 0) -> list[str]:
        """Return what comes before a script in a command.

        Args:
            ranks: How many processes run the script, as under torchrun; 0: one, as under ``python``.
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
            report: Gets the merged report as from ``ovpatch run --report``, which with this is imitated.
            timeout: Seconds; then all ranks write their stacks.
        """
        command = [*self.command(processes), script, *args]
        if report is None:  # what is ours needs no help with gloo
            return scripts.run(command, env={HELP_GLOO: "1", **(env or {})}, timeout=timeout)
        with tempfile.TemporaryDirectory(prefix="reports-") as folder:
            run = {"OVPATCH_AUTO": "1", REPORT_DIR: folder}
            result = scripts.run(command, env={**run, **(env or {})}, timeout=timeout)
            _merge_reports(Path(folder), report)
            return result


def _merge_reports(folder: Path, report: Path) -> None:
    from ovpatch.session import (
        worker_reports,  # here: in the server, which imports this module, nothing of ovpatch is
    )

    if reports := worker_reports.read_reports(folder, "worker"):
        worker_reports.save_json(report, worker_reports.merge_reports(reports))


@cache
def plain_server() -> Server:
    """Return the session's server, which has imported torch alone."""
    return Server()


def preloaded(ranks: int = 0) -> list[str]:
    """Return what comes before a script in a command, see :meth:`Server.command`."""
    return plain_server().command(ranks)

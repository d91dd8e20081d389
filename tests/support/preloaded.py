"""Commands for the tools under test, whose programs are forked from a server that has imported torch already.

A tool runs its user's command several times, and Python would import torch anew each time, which costs more than most
runs of the tests. So the command is a client, which starts in a few milliseconds: it asks the server to fork a process
with its own arguments, environment, folder and streams, hands on signals, and ends as that process does:

    [*preloaded(), "train.py"]             # as [sys.executable, "train.py"]
    [*preloaded(ranks=2), "train.py"]      # as torchrun --nproc-per-node 2 train.py; see forking_launcher

It is for runs in which neither the start of Python nor the import of torch is tested.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.environment import clean

HERE = Path(__file__).parent
SECONDS = 60.0  # until the server has imported torch
ROOM = "." * (1 << 16)  # for a client's environment, where the system keeps that of the server


def preloaded(ranks: int = 0, **variables: str) -> list[str]:
    """Return what comes before a script in a command.

    Args:
        ranks: How many processes run the script, as under torchrun, with its variables but for the address; 0: one,
            as under ``python``.
        variables: What torch is to find in the environment when it is imported, by a server of its own.
    """
    return [sys.executable, "-I", "-S", str(HERE / "preloaded_client.py"), _server(**variables), str(ranks)]


@cache
def _server(**variables: str) -> str:
    """Start a server, once a session, which ends when this process does; return where it listens."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = os.path.join(folder.name, "socket")
    environment = {name: value for name, value in clean(os.environ).items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-u", str(HERE / "preloaded_server.py"), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, **variables, "ROOM": ROOM},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    assert select.select([process.stdout], [], [], SECONDS)[0], "the server does not start"
    assert process.stdout.readline() == b"ready\n"
    return address

"""What ``verify``, ``bench`` and ``timeline`` want of the processes of a command, handed down in one variable.

A process that imports torch reads it (:mod:`ovpatch.autoload`), signs in, and lets the tool's own module, such as
``ovpatch.insight.timeline.worker``, begin. That works the same whether the process is patched or stock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ovpatch.session.worker_reports import works, write_json

VARIABLE: Final = "OVPATCH_INSIGHT"

#: Asks a process for its stacks; None where there are no real-time signals. Scripts and launchers use the named ones.
STACKS: Final[int | None] = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None


@dataclass(frozen=True)
class Orders:
    """What one arm's processes are to do.

    Attributes:
        worker: Module with a function ``start_worker(orders)``, which is called at the end of ``import torch``.
        directory: Where the processes leave what they found; visible to all hosts of the job.
        details: What the tool wants, as JSON types.
    """

    worker: str
    directory: Path
    details: Mapping[str, Any] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that hand them down."""
        data = {"worker": self.worker, "directory": str(self.directory.absolute()), "details": dict(self.details)}
        return {VARIABLE: json.dumps(data)}


def received(environ: Mapping[str, str] | None = None) -> Orders | None:
    """Return the orders in the environment, if there are any."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    data = json.loads(text)
    return Orders(data["worker"], Path(data["directory"]), data["details"])


def begin() -> None:
    """Do as ordered in this process, unless it only launches others.

    Raises:
        OSError: The directory does not exist here, as on another host without a shared file system.
    """
    orders = received()
    if orders is None or not works():
        return
    sign_in(orders.directory)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _sign_in_again(orders.directory))
    import_module(orders.worker).start_worker(orders)


def _sign_in_again(directory: Path) -> None:
    """Have a forked child, which may be a rank, show its own stacks and not write into its parent's file."""
    with suppress(OSError):  # the directory may be gone by now, and a fork must go on
        sign_in(directory)


def sign_in(directory: Path) -> None:
    """Leave this process's number, its rank if the launcher gave it one, and a way to ask it for its stacks."""
    identity = {"pid": os.getpid(), "born": time.time(), "rank": os.environ.get("RANK")}
    write_json(directory / f"process-{os.getpid()}.json", identity)
    if STACKS is not None:
        stacks = (directory / f"stacks-{os.getpid()}.txt").open("w", encoding="utf-8")
        faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)  # keeps the file open

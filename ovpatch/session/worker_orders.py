"""The orders of ``verify``, ``bench`` and ``timeline`` to the processes of a command.

The orders are in one environment variable. A process, patched or stock, reads it when it imports
torch (:mod:`ovpatch.autoload`), and calls the tool's own module then.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ovpatch.session.worker_exit import may_train
from ovpatch.session.worker_reports import save_json

ORDERS_VARIABLE: Final = "OVPATCH_INSIGHT"

#: Signal that makes a process dump its stacks. Scripts and launchers use the common signals.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 5


@dataclass(frozen=True)
class Orders:
    """The orders to the processes of one variant."""

    # The module whose function ``start_worker(orders)`` is called at the end of ``import torch``.
    worker: str
    # The directory for results, which is visible to all hosts of the job.
    directory: Path
    # The settings of the tool, in JSON types.
    details: Mapping[str, Any] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return the orders as environment variables."""
        data = {
            "worker": self.worker,
            "host": socket.gethostname(),
            "directory": str(self.directory.absolute()),
            "details": dict(self.details),
        }
        return {ORDERS_VARIABLE: json.dumps(data)}


def read_orders(environ: Mapping[str, str] | None = None) -> Orders | None:
    """Return the orders in the environment, if any."""
    text = (os.environ if environ is None else environ).get(ORDERS_VARIABLE, "").strip()
    if not text:
        return None
    data = json.loads(text)
    return Orders(data["worker"], Path(data["directory"]), data["details"])


#: No process id of Linux is larger.
MAX_PID: Final = 1 << 22
#: Hosts without a number of a node get one from here on.
FIRST_HOST_NUMBER: Final = 1 << 16


def number_process(environ: Mapping[str, str] | None = None) -> int:
    """Return the process id, with a part that differs by host if the tool runs on another one.

    The command may start ranks on several hosts, whose processes may have the same id. They write into one folder.
    """
    text = (os.environ if environ is None else environ).get(ORDERS_VARIABLE, "")
    host = socket.gethostname()
    if not text or json.loads(text).get("host", host) == host:
        return os.getpid()
    return (FIRST_HOST_NUMBER + zlib.crc32(host.encode())) * MAX_PID + os.getpid()


def follow_orders() -> None:
    """Carry out the orders in this process, unless it is a launcher.

    Raises:
        OSError: This host does not have the directory for results.
    """
    orders = read_orders()
    if orders is None or not may_train():
        return
    register_process(orders.directory)
    os.register_at_fork(after_in_child=lambda: _register_child(orders.directory))
    import_module(orders.worker).start_worker(orders)


def _register_child(directory: Path) -> None:
    """Register a forked child, which may be a rank, so that it does not write into its parent's file."""
    # The directory may have been removed, and a fork must continue.
    with suppress(OSError):
        register_process(directory)


def register_process(directory: Path) -> None:
    """Write the pid of this process, its host, and its rank if known, and install the handler that dumps its stacks."""
    launched = {
        name.lower(): os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    identity = {"pid": os.getpid(), "born": time.time(), "host": socket.gethostname(), **launched}
    number = number_process()
    save_json(directory / f"process-{number}.json", identity)
    stacks = (directory / f"stacks-{number}.txt").open("w", encoding="utf-8")
    # faulthandler keeps the file object, so the file stays open.
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)

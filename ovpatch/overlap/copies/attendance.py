"""Copies between ranks, as they end where a rank is missing.

[Note: who does not come] A stream that waits for a rank that never comes is no work of the backend: its watchdog would
not end the job, as it does where a collective takes too long, and nothing would say which rank is missing. So behind
the copies of a backward, and behind those of a step, comes a collective of one number, for which it does.

[Note: a watchdog that waits] Before it ends the process, the backend's watchdog may tear communicators down, as
``torchrun`` has it do, and that waits for the device, whose streams wait for the missing rank. So a thread ends a
process that is still there when a watchdog has had time to say what it knows.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from typing import Final

import torch
import torch.distributed as dist

from ovpatch.overlap.copies.engine import Engine
from ovpatch.overlap.copies.registry import gathering, scattering
from ovpatch.overlap.peers import timeout_of

_log = logging.getLogger("ovpatch.copies")

_PAUSE_S: Final = 1.0
_GRACE_S: Final = 90.0  # of which NCCL's watchdog takes 60 to write down what was under way

_LATE = (
    "copies between ranks have been waiting for %.0f s, longer than the process group's time-out: a rank is missing. "
    "Look at the output of the other ranks, of which one hangs or runs other steps than this one; see also what the "
    "backend's watchdog has said above. This process ends, unless TORCH_NCCL_ASYNC_ERROR_HANDLING=0."
)


def attend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Issue a collective behind what copy engines have been given, if they are given anything; all ranks call this."""
    engine = scattering(group, device) or gathering(group, device)
    if engine is None:
        return
    with engine.behind():
        work = group.allreduce([engine.number])
    if device.type != "cuda":
        work.wait()  # gloo's threads do not survive the interpreter, and nobody else waits


def watch(engine: Engine, group: dist.ProcessGroup) -> None:
    """End this process if copies wait for too long, as long as there are the engine and the group."""
    names = weakref.ref(engine), weakref.ref(group)
    threading.Thread(target=_watch, args=names, name="ovpatch-copies", daemon=True).start()


def _watch(engine_of: weakref.ref[Engine], group_of: weakref.ref[dist.ProcessGroup]) -> None:
    while not _late(engine_of(), group_of()):
        time.sleep(_PAUSE_S)


def _late(engine: Engine | None, group: dist.ProcessGroup | None) -> bool:
    """Tell whether there is nothing to watch any more; what is too late ends here."""
    if engine is None or group is None:
        return True
    waited = engine.waits_s()
    if waited <= timeout_of(group) + _GRACE_S:
        return False
    _log.critical(_LATE, waited)
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "") != "0":
        os.kill(os.getpid(), signal.SIGABRT)
    return True

"""Which groups' gathers and reduce-scatters the copy engines carry."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ovpatch.overlap.comm import collectives
from ovpatch.overlap.comm.group_state import group_timeout_s, is_exiting_by_error, register_at_exit
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.copy_engine.collectives import Engine

_log = logging.getLogger("ovpatch.copies")


@dataclass
class Chosen:
    """What was chosen for a group on a device.

    Attributes:
        engine: What moves tensors; None if nothing can.
        gathers: Whether it gathers.
        scatters: Whether it reduces and scatters.
        final: Whether that holds for good.
    """

    engine: Engine | None = None
    gathers: bool = False
    scatters: bool = False
    final: bool = False


_chosen: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Chosen]] = weakref.WeakKeyDictionary()


def chosen_for(group: dist.ProcessGroup, device: torch.device) -> Chosen:
    """Return what was chosen, or is yet to be."""
    register_at_exit(_at_exit)
    collectives.set_transports(collectives.Transports(gathering, scattering, attend))
    return _chosen.setdefault(group, {}).setdefault(device, Chosen())


def gathering(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return what gathers instead of the group's backend, if anything does."""
    found = _found(group, device)
    return found.engine if found is not None and found.gathers else None


def scattering(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return what reduces and scatters instead of the group's backend, if anything does."""
    found = _found(group, device)
    return found.engine if found is not None and found.scatters else None


def _found(group: dist.ProcessGroup, device: torch.device) -> Chosen | None:
    found = _chosen.get(group, {}).get(device) if _chosen else None
    if found is None or found.engine is None:
        return None
    if is_capturing(device):
        return None  # a replayed graph would use the halves in another order than eager calls do
    return found


def finish(group: dist.ProcessGroup | None = None) -> None:
    """Have the host wait for what is under way, in one group or in all; see [Note: nobody is left waiting].

    No longer than a group's time-out: a rank that has died has left its peers' streams waiting for ever.
    """
    for one, devices in list(_chosen.items()):
        if group is not None and one is not group:
            continue
        for chosen in devices.values():
            if chosen.engine is not None and not chosen.engine.drain(group_timeout_s(one)):
                _log.warning(_LATE, group_timeout_s(one))
                _stuck.append(chosen.engine)
                chosen.engine = None


def forget(group: dist.ProcessGroup | None = None) -> None:
    """Leave one group or all to the backends again, and give memory back; what is under way is waited for."""
    finish(group)
    for one in list(_chosen):
        if group is None or one is group:
            del _chosen[one]
    if not _chosen:
        collectives.set_transports(None)


def _at_exit() -> None:
    if not is_exiting_by_error():
        finish()


_stuck: list[Engine] = []  # whose memory cannot be given back: that would wait for their streams, too

_LATE = (
    "copies between ranks have not ended in %g s and are not waited for any longer: look at the output of the other "
    "ranks, one of which may have died"
)


# Copies between ranks, as the backend's watchdog sees them.
#
# [Note: who does not come] A stream that waits for a rank that never comes is no work of the backend: its watchdog
# would not end the job, as it does where a collective takes too long, and nothing would say which rank is missing. So
# behind the copies of a backward, and behind those of a step, comes a collective of one number, for which it does.


def attend(group: dist.ProcessGroup, device: torch.device, communicator: dist.ProcessGroup | None = None) -> None:
    """Issue a collective behind what copy engines have been given, if they are given anything; all ranks call this.

    Args:
        group: Whose copies.
        device: Where its tensors are.
        communicator: Over the same ranks, which the collective is issued on; by default the group itself.
    """
    engine = scattering(group, device) or gathering(group, device)
    if engine is None:
        return
    with engine.behind():
        work = (communicator or group).allreduce([engine.number])
    if device.type != "cuda":
        work.wait()  # gloo's threads do not survive the interpreter, and nobody else waits

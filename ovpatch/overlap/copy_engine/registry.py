"""The engines that were chosen for groups."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ovpatch.overlap.comm import collectives
from ovpatch.overlap.comm.group_state import (
    drop_values,
    group_state,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.copy_engine.collectives import Engine

_log = logging.getLogger("ovpatch.copies")


@dataclass
class Chosen:
    """The choice for a group on a device."""

    engine: Engine | None = None  # the engine; None if there can be none
    gathers: bool = False  # whether it runs all-gathers
    scatters: bool = False  # whether it runs reduce-scatters
    final: bool = False  # whether the choice is kept for all later calls


def chosen_for(group: dist.ProcessGroup, device: torch.device) -> Chosen:
    """Return the choice for a group on a device, which may not have been made yet."""
    register_at_exit(_at_exit)
    collectives.set_transports(collectives.Transports(gathering, scattering, attend))
    return group_state(group).get_or_create((Chosen, device), Chosen)


def gathering(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine that runs all-gathers instead of the group's backend, if any."""
    found = _found(group, device)
    return found.engine if found is not None and found.gathers else None


def scattering(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine that runs reduce-scatters instead of the group's backend, if any."""
    found = _found(group, device)
    return found.engine if found is not None and found.scatters else None


def _found(group: dist.ProcessGroup, device: torch.device) -> Chosen | None:
    found: Chosen | None = group_state(group).values.get((Chosen, device))
    if found is None or found.engine is None:
        return None
    if is_capturing(device):
        return None  # a replayed graph would use the halves in another order than eager calls
    return found


def finish(group: dist.ProcessGroup | None = None) -> None:
    """Make the host wait for copies in flight, in one group or in all, so that its peers complete theirs.

    At most for a group's time-out: a dead rank leaves its peers' streams waiting for ever.
    """
    for one, chosen in group_values(Chosen, group):
        if chosen.engine is not None and not chosen.engine.drain(group_timeout_s(one)):
            _log.warning(_LATE, group_timeout_s(one))
            _stuck.append(chosen.engine)
            chosen.engine = None


def forget(group: dist.ProcessGroup | None = None) -> None:
    """Leave one group or all to the backends again, and free the memory after the copies in flight."""
    finish(group)
    drop_values(Chosen, group)
    if not group_values(Chosen):
        collectives.set_transports(None)


def _at_exit() -> None:
    if not is_exiting_by_error():
        finish()


_stuck: list[Engine] = []  # their memory is never freed, which would wait for their streams, too

_LATE = (
    "copies between ranks have not ended in %g s and are not waited for any longer: look at the output of the other "
    "ranks, one of which may have died"
)


def attend(group: dist.ProcessGroup, device: torch.device, communicator: dist.ProcessGroup | None = None) -> None:
    """Issue a collective of one number behind the copies of a backward or step, if there are any.

    A stream that waits for a missing rank is no work of the backend, so the backend's watchdog would not end the job.
    For a collective that does not complete it does. All ranks call this. It runs on the communicator, by default on the
    copies' group.
    """
    engine = scattering(group, device) or gathering(group, device)
    if engine is None:
        return
    with engine.behind():
        work = (communicator or group).allreduce([engine.number])
    if device.type != "cuda":
        work.wait()  # gloo's threads do not survive the interpreter

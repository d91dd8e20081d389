"""Copies between ranks, as the backend's watchdog sees them.

[Note: who does not come] A stream that waits for a rank that never comes is no work of the backend: its watchdog would
not end the job, as it does where a collective takes too long, and nothing would say which rank is missing. So behind
the copies of a backward, and behind those of a step, comes a collective of one number, for which it does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ovpatch.overlap.copies.registry import gathering, scattering


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

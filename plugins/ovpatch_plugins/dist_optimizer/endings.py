"""The end of a process group, of which others may still need something."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ovpatch.overlap import pending, step_communicator
from ovpatch.overlap.copies import registry as copies
from ovpatch.overlap.leaving import failing
from ovpatch.overlap.peers import Peers

_log = logging.getLogger("ovpatch.dist_optimizer")


def wrap_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group``: parameters arrive, and peers get what they still ask for, before it is gone.

    A rank that has finished waits for one that still saves a checkpoint, as it does at its own exit. Not if an
    exception ends it: its peers may wait for it in a collective.
    """

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        try:
            pending.settle_all()
        except RuntimeError as error:
            _log.warning("parameters did not arrive, and who reads them will be told again: %s", error)
        ending = None if group is dist.group.WORLD else group
        leaving = not failing()
        if leaving:
            copies.finish(ending)
            Peers.drain_all(ending)
            step_communicator.close(ending)
        original(group)
        if leaving:
            copies.forget(ending)  # not before: to give memory back is to wait for whatever runs on the device

    return destroy_process_group

"""What gloo's own threads cannot stand, in stock programs as well; what our tests say must not depend on it.

Two threads of a gloo group write the name of what they have completed into one string without a lock. Names of more
than 15 letters, as that of sums of sparse tensors, are on the heap, and in the end both threads free the same memory
(``ovpatch/overlap/comm/gloo.py``, *[Note: one tensor on gloo]*).

The last reference to a group joins its threads with the interpreter's lock held, and a thread may still want that lock,
to free the context of a backward that torch's reducer has reduced: both wait for ever.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

_DESTROYED: Final[deque[dist.ProcessGroup]] = deque(maxlen=4)  # the oldest has idle threads when it goes


class _OneThread(dist.ProcessGroupGloo):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_later: object) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [self.create_default_device()], 1, timeout
        super().__init__(store, rank, size, options)


def one_thread_group() -> dist.ProcessGroup:
    """Return a new group of all ranks whose collectives run one after the other."""
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", _OneThread):
        return dist.new_group(backend="gloo")


class _KeepingKeys(dict[dist.ProcessGroup, Any]):
    def __setitem__(self, group: dist.ProcessGroup, value: Any) -> None:
        _KEPT.append(group)
        super().__setitem__(group, value)


_KEPT: Final[list[dist.ProcessGroup]] = []


def keep_groups() -> None:
    """Have the groups of this process live until it ends: a script may let go of its last one while a thread works."""
    distributed_c10d._pg_map = _KeepingKeys(distributed_c10d._pg_map)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that torch's DistributedDataParallel has used; it lives on until its threads are idle."""
    _DESTROYED.append(group)
    dist.destroy_process_group(group)

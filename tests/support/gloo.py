"""Groups on gloo for the collectives that gloo's own threads cannot stand.

Two threads of a gloo group write the name of what they have completed into one string without a lock. Names of more
than 15 letters, as that of sums of sparse tensors, are on the heap, and in the end both threads free the same memory
(``ovpatch/overlap/comm/gloo.py``, *[Note: one tensor on gloo]*). Stock programs meet it as well; what our tests say
must not depend on it.
"""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _OneThread(dist.ProcessGroupGloo):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [self.create_default_device()], 1, timeout
        super().__init__(store, rank, size, options)


def one_thread_group() -> dist.ProcessGroup:
    """Return a new group of all ranks whose collectives run one after the other."""
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", _OneThread):
        return dist.new_group(backend="gloo")

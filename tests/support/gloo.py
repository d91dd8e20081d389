"""What gloo's own threads cannot stand, in stock programs as well; what our tests say must not depend on it.

Two threads of a gloo group write the name of what they have completed into one string without a lock. Names of more
than 15 letters, as those of tensor parallelism's all-gathers and of sums of sparse tensors, are on the heap. In the end
both threads free the same memory, and the process aborts, there or wherever it uses that memory next
(``ovpatch/overlap/comm/collectives.py``, *[Note: one tensor on gloo]*). It happens to collectives that follow one
another, too: a thread writes the name when the caller goes on already. So groups of tests have one thread.

The last reference to a group joins its threads with the interpreter's lock held, and a thread may still want that lock,
to free the context of a backward that torch's reducer has reduced: both wait for ever.
"""

from __future__ import annotations

import os
from collections import deque
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Variable of a case's environment: how many threads gloo groups have that torch makes.
THREADS: Final = "TESTS_GLOO_THREADS"

_DESTROYED: Final[deque[dist.ProcessGroup]] = deque(
    maxlen=4
)  # the oldest has idle threads when it goes


class _OneThread(type):
    """The type of a stand-in for the class: what it makes are instances of that class, with one thread by default."""

    def __call__(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: bool
    ) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._threads = int(os.environ.get(THREADS, "1"))
        options._timeout = timeout
        for name, value in others.items():  # from torch 2.14 on: enable_reconfigure
            setattr(options, name, value)
        return dist.ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class _Gloo(metaclass=_OneThread):
    pass


def use_one_thread() -> None:
    """Have the collectives of each gloo group that torch makes in this process run one after the other."""
    distributed_c10d.ProcessGroupGloo = _Gloo  # type: ignore[assignment, misc]  # it stands in for the class


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

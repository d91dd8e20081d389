"""Workarounds for races of gloo's own threads, which stock programs have as well. No test may depend on such a race.

Two threads of a gloo group write the name of the collective that they completed into one string without a lock. Names
of more than 15 letters are on the heap, for example of tensor parallelism's all-gathers and of sums of sparse tensors.
In the end both threads free the same memory, and the process aborts, there or at its next use of that memory
(``ovpatch/overlap/comm/collectives.py``, *[Note: one tensor on gloo]*). Sequential collectives race as well, because a
thread writes the name when the caller has already continued. So groups of tests have one thread.

The last reference to a group joins its threads with the interpreter's lock held. A thread may still need that lock to
free the context of a backward that torch's reducer has reduced, and then both wait forever.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Variable of a case's environment: the number of threads of a gloo group that torch makes.
THREADS: Final = "TESTS_GLOO_THREADS"

# The number of groups that may live after a case. Each has a thread that wakes up 100 times a second: hundreds of them
# took a fifth of the processors.
MAX_GROUPS_LEFT: Final = 8

# The last destroyed groups. The threads of the oldest group are idle when the queue drops it.
_DESTROYED: Final[deque[dist.ProcessGroup]] = deque(maxlen=4)


class _OneThread(type):
    """The type of a replacement for gloo's class, which makes instances of that class, with one thread by default."""

    def __call__(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: bool
    ) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._threads = int(os.environ.get(THREADS, "1"))
        options._timeout = timeout
        # torch 2.14 and later pass enable_reconfigure.
        for name, value in more.items():
            setattr(options, name, value)
        return dist.ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class _Gloo(metaclass=_OneThread):
    pass


def use_one_thread() -> None:
    """Make the collectives of each gloo group that torch makes in this process run sequentially."""
    distributed_c10d.ProcessGroupGloo = _Gloo  # type: ignore[assignment, misc]  # replaces the class


class _KeepingKeys(dict[dist.ProcessGroup, Any]):
    def __setitem__(self, group: dist.ProcessGroup, value: Any) -> None:
        _KEPT.append(group)
        super().__setitem__(group, value)


_KEPT: Final[list[dist.ProcessGroup]] = []


def keep_groups() -> None:
    """Keep the groups of this process until it ends, because a script may drop its last group while a thread works."""
    distributed_c10d._pg_map = _KeepingKeys(distributed_c10d._pg_map)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that torch's DistributedDataParallel has used, but keep the object until its threads are idle."""
    _DESTROYED.append(group)
    dist.destroy_process_group(group)


def count_groups(pid: int) -> int:
    """Return the number of groups of a process that live; 0 on systems without ``/proc``."""
    count = 0
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        # A thread may end concurrently.
        with contextlib.suppress(OSError):
            count += name.read_text(encoding="utf-8").startswith("gloo_tcp_loop")
    return count


def drop_cached_meshes() -> None:
    """Empty the caches of DTensor, which keep meshes, and so their groups, after these were destroyed."""
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is None:
        return
    from torch.distributed.tensor import _collective_utils, debug

    debug._clear_sharding_prop_cache()
    redistribute._gen_transform_infos.cache_clear()
    redistribute._planner_cache.clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()

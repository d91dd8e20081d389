"""Memory of one device that the other ranks' kernels reach by address."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class Memory:
    """One allocation on every rank.

    Attributes:
        own: This rank's, bytes.
        addresses: Of all ranks' allocations, as this process sees them, by group rank.
        keeps: What keeps the others' mapped here.
    """

    own: Tensor
    addresses: list[int]
    keeps: Any = None


Allocate = Callable[[int, dist.ProcessGroup, torch.device, Callable[[Tensor], None]], Memory]


def allocate(size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], None]) -> Memory:
    """Allocate on all ranks; they have to call this together.

    Args:
        size: Bytes, the same on all ranks.
        group: The ranks.
        device: Where.
        prepare: Gets this rank's memory before any other rank can reach it.

    Returns:
        The memory. No rank returns before all have prepared theirs.
    """
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    prepare(own)
    torch.cuda.synchronize(device)
    with _without_multicast():
        handle = _symmetric_memory.rendezvous(own, group)
    addresses = [handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(group.size())]
    return Memory(own, addresses, handle)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep torch from binding multicast objects, which nothing here uses and some hosts cannot make."""
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before

"""Symmetric memory: allocations on all ranks that the other ranks' kernels reach by address."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.consensus import check_consistent

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Memory:
    """One allocation on every rank."""

    own: Tensor  # this rank's memory, uint8, ``[size]``
    addresses: list[int]  # addresses of all ranks' memory in this process, by group rank
    keeps: Any = None  # keeps the peers' memory mapped


class LackingError(RuntimeError):
    """A rank has too little memory for an allocation that all ranks need."""


class History:
    """Counts this process's symmetric allocations."""

    # Number of allocations, in all groups together. Torch counts them, too, and a rank with another count than the rest
    # of a group leaves them waiting for ever (https://github.com/pytorch/pytorch/issues/196082).
    rendezvous: int = 0


history = History()

Allocate = Callable[[int, dist.ProcessGroup, torch.device, Callable[[Tensor], None]], Memory]


def allocate(size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], None]) -> Memory:
    """Allocate the same number of bytes on all ranks, which call this together.

    ``prepare`` is called with this rank's memory before any peer can reach it; no rank returns before all have
    prepared.
    """
    from torch.distributed import _symmetric_memory

    own = _empty(size, device)
    prepare(own)
    torch.cuda.synchronize(device)
    history.rendezvous += 1
    with _without_multicast():
        handle = _symmetric_memory.rendezvous(own, group)
    addresses = [handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(group.size())]
    return Memory(own, addresses, handle)


def allocate_on_all(
    size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], None]
) -> Memory:
    """As :func:`allocate`, but on all ranks or on none: there, peers would wait for a rank that cannot allocate.

    Raises:
        LackingError: A rank could not allocate; on all ranks, with the same text.
    """
    found = False

    def prepare_if_all_have(own: Tensor) -> None:
        nonlocal found
        found = True
        prepare(own)
        _agree("", group)

    try:
        return allocate(size, group, device, prepare_if_all_have)
    except RuntimeError as error:  # torch has no error class of its own for refusals of the driver
        if not found:
            _agree(f"{size / 2**20:.0f} MiB of symmetric memory: {str(error).splitlines()[0]}", group)
        raise


def _agree(objection: str, group: dist.ProcessGroup) -> None:
    lacking = check_consistent(group, "symmetric memory", {}, objection=objection, timeout_s=_PATIENCE_S)
    if lacking:
        raise LackingError(lacking)


def _empty(size: int, device: torch.device) -> Tensor:
    """Allocate; if that fails, empty torch's cache first, which symmetric memory does not come from."""
    from torch.distributed import _symmetric_memory

    try:
        return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError:
        torch.cuda.empty_cache()
    return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep torch from binding multicast objects, which are not used here and which some hosts cannot make."""
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before

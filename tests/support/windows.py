"""Memory that the ranks of a test share, for what GPUs would copy between each other."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.kernels.copy_window import Batch, Window


def allocate(size: int, group: Any, device: torch.device) -> Window:
    """Replace :func:`ovpatch.overlap.kernels.copy_window.allocate_window` for processes on one CPU."""
    folder = [tempfile.mkdtemp(prefix="window") if group.rank() == 0 else ""]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    paths = [Path(folder[0], str(rank)) for rank in range(group.size())]
    paths[group.rank()].write_bytes(b"\xff" * size)
    dist.barrier(group)
    ranks: list[Tensor] = [
        torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths
    ]
    dist.barrier(group)
    os.unlink(paths[group.rank()])
    dist.barrier(group)
    if group.rank() == 0:
        os.rmdir(folder[0])
    return Window(ranks, lambda stream: dist.barrier(group), copy, driver=HostDriver())


class HostDriver:
    """The work that :class:`ovpatch.overlap.kernels.copy_window.Driver` gives to streams, done by the host immediately.

    Attributes:
        writes_to_peers: Whether numbers are written to other ranks' memory, or copied.
    """

    writes_to_peers = True

    def write(self, address: int, number: int, stream: int) -> None:
        """Write a number."""
        ctypes.c_uint32.from_address(address).value = number

    def wait(self, address: int, number: int, stream: int) -> None:
        """Wait for a number, or a later one."""
        found = ctypes.c_uint32.from_address(address)
        while ctypes.c_int32(found.value - number).value < 0:
            time.sleep(1e-4)

    def copy(self, batch: Batch, stream: int) -> None:
        """Copy."""
        copy(batch)


def copy(batch: Batch, stream: int = 0) -> None:
    """Copy at once."""
    del stream
    for to, of, size in zip(*batch, strict=True):
        ctypes.memmove(to, of, size)

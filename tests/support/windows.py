"""Memory that the ranks of a test share, for what GPUs would copy between each other."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.copy_engine.driver import Batch
from ovpatch.overlap.copy_engine.window import Window


def allocate(size: int, group: Any, device: torch.device) -> Window:
    """Stand for :func:`ovpatch.overlap.copy_engine.window.allocate` among processes on one CPU."""
    folder = [tempfile.mkdtemp(prefix="window") if group.rank() == 0 else ""]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    paths = [Path(folder[0], str(rank)) for rank in range(group.size())]
    paths[group.rank()].write_bytes(b"\xff" * size)
    dist.barrier(group)
    ranks: list[Tensor] = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
    dist.barrier(group)
    os.unlink(paths[group.rank()])
    return Window(ranks, lambda stream: dist.barrier(group), copy)


def copy(batch: Batch, stream: int = 0) -> None:
    """Copy at once."""
    del stream
    for to, of, size in zip(*batch, strict=True):
        ctypes.memmove(to, of, size)

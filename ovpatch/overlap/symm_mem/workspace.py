"""The double buffer in which the ranks of a group write to each other's memory, its signals, and its launch order."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.group_state import drop_values, group_state
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.symm_mem import memory

HEADER: Final = 1024  # bytes of signals in front of the halves
_GRAIN: Final = 2 * 1024 * 1024  # bytes: the smallest unit that devices map
_STATE: Final = 8
_MIN_COUNTS: Final = 16384


class Scratch:
    """Scratch memory for kernels of one device that never run at the same time; for ``triton.set_allocator``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[Tensor] = []
        self._size = 0

    def __call__(self, size: int, alignment: int, stream: int | None) -> Tensor:
        """Return memory for a kernel on a stream; torch's allocations are aligned well enough for any alignment."""
        if size <= self._size:
            return self._made[-1]
        made = torch.empty(size, dtype=torch.int8, device=self._device)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made  # it belongs to the graph
        self._made.append(made)  # smaller ones may still be in use, by any stream or graph
        self._size = size
        return made


class Workspace:
    """The symmetric memory of one group, which operators use in turn; see [Note: sequence numbers].

    ``allocate`` makes the memory, as :func:`.memory.allocate` does. ``peers`` are the addresses of all ranks' memory,
    int64, ``[world]``. ``state`` is the number of the next operator and counts of programs, int64; only this rank's
    kernels see it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, allocate: memory.Allocate | None = None) -> None:
        self.group, self.device, self.world, self.rank = group, device, group.size(), group.rank()
        self._allocate = allocate or memory.allocate
        self.half_bytes = 0
        self.peers = self.state = torch.empty(0, dtype=torch.int64, device=device)
        # Counts of arrived tiles, int32; only this rank's kernels see them.
        self.counts = torch.empty(0, dtype=torch.int32, device=device)
        self.kept: dict[Any, Any] = {}  # what operators keep, by key, while sizes and addresses stay the same
        self.scratch = Scratch(device)  # makes memory for descriptors of its kernels
        self._memory: memory.Memory | None = None
        self._captured = False
        self._outgrown: list[tuple[memory.Memory | None, Tensor, Tensor, Tensor]] = []

    def begin_operator(self, half_bytes: int, counts: int) -> bool:
        """Prepare for an operator on the current stream; all ranks call this with the same sizes.

        Returns whether it can run: memory for all ranks cannot be made under graph capture.
        """
        capturing = is_capturing(self.device)
        if half_bytes > self.half_bytes or counts > self.counts.numel():
            if capturing:
                return False
            self._grow(half_bytes, counts)
        self._captured |= capturing
        take_turn(self.device, capturing)
        return True

    def _grow(self, half_bytes: int, counts: int) -> None:
        """Replace the memory on all ranks at once, after the operators in flight.

        Memory that a graph has captured stays, with signals of its own, for as long as the group lives.
        """
        kept = (self._memory, self.peers, self.state, self.counts)
        if self._captured:
            self._outgrown.append(kept)
        self.kept.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.half_bytes = max(-(-half_bytes // _GRAIN) * _GRAIN, self.half_bytes)
        size = HEADER + 2 * self.half_bytes
        self._memory = self._allocate(size, self.group, self.device, lambda own: own[:HEADER].zero_())
        self.peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=self.device)
        self.state = torch.zeros(_STATE, dtype=torch.int64, device=self.device)
        self.state[0] = 1
        # They take few bytes, and too few mean that all memory is made again.
        count = max(1 << (max(counts, len(self.counts)) - 1).bit_length(), _MIN_COUNTS)
        self.counts = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._captured = False


_last: dict[tuple[int | None, bool], tuple[int, torch.cuda.Stream]] = {}


def take_turn(device: torch.device, capturing: bool) -> None:
    """Make the current stream wait for the kernels that were launched before on other streams.

    [Note: one at a time] A kernel that fills a device and waits for its peers deadlocks if one of them is queued behind
    another such kernel that waits in turn. Hosts launch these kernels in the same order on all ranks, so every device
    runs them in launch order, whatever their streams and groups. Inside a CUDA graph they are ordered among themselves;
    a replay is ordered against other streams by the script, as for any graph.
    """
    if device.type != "cuda":
        return
    handle = torch._C._cuda_getCurrentRawStream(device.index)  # much faster than making a stream object
    before = _last.get((device.index, capturing))
    if before is not None and before[0] == handle:
        return
    current = torch.cuda.current_stream(device)
    if before is not None and (not capturing or _is_capturing(before[1])):
        current.wait_stream(before[1])
    _last[device.index, capturing] = handle, current


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def workspace_for(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """Return the workspace of a group on a device; made once, and dropped when the group is destroyed."""
    return group_state(group).get_or_create((Workspace, device), lambda: Workspace(group, device), keeps_group=True)


def drop_workspaces() -> None:
    """Drop the workspaces of all groups."""
    drop_values(Workspace)

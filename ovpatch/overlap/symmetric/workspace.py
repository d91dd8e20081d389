"""What the ranks of a group write to each other's memory: two halves, signals, and who has come how far."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ovpatch.overlap.symmetric import memory
from ovpatch.overlap.symmetric.order import take_turn
from ovpatch.overlap.symmetric.scratch import Scratch

HEADER: Final = 1024  # bytes of signals in front of the halves
_GRAIN: Final = 2 * 1024 * 1024  # bytes: what devices map at least
_STATE: Final = 8
_COUNTS: Final = 16384  # at the least


class Workspace:
    """Memory of one group for operators that take turns in it; see the notes of :mod:`.signals`.

    [Note: outgrown] A half that is too small is replaced on all ranks at once, since operators are the same on all.
    What is still under way there is waited for; what a graph has captured stays, with signals of its own, for as long
    as the group lives.

    Args:
        group: The ranks.
        device: Where.
        allocate: Makes the memory, as :func:`.memory.allocate` does.

    Attributes:
        world: Number of ranks.
        rank: This rank.
        half_bytes: Size of a half.
        peers: Addresses of all ranks' memory, int64, ``[world]``.
        state: Number of the next operator and counts of programs, int64; only this rank's kernels see it.
        counts: Counts of what has arrived, int32; as the state.
        scratch: Makes memory for descriptors of its kernels.
        kept: What operators keep for as long as sizes and addresses stay, by keys of theirs.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, allocate: memory.Allocate | None = None) -> None:
        self.group, self.device, self.world, self.rank = group, device, group.size(), group.rank()
        self._allocate = allocate or memory.allocate
        self.half_bytes = 0
        self.peers = self.state = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.empty(0, dtype=torch.int32, device=device)
        self.kept: dict[Any, Any] = {}
        self.scratch = Scratch(device)
        self._memory: memory.Memory | None = None
        self._captured = False
        self._outgrown: list[tuple[memory.Memory | None, Tensor, Tensor, Tensor]] = []

    def begin(self, half_bytes: int, counts: int) -> bool:
        """Prepare for an operator, on the current stream; all ranks call this, with the same sizes.

        Args:
            half_bytes: What it needs of a half.
            counts: How many counts it needs.

        Returns:
            Whether it can run: a graph is no place to make memory for all ranks.
        """
        capturing = self._is_capturing()
        if half_bytes > self.half_bytes or counts > self.counts.numel():
            if capturing:
                return False
            self._grow(half_bytes, counts)
        self._captured |= capturing
        take_turn(self.device, capturing)
        return True

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _grow(self, half_bytes: int, counts: int) -> None:
        kept = (self._memory, self.peers, self.state, self.counts)
        if self._captured:
            self._outgrown.append(kept)
        self.kept.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.half_bytes = max(-(-half_bytes // _GRAIN) * _GRAIN, self.half_bytes)
        self._memory = self._allocate(HEADER + 2 * self.half_bytes, self.group, self.device, _clear)
        self.peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=self.device)
        self.state = torch.zeros(_STATE, dtype=torch.int64, device=self.device)
        self.state[0] = 1
        self.counts = torch.zeros(_many(max(counts, len(self.counts))), dtype=torch.int32, device=self.device)
        self._captured = False


def _many(counts: int) -> int:
    """Return how many counts to make: they are few bytes, and with too few all memory is made anew."""
    return max(1 << (counts - 1).bit_length(), _COUNTS)


def _clear(own: Tensor) -> None:
    own[:HEADER].zero_()


_workspaces: dict[tuple[int, torch.device], Workspace] = {}


def of(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """Return the workspace of a group; made once, and gone with it."""
    found = _workspaces.get((id(group), device))
    if found is None or found.group is not group:
        forget(gone_only=True)
        found = _workspaces[id(group), device] = Workspace(group, device)
    return found


def forget(*, gone_only: bool = False) -> None:
    """Let go of all workspaces, or of those whose groups were destroyed."""
    alive = distributed_c10d._world.pg_map
    for key, workspace in list(_workspaces.items()):
        if not gone_only or workspace.group not in alive:
            del _workspaces[key]

"""One number per step and rank, summed in the background and looked at when it is there.

A rank whose backward was cut short by an exception still has to complete the step's collectives, or its peers hang.
They then hold gradients in which that rank's part is missing, and must hear of it. Waiting for the answer would stall
the host behind the device in every step, so ballots are read as they arrive, a few steps late at most.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

# Ballots older than this many steps are waited for.
_PATIENCE = 64


class Ballots:
    """Ballots on one process group.

    Args:
        group: The process group; every rank casts one ballot per step.
        device: Where the group's collectives run.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._open: deque[_Ballot] = deque()

    def cast(self, step: int, value: int) -> None:
        """Add ``value`` to the sum over ranks of this step."""
        vote = torch.full((1,), value, dtype=torch.int32, device=self._device)
        work = dist.all_reduce(vote, group=self._group, async_op=True)
        self._open.append(_Ballot(step, value, vote, work))

    def losses(self) -> list[int]:
        """Return the steps, of those counted since the last call, in which only other ranks' votes were not zero."""
        steps = []
        while self._open and (len(self._open) > _PATIENCE or self._open[0].ready()):
            ballot = self._open.popleft()
            if ballot.own == 0 and ballot.total() > 0:
                steps.append(ballot.step)
        return steps


class _Ballot:
    def __init__(self, step: int, own: int, vote: torch.Tensor, work: dist.Work) -> None:
        self.step = step
        self.own = own
        self._vote = vote
        self._work = work
        self._event: torch.cuda.Event | None = None
        if vote.is_cuda:
            # On a stream of its own the copy runs when the collective is done, without holding back the compute.
            with torch.cuda.stream(_side_stream(vote.device)):
                work.wait()
                # Pinned, or the copy makes the host wait for the device.
                self._host = torch.empty(1, dtype=vote.dtype, pin_memory=True)
                self._host.copy_(vote, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
        else:
            self._host = vote

    def ready(self) -> bool:
        return self._event.query() if self._event is not None else self._work.is_completed()

    def total(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        else:
            self._work.wait()
        return int(self._host.item())


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]

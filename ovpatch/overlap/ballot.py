"""One number per rank and step, summed over the ranks.

A rank whose backward was cut short by an exception still has to complete the step's collectives, or its peers hang.
They then hold gradients in which that rank's part is missing, and must hear of it.

[Note: when a ballot is read] Without streams the host waits for the step's collectives anyway, so it waits for the
ballot with them and hears at once. (An all-reduce that nobody waits for may also complete while the interpreter goes
down, which gloo's threads do not survive.) On CUDA waiting would stall the host behind the device, and a ballot costs
the host as much as a bucket: there, once the first steps are over, one is cast for several steps together, and read
when it has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ovpatch.overlap.collectives import AllReduce
from ovpatch.overlap.cuda_graphs import capturing
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.side_streams import quietly_on
from ovpatch.overlap.works import Work

# Steps per ballot where casting one is not free.
PERIOD = 16

# Ballots that may be under way; older ones are waited for.
_PATIENCE = 64


class Ballots:
    """Ballots on one process group, cast by every rank after the same steps.

    Args:
        group: The process group.
        device: Where the group's collectives run.
        feature: Name for labels.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, feature: str) -> None:
        self._device = device
        self._label = label(feature, "ballot")
        self._all_reduce = AllReduce(group, device)
        self._period = PERIOD if device.type == "cuda" else 1
        self._failed = 0
        self._last = -1  # the newest step that a ballot covers
        self._open: deque[_Ballot] = deque()

    def count(self, step: int, *, failed: bool) -> None:
        """Count this rank's step; cast the ballot when it is due. Comes after the step's other collectives.

        A step that is captured into a CUDA graph is not counted: nobody would read its ballot at a replay.
        """
        if capturing(self._device):
            return
        self._failed += failed
        if step < self._period or (step + 1) % self._period == 0:
            vote = torch.full((1,), self._failed, dtype=torch.int32, device=self._device)
            steps = range(self._last + 1, step + 1)
            self._last = step
            with span(self._label):
                self._open.append(_Ballot.cast(steps, self._failed, vote, self._all_reduce))
            self._failed = 0

    def losses(self) -> list[range]:
        """Return the steps, of those counted since the last call, in which another rank failed and this one did not.

        A range of steps stands for one or more among them. See [Note: when a ballot is read].
        """
        steps: list[range] = []
        if capturing(self._device):
            return steps
        while self._open and (len(self._open) > _PATIENCE or self._open[0].ready()):
            ballot = self._open.popleft()
            if ballot.own == 0 and ballot.total() > 0:
                steps.append(ballot.steps)
        return steps

    def raise_for_losses(self, text: Callable[[range], str]) -> None:
        """Raise an error, worded by ``text``, if :meth:`losses` returns steps.

        Raises:
            RuntimeError: Another rank's part is missing in this rank's results.
        """
        losses = self.losses()
        if losses:
            raise RuntimeError(text(losses[0]))


@dataclass
class _Ballot:
    steps: range
    own: int
    vote: torch.Tensor
    work: Work
    host: torch.Tensor
    event: torch.cuda.Event | None = None

    @staticmethod
    def cast(steps: range, own: int, vote: torch.Tensor, all_reduce: AllReduce) -> _Ballot:
        (work,) = all_reduce([vote])
        if not vote.is_cuda:
            return _Ballot(steps, own, vote, work, vote)
        # On a stream of its own the copy runs when the sum is there, without holding back the compute; into pinned
        # memory, or it would make the host wait.
        side = _side_stream(vote.device)
        vote.record_stream(side)  # no other stream waits for the sum, and whoever drops the ballot frees the vote
        with quietly_on(side):
            work.wait()
            host = torch.empty(1, dtype=vote.dtype, device="cpu", pin_memory=True).copy_(vote, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _Ballot(steps, own, vote, work, host, event)

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def total(self) -> int:
        if self.event is not None:
            self.event.synchronize()
        else:
            self.work.wait()
        return int(self.host.item())


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]

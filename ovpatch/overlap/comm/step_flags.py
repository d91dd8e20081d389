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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import AllReduce
from ovpatch.overlap.comm.side_streams import quietly_on
from ovpatch.overlap.comm.streams import is_capturing, profiler_label, profiler_span
from ovpatch.overlap.comm.work import Work

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
        self._label = profiler_label(feature, "ballot")
        self._all_reduce = AllReduce(group, device)
        self._period = PERIOD if device.type == "cuda" else 1
        self._failed = 0
        self._last = -1  # the newest step that a ballot covers
        self._open: deque[_Ballot] = deque()

    def count(self, step: int, *, failed: bool) -> None:
        """Count this rank's step; cast the ballot when it is due. Comes after the step's other collectives.

        A step that is captured into a CUDA graph is not counted: nobody would read its ballot at a replay.
        """
        if is_capturing(self._device):
            return
        self._failed += failed
        if step < self._period or (step + 1) % self._period == 0:
            vote = torch.full((1,), self._failed, dtype=torch.int32, device=self._device)
            steps = range(self._last + 1, step + 1)
            self._last = step
            with profiler_span(self._label):
                self._open.append(_Ballot.cast(steps, self._failed, vote, self._all_reduce))
            self._failed = 0

    def losses(self) -> list[range]:
        """Return the steps, of those counted since the last call, in which another rank failed and this one did not.

        A range of steps stands for one or more among them. See [Note: when a ballot is read].
        """
        steps: list[range] = []
        if is_capturing(self._device):
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


# Flags that ranks raise on their own, and that take effect on all of them before the same step.
#
# [Note: when a vote counts] A rank cannot change what it communicates because of something that it alone has seen.
# Flags are summed over the ranks after the collectives of a step and read before a later one, which one being fixed:
# the next while training begins, half a period later afterwards, when waiting for the sum would stall the host. A
# step that is captured into a CUDA graph casts and reads none: its host can neither wait for a sum nor look at one.


class Votes:
    """Sums of flags over the ranks of a group.

    Args:
        group: The process group.
        device: Where its collectives run.
        feature: Name for labels.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, feature: str) -> None:
        self._device = device
        self._label = profiler_label(feature, "votes")
        self._all_reduce = AllReduce(group, device)
        self._cast: tuple[int, torch.Tensor, Work] | None = None

    def cast(self, step: int, flags: Sequence[int]) -> None:
        """Start the sum, if one is due after this step. Every rank calls this after the same steps."""
        if (step < PERIOD or (step + 1) % PERIOD == 0) and not is_capturing(self._device):
            self._wait()
            # From pinned memory, or the host would wait for all that the device has to do.
            cast = torch.tensor(flags, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
            votes = cast.to(self._device, non_blocking=True)
            with profiler_span(self._label):
                (work,) = self._all_reduce([votes])
            self._cast = (step, votes, work)

    def result(self, step: int) -> list[int] | None:
        """Return the sums that take effect before this step, if any do."""
        if self._cast is None or step < self._cast[0] + (1 if self._cast[0] < PERIOD else PERIOD // 2):
            return None
        if is_capturing(self._device):
            return None
        votes = self._wait()
        assert votes is not None
        self._cast = None
        return [int(vote) for vote in votes.tolist()]

    def _wait(self) -> torch.Tensor | None:
        if self._cast is None:
            return None
        _, votes, work = self._cast
        work.wait()
        return votes

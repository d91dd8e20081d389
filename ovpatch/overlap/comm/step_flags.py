"""Flags that ranks raise in a step, summed by an all-reduce: one of the three ways to agree (``comm.consensus``)."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import AllReduce, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import is_capturing, profiler_label, profiler_span, unwatched_stream

PERIOD = 16  # steps per all-reduce, once the first steps are over
_MOST_PENDING = 64  # sums that may be under way on a device; older ones are waited for


class StepFlags:
    """The flags of one process group.

    The first flag says how often this rank's backward failed: peers then hold gradients in which this rank's part is
    missing. The others belong to the caller, and take effect on all ranks before the same step.

    [Note: when step flags are read] A rank must not change its collectives by what it alone has seen, so the step
    before which a sum takes effect is fixed: the next one during the first steps, half a period later afterwards. On
    CUDA the sum has reached the host by then. Without streams the host waits for a step's collectives anyway, so the
    failures are summed and read in every step. A step that is captured into a CUDA graph starts and reads nothing.

    The group's collectives run on the device. ``feature`` is a name for labels.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, feature: str) -> None:
        self._device = device
        self._period, self._in_every_step = PERIOD, device.type != "cuda"
        self._label = profiler_label(feature, "step_flags")
        self._all_reduce = AllReduce(group, device)
        self._failed = 0
        self._last = -1  # the newest step that a sum covers
        self._pending: deque[_FlagSum] = deque()
        self._newest: _FlagSum | None = None  # with flags of the caller, not yet in effect

    def start_all_reduce(
        self, step: int, *, failed: bool = False, get_flags: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Start the sum if one is due after this step, behind the step's other collectives.

        Every rank calls this after the same steps. ``failed`` tells whether this rank's backward failed. ``get_flags``
        returns the caller's flags, as many on all ranks; it is called if they are due.
        """
        if is_capturing(self._device):
            return
        self._failed += failed
        is_due = step < self._period or (step + 1) % self._period == 0
        if not (is_due or self._in_every_step):
            return
        flags = get_flags() if is_due and get_flags is not None else ()
        with profiler_span(self._label):
            steps = range(self._last + 1, step + 1)
            found = _FlagSum.start(steps, [self._failed, *flags], self._device, self._all_reduce)
        self._pending.append(found)
        self._newest = found if flags else self._newest
        self._last, self._failed = step, 0

    def result(self, step: int) -> list[int]:
        """Return the sums of the caller's flags that take effect before this step; empty if none do."""
        newest = self._newest
        if newest is None or is_capturing(self._device):
            return []
        start = newest.steps[-1]
        if step < start + (1 if start < self._period else self._period // 2):
            return []
        self._newest = None
        return newest.totals()[1:]

    def failed_steps(self) -> list[range]:
        """Return the steps, of those summed since the last call, in which another rank failed and this one did not.

        A range of steps stands for one or more among them.
        """
        steps: list[range] = []
        if is_capturing(self._device):
            return steps
        while self._pending and (len(self._pending) > _MOST_PENDING or self._pending[0].is_ready()):
            oldest = self._pending.popleft()
            if oldest.totals()[0] > 0 and not oldest.has_failed:
                steps.append(oldest.steps)
        return steps

    def raise_for_failures(self, text: Callable[[range], str]) -> None:
        """Raise RuntimeError, worded by ``text``, if another rank's part is missing: :meth:`failed_steps`."""
        steps = self.failed_steps() if self._pending else None
        if steps:
            raise RuntimeError(text(steps[0]))


@dataclass
class _FlagSum:
    """One all-reduce of flags."""

    steps: range
    has_failed: bool
    work: Work
    host: torch.Tensor
    event: torch.cuda.Event | None = None

    @staticmethod
    def start(steps: range, flags: Sequence[int], device: torch.device, all_reduce: AllReduce) -> _FlagSum:
        # Filled on the device. A copy from the host would wait for the device's whole queue. An allocation of pinned
        # memory would wait for a collective of the script's, behind which another rank may call this one.
        if device.type != "cuda":
            with outside_modes():
                sums = torch.tensor(flags, dtype=torch.int32, device=device)
        else:
            sums, begin = torch.zeros(len(flags), dtype=torch.int32, device=device), 0
            for flag, alike in itertools.groupby(flags):  # a launch for each run of equal ones
                end = begin + len(list(alike))
                if flag:
                    sums[begin:end].fill_(flag)
                begin = end
        (work,) = all_reduce([sums])
        if device.type != "cuda":
            return _FlagSum(steps, flags[0] > 0, work, sums)
        # A side stream copies the sum when it is there, and does not hold back the compute.
        side = _side_stream(device)
        sums.record_stream(side)  # no other stream waits for the sum before it is freed
        with unwatched_stream(side):
            work.wait()
            host = torch.empty(len(flags), dtype=sums.dtype, device="cpu", pin_memory=True)
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _FlagSum(steps, flags[0] > 0, work, host, event)

    def is_ready(self) -> bool:
        return self.event is None or self.event.query()

    def totals(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        else:
            self.work.wait()
        return list(self.host.tolist())


_side_stream = functools.cache(torch.cuda.Stream)  # one for each device

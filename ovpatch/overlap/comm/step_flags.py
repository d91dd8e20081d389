"""Flags that ranks raise in a step, summed by an all-reduce.

They are one of the three ways for ranks to agree, see ``comm.consensus``.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.collectives import AllReduce, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import (
    is_capturing,
    profiler_label,
    profiler_span,
    unwatched_stream,
)

#: The steps per all-reduce, once the first steps are over.
PERIOD_STEPS: Final = 16

# The sums that may be in flight on a device. The host waits for older ones.
_MAX_PENDING_SUMS: Final = 64


class StepFlags:
    """The flags of one process group.

    The first flag is the number of times that this rank's backward failed. Peers then hold
    gradients that lack this rank's part. The other flags belong to the caller, and take effect on
    all ranks before the same step.

    [Note: when step flags are read] A rank must not change its collectives by facts that it
    alone knows, so the step before which a sum takes effect is fixed: the next one during the first
    steps, half a period later afterwards. On CUDA the sum has reached the host by then.
    Without streams the host waits for a step's collectives anyway, so ranks sum and read failures
    in every step. A step that is captured into a CUDA graph starts and reads nothing.

    Args:
        group: The process group.
        device: The device on which the group's collectives run.
        feature: Name of the feature, for labels.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, feature: str) -> None:
        self._device = device
        self._period = PERIOD_STEPS
        # Whether each step has a sum, because the host waits for collectives anyway.
        self._is_in_every_step = device.type != "cuda"
        self._label = profiler_label(feature, "step_flags")
        self._all_reduce = AllReduce(group, device)

        # - The steps since the last sum
        self._num_failed = 0
        # The newest step that a sum covers.
        self._last_step = -1

        # - The sums
        # Those that have not been read for failures, the oldest first.
        self._pending: deque[_FlagSum] = deque()
        # The newest sum with flags of the caller; None once these are in effect.
        self._newest: _FlagSum | None = None

    def start_all_reduce(
        self,
        step: int,
        *,
        failed: bool = False,
        get_flags: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Start the sum if one is due after this step.

        The sum follows the step's other collectives. Every rank calls this after the same steps.

        Args:
            step: The number of the step.
            failed: Whether this rank's backward failed.
            get_flags: Returns the caller's flags, the same number on all ranks. It is called only
                if these flags are due, because it takes host time.
        """
        if is_capturing(self._device):
            return
        self._num_failed += failed
        is_due = step < self._period or (step + 1) % self._period == 0
        if not (is_due or self._is_in_every_step):
            return
        flags = get_flags() if is_due and get_flags is not None else ()
        with profiler_span(self._label):
            steps = range(self._last_step + 1, step + 1)
            flag_sum = _FlagSum.start(
                steps, [self._num_failed, *flags], self._device, self._all_reduce
            )
        self._pending.append(flag_sum)
        # A sum of failures alone must not replace flags that have not taken effect.
        if flags:
            self._newest = flag_sum
        self._last_step = step
        self._num_failed = 0

    def result(self, step: int) -> list[int]:
        """Return the sums of the caller's flags that take effect before this step, or []."""
        newest = self._newest
        if newest is None or is_capturing(self._device):
            return []
        start = newest.steps[-1]
        if step < start + (1 if start < self._period else self._period // 2):
            return []
        self._newest = None
        return newest.totals()[1:]

    def raise_for_failures(self, say_failed: Callable[[range], str]) -> None:
        """Raise an error if another rank's part is missing; see :meth:`failed_steps`.

        Args:
            say_failed: Returns the error's text for a range of steps.

        Raises:
            RuntimeError: Another rank failed in a step in which this rank did not.
        """
        steps = self.failed_steps() if self._pending else None
        if steps:
            raise RuntimeError(say_failed(steps[0]))

    def failed_steps(self) -> list[range]:
        """Return the steps in which another rank failed and this one did not.

        Each sum is read once, so these are steps that no earlier call has covered. A range
        represents one or more failed steps in it.
        """
        steps: list[range] = []
        if is_capturing(self._device):
            return steps
        while self._pending:
            oldest = self._pending[0]
            # Without a limit, a host that runs far ahead of its device would keep memory for each
            # step.
            can_wait = len(self._pending) <= _MAX_PENDING_SUMS
            if can_wait and oldest.event is not None and not oldest.event.query():
                break
            self._pending.popleft()
            # A rank that failed itself knows that gradients lack a part.
            if oldest.totals()[0] > 0 and not oldest.has_failed:
                steps.append(oldest.steps)
        return steps


@dataclass
class _FlagSum:
    """One all-reduce of flags.

    Attributes:
        steps: The steps whose failures it covers.
        has_failed: Whether this rank failed in one of them.
        work: The all-reduce.
        host: The flags in memory of the host, int32, ``[len(flags)]``.
        event: Marks that ``host`` is complete; None if the host waits for ``work``.
    """

    steps: range
    has_failed: bool
    work: Work
    host: torch.Tensor
    event: torch.cuda.Event | None = None

    @staticmethod
    def start(
        steps: range, flags: Sequence[int], device: torch.device, all_reduce: AllReduce
    ) -> _FlagSum:
        if device.type != "cuda":
            with outside_modes():
                sums = torch.tensor(flags, dtype=torch.int32, device=device)
            (work,) = all_reduce([sums])
            return _FlagSum(steps, flags[0] > 0, work, sums)
        # The device writes the flags itself. A copy from the host would wait until the device has
        # emptied its queue. An allocation of pinned memory would wait for a collective of the
        # script, and a peer may start that collective after this one.
        sums = torch.zeros(len(flags), dtype=torch.int32, device=device)
        begin = 0
        # One launch writes a run of equal flags.
        for flag, run in itertools.groupby(flags):
            end = begin + len(list(run))
            if flag:
                sums[begin:end].fill_(flag)
            begin = end
        (work,) = all_reduce([sums])
        # A side stream copies the sum when it is complete, so the compute stream never waits.
        side = _side_stream(device)
        # The allocator may reuse the memory of the sum only after the side stream's copy, because
        # no other stream waits for the sum before it is freed.
        sums.record_stream(side)
        with unwatched_stream(side):
            work.wait()
            host = torch.empty(len(flags), dtype=sums.dtype, device="cpu", pin_memory=True)
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _FlagSum(steps, flags[0] > 0, work, host, event)

    def totals(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        else:
            self.work.wait()
        return list(self.host.tolist())


# One stream for each device.
_side_stream = functools.cache(torch.cuda.Stream)

"""When the phases of a step began and ended, for those who ask ``DistributedDataParallel`` for its logging data."""

from __future__ import annotations

import time
from collections.abc import Callable

_SAMPLED_AT_FIRST = 10  # steps; later one of so many as the sample rate says
_SAMPLE_RATE = 100


class StepTimes:
    """Host clock readings of one step, in nanoseconds; taken in the same steps in which stock takes them.

    Attributes:
        forwards: How many forwards were to be synchronised.
        rate: In which steps times are taken, from the eleventh on.
        sampled: Whether they are taken in this one.
        at: The readings of this step, by stock's names of the fields.
    """

    def __init__(self) -> None:
        self.forwards, self.rate, self.sampled = 0, _SAMPLE_RATE, False
        self.at: dict[str, int] = {}

    def forward_begins(self) -> None:
        """Count a forward."""
        self.forwards += 1
        self.sampled = self.forwards <= _SAMPLED_AT_FIRST or self.forwards % self.rate == 0
        if self.sampled:
            self.at = {"forward_compute_time_start": time.time_ns()}

    def note(self, phase: str) -> None:
        """Note that a phase begins or ends now; call it only in steps that are sampled."""
        self.at[phase] = time.time_ns()

    def first_collective(self, then: Callable[[], None]) -> None:
        """Note that communication begins, and call what else comes before it."""
        if self.sampled:
            self.note("backward_comm_time_start")
        then()

    def durations(self) -> dict[str, int]:
        """Return how long the phases took, without those that did not come in this order."""
        spans = {
            "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
            "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
            "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
            "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
        }
        known = {name: self.at[end] - self.at[begin] for name, (begin, end) in spans.items() if self._has(begin, end)}
        return {name: nanoseconds for name, nanoseconds in known.items() if nanoseconds >= 0}

    def _has(self, *phases: str) -> bool:
        return all(phase in self.at for phase in phases)

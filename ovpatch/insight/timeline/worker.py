"""What happens in each process of the command: the ordered steps are recorded, then the process leaves.

Step n lies between the borders n-1 and n. Recording begins at the border before the first wanted step, whose own
beginning is seen in full; the profiler is set up one step earlier, so that what that takes falls into no recorded step.
As many steps as were recorded follow unrecorded: together with as many before the set-up they tell what recording
costs. Steps that are further away do not: a device that gets warm gets slower. Each of these blocks begins and ends
with an empty queue of the device, and nothing of ours comes in between: the device would catch up meanwhile.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import torch

from ovpatch.insight import steps
from ovpatch.insight.ending import at_end
from ovpatch.insight.timeline.recorder import Recorder
from ovpatch.jobs.orders import Orders
from ovpatch.logs import logger
from ovpatch.reports.workers import write_json

#: Steps at the start of a run that say nothing about the others.
COLD: Final = 2


def begin(orders: Orders) -> None:
    """Watch the steps of this process; called at the end of ``import torch``."""
    session = _Session(orders)
    session.steps.watch()
    at_end(session.finish_at_exit)


class _Session:
    """The recording of this process."""

    def __init__(self, orders: Orders) -> None:
        self._directory = orders.directory
        self._first, count = int(orders.details["step"]), int(orders.details["steps"])
        self._last, self._end = self._first + count - 1, self._first + 2 * count
        before, after = self._first - 2, self._last + 1
        self._timed = {COLD, before - count, before, self._first - 1, self._last, after, self._end}
        self._stop = bool(orders.details["stop"])
        self._recorder = Recorder(operators=bool(orders.details["operators"]))
        self._arrived: dict[int, int] = {}  # nanoseconds at which each border was reached
        self._left: dict[int, int] = {}  # and left, after what we do there
        self._recorded: list[int] = []
        self._finished = False
        self._pid: int | None = None  # of the process that steps; a data loader's forked child inherits all this
        self._rank, self._world = 0, 1
        self.steps = steps.Steps(orders.directory, self.at_border)

    def at_border(self, number: int) -> None:
        """Do what is due at the end of a step."""
        if number > self._end:
            return
        if self._pid != os.getpid():  # noted now: at the end the script may have destroyed its process group
            self._pid, self._rank, self._world = os.getpid(), steps.rank(), steps.world()
        if number in self._timed and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # blocks of steps are timed: their work shall be done
        self._arrived[number] = time.perf_counter_ns()
        self._recorder.mark(number)
        if number == self._first - 2:
            self._recorder.prepare()
        elif number == self._first - 1:
            self._recorder.start()
            self._recorder.mark(number)
        elif number == self._last:
            self._save()
        self._left[number] = time.perf_counter_ns()
        if number == self._end:
            self._finish()

    def finish_at_exit(self) -> None:
        """Keep what there is of a script that ends earlier; nothing may go wrong any more at this point."""
        if self._pid != os.getpid():
            return
        try:
            self._save()
            self._recorder.discard()
            self._write()
        except Exception as error:  # noqa: BLE001  # an error at exit would change the script's exit status
            logger.debug("the trace was not written: %r", error)

    def _finish(self) -> None:
        self._write()
        if self._stop:
            steps.leave(self._directory)

    def _save(self) -> None:
        whole = [number for number in self._arrived if self._first <= number <= self._last]
        if whole and self._recorder.save(self._directory / f"trace-rank{self._rank}.json.gz"):
            self._recorded = whole

    def _write(self) -> None:
        if self._finished:
            return
        self._finished = True
        write_json(self._directory / f"recording-rank{self._rank}.json", self._facts())

    def _facts(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world": self._world,
            "device": "gpu" if torch.cuda.is_initialized() else "cpu",
            "recorded": self._recorded,
            "yielded": self._recorder.yielded,
            "last": max(self._arrived, default=0),
            "durations": self._durations(),
        }

    def _durations(self) -> dict[int, int]:
        """Return the nanoseconds of each step, without what we do at its borders."""
        return {
            number: self._arrived[number] - self._left[number - 1]
            for number in self._arrived
            if number - 1 in self._left and number > COLD
        }

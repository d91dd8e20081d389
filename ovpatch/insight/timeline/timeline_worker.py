"""The worker of ``ovpatch timeline`` in each process: it records the ordered steps with torch's profiler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._profiler import RecordScope
from torch.profiler import ProfilerActivity, profile, record_function

from ovpatch.insight import steps
from ovpatch.logs import logger
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.patching import PatchManager
from ovpatch.session.worker_exit import write_at_exit
from ovpatch.session.worker_orders import Orders
from ovpatch.session.worker_reports import save_json

#: Name of the mark at the end of step n, without its number; it is inside the optimizer's own range.
BORDER: Final = profiler_label("timeline", "border")


class ProfilerSession:
    """torch's profiler over one range of steps.

    A second profiler in a process loses a trace or ends the process. So this one does not start while the script's own
    profiler is on, and stops as soon as that starts. Without ``operators``, torch's operators are recorded on the CPU
    only, where they are the compute: they cost host time.
    """

    def __init__(self, *, operators: bool) -> None:
        # The reason for a missing recording, "" without a reason.
        self.yielded = ""
        self._operators = operators
        self._profile: profile | None = None
        self._starting = self._running = self._ended = False
        self._foreign: set[int] = set()
        # Patches that detect the script's profilers, active from construction.
        self.patches = PatchManager()
        self._patch_profilers()

    @property
    def running(self) -> bool:
        """True while events are being recorded."""
        return self._running

    def prepare_profiler(self) -> None:
        """Set the profiler up, which takes up to seconds on a GPU; it costs little until it starts."""
        if self._foreign or self.yielded or self._profile is not None:
            return
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []),
        ]
        self._profile = profile(activities=activities)
        self._profile.prepare_trace()

    def start_recording(self) -> None:
        """Start to record, unless the script's profiler is on."""
        if self._foreign and not self.yielded:
            self.yielded = "the script's own profiler was on"
        self.prepare_profiler()
        if self._profile is not None and not self.yielded:
            self._starting = True
            try:
                self._profile.start_trace()
            finally:
                self._starting = False
            self._running = True

    def mark_border(self, step: int) -> None:
        """Mark the end of a step."""
        if self._running:
            with record_function(f"{BORDER} ({step})"):
                pass

    def save_trace(self, path: Path) -> bool:
        """Stop the recording and write it; return whether there was one."""
        if self._profile is None or not self._running:
            return False
        self._running, self._ended = False, True
        self._profile.stop_trace()
        self._profile.export_chrome_trace(str(path))
        return True

    def discard_trace(self) -> None:
        """Stop without saving; a process that ends under a running profiler crashes."""
        if self._profile is None or self._ended:
            return
        self._ended = True
        if not self._running:
            # A prepared profiler can be stopped only after a start.
            self._profile.start_trace()
        self._running = False
        self._profile.stop_trace()

    def _patch_profilers(self) -> None:
        """Detect the start and end of every other profiler of the process."""
        why = "all profilers use this class, and torch has no hook for them"
        for name, wrap in (("_prepare_trace", self._wrap_prepare), ("__exit__", self._wrap_exit)):
            self.patches.register_patch(
                f"torch.autograd.profiler.profile.{name}", wrap=wrap, why=why
            )
        if not self._operators:
            why = "the profiler selects events by scope, and torch.profiler does not expose that"
            self.patches.register_patch(
                "torch.autograd.profiler._enable_profiler", wrap=self._wrap_enable, why=why
            )
        self.patches.apply()

    def _wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recording = self

        @wraps(original)
        def prepare(self: Any) -> Any:
            if recording._profile is None or self is not recording._profile.profiler:
                if recording._profile is not None and not recording._ended:
                    recording.yielded = "the script started its own profiler"
                    recording.discard_trace()
                recording._foreign.add(id(self))
            return original(self)

        return prepare

    def _wrap_enable(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def enable(config: Any, activities: Any, *scopes: Any) -> None:
            if self._starting and ProfilerActivity.CUDA in activities:
                scopes = ({RecordScope.USER_SCOPE},)
            original(config, activities, *scopes)

        return enable

    def _wrap_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recording = self

        @wraps(original)
        def end(self: Any, *args: Any, **kwargs: Any) -> Any:
            recording._foreign.discard(id(self))
            return original(self, *args, **kwargs)

        return end


def _label_stages(patches: PatchManager) -> None:
    """Label the computations of torch's pipeline stages as feature ``pipeline`` does."""
    methods = {
        "F": "forward_one_chunk",
        "B": "backward_one_chunk",
        "W": "backward_weight_one_chunk",
    }
    for kind, name in methods.items():
        patches.register_patch(
            f"torch.distributed.pipelining.stage._PipelineStageBase.{name}",
            wrap=partial(_wrap_stage, kind=kind),
            why="torch's labels have no stage, and those of a schedule with one stage per rank span its waits",
        )
    patches.apply()


def _wrap_stage(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @wraps(original)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        microbatch = [*args, *kwargs.values()][0]
        with profiler_span(
            profiler_label("pipeline", kind, f"{self.stage_index}{kind}{microbatch}")
        ):
            return original(self, *args, **kwargs)

    return compute


#: Cold steps at the start of a run, which are not timed.
COLD: Final = 2


def start_worker(orders: Orders) -> None:
    """Start to count the steps of this process; called at the end of ``import torch``."""
    session = _Session(orders)
    session.steps.start_counting()
    write_at_exit(session.finish_at_exit)


class _Session:
    """The recording of this process.

    Step n is between the boundaries n-1 and n. Recording starts at the boundary before the first
    wanted step; the profiler is set up one step earlier. The same number of steps follows unrecorded:
    with as many before the set-up they give the cost of recording. More distant steps do not: a
    warming device gets slower. Each block starts and ends with an empty queue of the device, and has
    no synchronisation inside.
    """

    def __init__(self, orders: Orders) -> None:
        self._directory = orders.directory
        self._first, count = int(orders.details["step"]), int(orders.details["steps"])
        self._last, self._end = self._first + count - 1, self._first + 2 * count
        before, after = self._first - 2, self._last + 1
        self._timed = {COLD, before - count, before, self._first - 1, self._last, after, self._end}
        self._stop = bool(orders.details["stop"])
        self._recorder = ProfilerSession(operators=bool(orders.details["operators"]))
        _label_stages(self._recorder.patches)
        # The time in ns at each step boundary, before the work of this class.
        self._arrived: dict[int, int] = {}
        # The time in ns at each step boundary, after the work of this class.
        self._left: dict[int, int] = {}
        self._recorded: list[int] = []
        self._finished = False
        # The stepping process: a data loader's forked child inherits this object.
        self._pid: int | None = None
        self._rank, self._world = 0, 1
        self.steps = steps.StepCounter(orders.directory, self.at_border)

    def at_border(self, number: int) -> None:
        """Act at the end of a step."""
        if number > self._end:
            return
        # At the end the script may have destroyed its process group.
        if self._pid != os.getpid():
            self._pid, self._rank, self._world = (
                os.getpid(),
                steps.get_rank(),
                steps.get_world_size(),
            )
        if number in self._timed and torch.cuda.is_initialized():
            # The times of blocks of steps include their device work.
            torch.cuda.synchronize()
        self._arrived[number] = time.perf_counter_ns()
        self._recorder.mark_border(number)
        if number == self._first - 2:
            self._recorder.prepare_profiler()
        elif number == self._first - 1:
            self._recorder.start_recording()
            self._recorder.mark_border(number)
        elif number == self._last:
            self._save()
        self._left[number] = time.perf_counter_ns()
        if number == self._end:
            self._write()
            if self._stop:
                steps.exit_with_peers(self._directory)

    def finish_at_exit(self) -> None:
        """Save the recording of a script that ends early, without raising."""
        if self._pid != os.getpid():
            return
        try:
            self._save()
            self._recorder.discard_trace()
            self._write()
        except Exception as error:  # noqa: BLE001  # an error at exit would change the script's exit status
            logger.debug("the trace was not written: %r", error)

    def _save(self) -> None:
        steps_done = [number for number in self._arrived if self._first <= number <= self._last]
        if steps_done and self._recorder.save_trace(
            self._directory / f"trace-rank{self._rank}.json.gz"
        ):
            self._recorded = steps_done

    def _write(self) -> None:
        if self._finished:
            return
        self._finished = True
        durations = {
            number: self._arrived[number] - self._left[number - 1]
            for number in self._arrived
            if number - 1 in self._left and number > COLD
        }
        facts = {
            "rank": self._rank,
            "world": self._world,
            "device": "gpu" if torch.cuda.is_initialized() else "cpu",
            "recorded": self._recorded,
            "yielded": self._recorder.yielded,
            "last": max(self._arrived, default=0),
            "durations": durations,
        }
        save_json(self._directory / f"recording-rank{self._rank}.json", facts)

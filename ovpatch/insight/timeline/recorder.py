"""torch's profiler in somebody's process: on for a few steps, and out of the way of a profiler of the script's own.

[Note: one profiler at a time] A second profiler in a process loses the trace of one of the two, or ends the process. So
ours does not begin while the script's is on, and gives up as soon as the script's begins; the script never notices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._profiler import RecordScope
from torch.profiler import ProfilerActivity, profile, record_function

from ovpatch.overlap.labels import label
from ovpatch.patching import PatchManager

#: Name of the mark at the end of step n, without its number: a moment inside the optimizer's own range.
BORDER: Final = label("timeline", "border")


class Recorder:
    """Records one stretch of steps.

    Args:
        operators: Record torch's operators, too, which costs host time. On the CPU they are what computes, so there
            they are recorded in any case.

    Attributes:
        yielded: Why there is no recording, "" if there is no reason.
        patches: What shows the script's own profilers; in force from the start.
    """

    def __init__(self, *, operators: bool) -> None:
        self.yielded = ""
        self._operators = operators
        self._profile: profile | None = None
        self._starting = self._running = self._ended = False
        self._foreign: set[int] = set()
        self.patches = PatchManager()
        self._watch()

    @property
    def running(self) -> bool:
        """Whether events are being recorded now."""
        return self._running

    def prepare(self) -> None:
        """Set the profiler up, which takes up to seconds on a GPU; it costs next to nothing until it starts."""
        if self._foreign or self.yielded or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
        self._profile = profile(activities=activities)
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin to record; does nothing if the script's profiler is on."""
        if self._foreign and not self.yielded:
            self.yielded = "the script's own profiler was on"
        self.prepare()
        if self._profile is not None and not self.yielded:
            self._starting = True
            try:
                self._profile.start_trace()
            finally:
                self._starting = False
            self._running = True

    def mark(self, step: int) -> None:
        """Note that a step ends here."""
        if self._running:
            with record_function(f"{BORDER} ({step})"):
                pass

    def save(self, path: Path) -> bool:
        """End the recording and write it; return whether there was one."""
        if self._profile is None or not self._running:
            return False
        self._running, self._ended = False, True
        self._profile.stop_trace()
        self._profile.export_chrome_trace(str(path))
        return True

    def discard(self) -> None:
        """End what has begun and was not saved; a process that ends under a running profiler crashes."""
        if self._profile is None or self._ended:
            return
        self._ended = True
        if not self._running:
            self._profile.start_trace()  # what is only prepared can only be ended by way of a start
        self._running = False
        self._profile.stop_trace()

    def _watch(self) -> None:
        """See every other profiler of the process begin and end."""
        why = "all kinds of profilers come through this class, and torch has no hook for them"
        for name, wrap in (("_prepare_trace", self._wrap_prepare), ("__exit__", self._wrap_exit)):
            self.patches.register_patch(f"torch.autograd.profiler.profile.{name}", wrap=wrap, why=why)
        if not self._operators:
            why = "the profiler chooses by scope what it records, and torch.profiler does not hand that on"
            self.patches.register_patch("torch.autograd.profiler._enable_profiler", wrap=self._wrap_enable, why=why)
        self.patches.apply()

    def _wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def prepare(session: Any) -> Any:
            if self._profile is None or session is not self._profile.profiler:
                if self._profile is not None and not self._ended:
                    self.yielded = "the script started its own profiler"
                    self.discard()
                self._foreign.add(id(session))
            return original(session)

        return prepare

    def _wrap_enable(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def enable(config: Any, activities: Any, *scopes: Any) -> None:
            if self._starting and ProfilerActivity.CUDA in activities:
                scopes = ({RecordScope.USER_SCOPE},)
            original(config, activities, *scopes)

        return enable

    def _wrap_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def end(session: Any, *args: Any, **kwargs: Any) -> Any:
            self._foreign.discard(id(session))
            return original(session, *args, **kwargs)

        return end

"""Arms: the same command run stock, patched, or with some of the features, each with a folder and a log of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ovpatch.insight import launch
from ovpatch.session import orders, worker_reports
from ovpatch.session.orders import Orders
from ovpatch.session.report import IDLE, did_work
from ovpatch.settings.settings import SettingsError

STOCK: Final = "0"

#: Variables that would let a process of the command go its own way.
_OURS: Final = ("OVPATCH_AUTO", worker_reports.REPORT_DIR, orders.VARIABLE)


@dataclass(frozen=True)
class Arm:
    """One way to run the command.

    Attributes:
        name: Unique in one call of a tool; names the folder.
        features: What ``OVPATCH`` shall say: ``0`` for stock, None for what the user's environment says.
        details: What the tool's worker is to do in this arm.
        variables: More environment variables.
    """

    name: str
    features: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def patched(self) -> bool:
        """Whether any feature may run."""
        return self.features != STOCK

    def environment(self, worker: str, folder: Path) -> dict[str, str]:
        """Return the environment of the command in this arm."""
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
        if self.features is not None:
            environment["OVPATCH"] = self.features
        if self.patched:
            environment["OVPATCH_AUTO"] = "1"
        environment[worker_reports.REPORT_DIR] = str(folder.absolute())
        return {**environment, **Orders(worker, folder, self.details).variables(), **self.variables}


def leave_one_out(arm: Arm, features: Sequence[str], requires: Mapping[str, Collection[str]]) -> dict[str, Arm]:
    """Return, for each feature that ran, the arm in which it, and what requires it, is off and all else is as before.

    A feature without which none of the others runs has no such arm: that would be stock.

    Args:
        arm: A patched arm.
        features: What ran in it, see :attr:`Outcome.applied`.
        requires: What each requires, see :attr:`Outcome.requires`.
    """
    found = {}
    for feature in features:
        off = {feature}
        while more := {one for one in features if off.intersection(requires.get(one, ()))} - off:
            off |= more
        if not off.issuperset(features):
            variables = {f"OVPATCH_{one.upper()}": "0" for one in features if one in off}  # off always wins
            found[feature] = replace(arm, name=f"without-{feature}", variables={**arm.variables, **variables})
    return found


@dataclass(frozen=True)
class Outcome:
    """What came of an arm.

    Attributes:
        arm: The arm.
        folder: What its processes left behind.
        log: What the command wrote.
        code: The command's exit code, as a shell would give it.
        seconds: How long it took.
        timed_out: Whether it was ended because no process made a step in time.
        interrupted: Whether it was ended by a signal to us.
        stacks: If it timed out, the stacks of each process, by its number.
    """

    arm: Arm
    folder: Path
    log: Path
    code: int
    seconds: float
    timed_out: bool = False
    interrupted: bool = False
    stacks: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """The report of ovpatch merged over the processes; None if no process had one."""
        reports = worker_reports.read_reports(self.folder, "worker")
        return worker_reports.merge_reports(reports) if reports else None

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each feature that was on in every process counted, over all processes."""
        return {one["name"]: one["counters"] for one in self._features if one["state"] == "applied"}

    @property
    def applied(self) -> list[str]:
        """Features that were on in every process, whether or not they did anything."""
        return list(self.counters)

    @property
    def requires(self) -> dict[str, Sequence[str]]:
        """What each feature cannot run without."""
        return {one["name"]: one["requires"] for one in self._features}

    @property
    def reorders_products(self) -> bool:
        """Whether a feature that did something adds up matrix products in another order than stock."""
        return any(one["reorders_products"] for one in self._features if one["name"] in self.exercised)

    @property
    def exercised(self) -> list[str]:
        """Features that did work, by their counters."""
        return [one["name"] for one in self._features if did_work(one["counters"], one["work"])]

    @property
    def idle(self) -> dict[str, str]:
        """Features that were on in every process and did no work, with what they say of it."""
        return {name: "; ".join(self.remarks[name]) for name in self.applied if name not in self.exercised}

    @property
    def left_to_stock(self) -> dict[str, dict[str, int]]:
        """Features that did work and left some to stock: their counters of that."""
        left = {
            name: {what: count for what, count in counters.items() if what.startswith("stock_") and count}
            for name, counters in self.counters.items()
            if name in self.exercised
        }
        return {name: counts for name, counts in left.items() if counts}

    @property
    def remarks(self) -> dict[str, list[str]]:
        """What each feature wants the user to know; that it did no work, only where it has no better words for it."""
        found = {}
        for one in self._features:
            every = [remark for remark in one["remarks"] if not remark.startswith(self._waiting)]
            found[one["name"]] = [remark for remark in every if not remark.startswith(tuple(IDLE))] or every
        return found

    @property
    def _waiting(self) -> tuple[str, ...]:
        """How remarks begin that say that a patch waits for an import."""
        patches = self.report["patches"] if self.report is not None else ()
        return tuple(f"{one['target']} is pending" for one in patches if one["state"] == "pending")

    @property
    def _features(self) -> Sequence[dict[str, Any]]:
        return self.report["features"] if self.report is not None else ()

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Processes in which ovpatch, or the tool, could not do its work: pid, rank and error."""
        return worker_reports.read_reports(self.folder, "failed")

    def says(self, words: str) -> bool:
        """Tell whether the log has these words."""
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            return any(words in line for line in lines)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def check_autoload() -> None:
    """Find what would keep every arm from being seen, before anything runs.

    Raises:
        ovpatch.SettingsError: torch would not load us in the command's processes.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise SettingsError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1, so no process of the command loads ovpatch. Unset it."
        )


def run(
    arm: Arm,
    command: Sequence[str],
    worker: str,
    out: Path,
    *,
    timeout: float,
    progress: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Run one arm to its end. Nothing that it started is left then.

    Args:
        arm: What to run.
        command: Program and arguments.
        worker: Module of the tool that begins in each process, see :class:`~ovpatch.session.orders.Orders`.
        out: Folder in which the arm gets its own, and its log; a folder that an earlier call left must be gone.
        timeout: Seconds without a step by any process, and without a new process, after which it has hung.
        progress: Called about twice a second with the last step that all processes that step have taken.

    Raises:
        ovpatch.insight.launch.NotStartedError: The command could not be started.
    """
    folder, log = out / arm.name, out / f"{arm.name}.log"
    folder.mkdir(parents=True)
    watch = _Watch(folder, timeout, progress)
    began = time.monotonic()
    try:
        with launch.started(command, arm.environment(worker, folder), log=log) as job:
            code = job.wait(lambda: watch.look(job))
    finally:
        launch.end(f"{worker_reports.REPORT_DIR}={folder.absolute()}")
    seconds, interrupted = time.monotonic() - began, job.interrupted is not None
    return Outcome(arm, folder, log, code, seconds, watch.timed_out, interrupted, _read_stacks(folder))


class _Watch:
    """Looks at what the processes of a running arm leave, and ends it when that tells it to."""

    def __init__(self, folder: Path, timeout: float, progress: Callable[[int], None]) -> None:
        self._folder, self._timeout, self._progress = folder, timeout, progress
        self._seen: dict[str, int] = {}
        self._news = time.monotonic()
        self._interrupted: float | None = None
        self._ended = False
        self.timed_out = False

    def look(self, job: launch.Command) -> None:
        """See whether there is news; end a job that has hung, or of which a process could not be patched."""
        if self._ended:
            return
        if job.interrupted is not None:
            self._lose_patience(job)
        seen = {path.name: path.stat().st_mtime_ns for path in self._folder.glob("[pb]*-*")}  # process- and beat-
        if seen != self._seen:
            self._seen, self._news = seen, time.monotonic()
            self._progress(slowest(self._folder))
        if any(self._folder.glob("failed-*.json")):
            self._end(job)
        elif time.monotonic() - self._news > self._timeout:
            self.timed_out = True
            ask_for_stacks(self._folder)
            self._end(job)

    def _lose_patience(self, job: launch.Command) -> None:
        """End a command that goes on although it was asked to end, at once if that was twice."""
        self._interrupted = self._interrupted or time.monotonic()
        if job.asked > 1 or time.monotonic() - self._interrupted > launch.GRACE:
            self._end(job, 1.0)

    def _end(self, job: launch.Command, grace: float = launch.GRACE) -> None:
        self._ended = True
        job.end(grace)
        for pid in processes(self._folder):  # torchrun's workers are in sessions of their own
            launch.send(pid, signal.SIGKILL)


def slowest(folder: Path) -> int:
    """Return the last step that all processes that step have taken."""
    return min(_beats(folder), default=0)


def furthest(folder: Path) -> int:
    """Return the last step that any process has taken."""
    return max(_beats(folder), default=0)


def _beats(folder: Path) -> list[int]:
    return [int(path.read_bytes() or b"0") for path in folder.glob("beat-*")]


def processes(folder: Path) -> list[int]:
    """Return the numbers of the processes that signed in and live on this host."""
    return [one["pid"] for one in worker_reports.read_reports(folder, "process") if _lives(one["pid"], folder)]


def ranks(folder: Path) -> dict[int, str]:
    """Return the ranks of the processes that signed in, by their numbers, where the launcher gave them one."""
    return {
        one["pid"]: one["rank"] for one in worker_reports.read_reports(folder, "process") if one.get("rank") is not None
    }


def _lives(pid: int, folder: Path) -> bool:
    """Whether it lives and, where the system tells, is not somebody else who got its number."""
    environment = Path(f"/proc/{pid}/environ")
    try:
        os.kill(pid, 0)
        return str(folder.absolute()).encode() in environment.read_bytes() if environment.exists() else True
    except (ProcessLookupError, PermissionError):
        return False


def ask_for_stacks(folder: Path, patience: float = 2.0) -> None:
    """Have every process of a job write its stacks, and give it the time to."""
    if orders.STACKS is None:
        return
    for pid in processes(folder):
        launch.send(pid, orders.STACKS)
    time.sleep(patience)


def _read_stacks(folder: Path) -> dict[int, str]:
    texts = {int(path.stem.partition("-")[2]): path for path in folder.glob("stacks-*.txt")}
    stacks = {pid: path.read_text(encoding="utf-8", errors="replace") for pid, path in sorted(texts.items())}
    return {pid: text for pid, text in stacks.items() if text}

"""Variants: runs of the same command, stock, patched, or without some features, each with its own folder and log."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ovpatch.insight import launch
from ovpatch.session import worker_orders, worker_reports
from ovpatch.session.session_report import IDLE, did_work
from ovpatch.session.worker_orders import Orders
from ovpatch.settings.settings import SettingsError

STOCK: Final = "0"

#: Variables of the user's environment that a variant does not inherit.
_OURS: Final = ("OVPATCH_AUTO", worker_reports.REPORT_DIR, worker_orders.ORDERS_VARIABLE)


@dataclass(frozen=True)
class Variant:
    """One way to run the command."""

    # Unique in one call of a tool; names the folder.
    name: str
    # Value of ``OVPATCH``: ``0`` for stock, None for that of the user's environment.
    features: str | None = None
    # Orders for the tool's worker, as JSON types.
    details: Mapping[str, Any] = field(default_factory=dict)
    # More environment variables.
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def patched(self) -> bool:
        """True if any feature may run."""
        return self.features != STOCK

    def build_environment(self, worker: str, folder: Path) -> dict[str, str]:
        """Return the environment of the command in this variant."""
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
        if self.features is not None:
            environment["OVPATCH"] = self.features
        if self.patched:
            environment["OVPATCH_AUTO"] = "1"
        environment[worker_reports.REPORT_DIR] = str(folder.absolute())
        return {**environment, **Orders(worker, folder, self.details).variables(), **self.variables}


def leave_one_out(
    variant: Variant, features: Sequence[str], requires: Mapping[str, Collection[str]]
) -> dict[str, Variant]:
    """Return a variant without each feature, and those that require it; none for one that all require: it is stock."""
    found = {}
    for feature in features:
        off = {feature}
        while more := {name for name in features if off.intersection(requires.get(name, ()))} - off:
            off |= more
        if not off.issuperset(features):
            # Such a variable always wins.
            variables = {f"OVPATCH_{name.upper()}": "0" for name in features if name in off}
            found[feature] = replace(
                variant, name=f"without-{feature}", variables={**variant.variables, **variables}
            )
    return found


@dataclass(frozen=True)
class Outcome:
    """The result of a variant."""

    variant: Variant
    # Folder with the files of its processes.
    folder: Path
    # File with the command's output.
    log: Path
    # Exit code of the command, as in a shell.
    code: int
    # The wall time of the run.
    seconds: float
    # Whether the variant was ended because no process took a step in time.
    timed_out: bool = False
    # Whether a signal ended the variant.
    interrupted: bool = False
    # The stacks of each process by its id, if the variant timed out.
    stacks: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """Ovpatch's report, merged over the processes; None if no process has one."""
        reports = worker_reports.read_reports(self.folder, "worker")
        return worker_reports.merge_reports(reports) if reports else None

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Counters of each feature that was on in every process, merged over the processes."""
        return {row["name"]: row["counters"] for row in self._features if row["state"] == "applied"}

    @property
    def applied(self) -> list[str]:
        """Features that were on in every process, exercised or idle."""
        return list(self.counters)

    @property
    def requires(self) -> dict[str, Sequence[str]]:
        """Features that each feature requires."""
        return {row["name"]: row["requires"] for row in self._features}

    @property
    def reorders_products(self) -> bool:
        """True if an exercised feature splits GEMMs, which changes the order of sums."""
        return any(
            row["reorders_products"] for row in self._features if row["name"] in self.exercised
        )

    @property
    def exercised(self) -> list[str]:
        """Features that did work, by their counters."""
        return [row["name"] for row in self._features if did_work(row["counters"], row["work"])]

    @property
    def idle(self) -> dict[str, str]:
        """Features that were on in every process and did no work, with their remarks."""
        return {
            name: "; ".join(self.remarks[name])
            for name in self.applied
            if name not in self.exercised
        }

    @property
    def left_to_stock(self) -> list[str]:
        """Exercised features with some work that fell back to torch."""
        counted = [
            (name, what)
            for name, counters in self.counters.items()
            for what in counters
            if counters[what]
        ]
        left = dict.fromkeys(name for name, what in counted if what.startswith("stock_"))
        return [name for name in left if name in self.exercised]

    @property
    def remarks(self) -> dict[str, list[str]]:
        """The remarks of each feature. A remark about idleness counts only if the feature has no other remark."""
        # Patches that wait for an import are no news.
        patches = self.report["patches"] if self.report is not None else ()
        waiting = tuple(
            f"{row['target']} is pending" for row in patches if row["state"] == "pending"
        )
        found = {}
        for row in self._features:
            every = [remark for remark in row["remarks"] if not remark.startswith(waiting)]
            found[row["name"]] = [
                remark for remark in every if not remark.startswith(tuple(IDLE))
            ] or every
        return found

    @property
    def _features(self) -> Sequence[dict[str, Any]]:
        return self.report["features"] if self.report is not None else ()

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Errors of ovpatch or the tool in a process: pid, rank and error."""
        return worker_reports.read_reports(self.folder, "failed")

    @property
    def waits_in_tool(self) -> str:
        """Description of a process that hung in code of a tool and not in the script; "" if there is none."""
        found = {
            pid: match for pid, stacks in self.stacks.items() if (match := _IN_TOOL.search(stacks))
        }
        for pid, match in found.items():
            return (
                f"{name_process(pid, read_ranks(self.folder))} waits in ovpatch's {match['name']}()"
            )
        return ""

    @cached_property
    def rank_ends(self) -> dict[str, str]:
        """The ends of the ranks that the launcher names; see :func:`find_rank_ends`."""
        return find_rank_ends(self.read_log())

    def describe_exit(self, cause: str = "") -> str:
        """Return the exit code in words, with the end of the rank that failed first if its code is another.

        Args:
            cause: The exception or the signal that ended the command, if known.
        """
        text = f"exit code {self.code}"
        rank, end = next(reversed(self.rank_ends.items()), ("", text))
        by = f" by {cause}" if cause else ""
        return f"{text}{by}" if end == text else f"{text}{by} ({rank}: {end})"

    def read_log(self) -> str:
        """Return the command's output."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def read_failure(self) -> str:
        """Return the part of the log about the end of the command; see :func:`find_failure`."""
        return find_failure(self.read_log()) or "(it printed nothing)"


# The innermost frame of a thread, as faulthandler writes it, in a file of this package.
_IN_TOOL: Final = re.compile(
    rf'\(most recent call first\):\n  File "{re.escape(str(Path(__file__).parent))}/[^"]*", line \d+ in (?P<name>\w+)'
)
_HEAD: Final = re.compile(r"^(\[rank\d+\]: ?)?Traceback \(most recent call last\):$")
_LAUNCHERS: Final = (
    "ChildFailedError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "CalledProcessError",
)
# The lines that torchrun itself logs.
_LAUNCHERS_LOG: Final = re.compile(r"[WE]\d{4} \S+ \d+ \S*torch/distributed/")
_MAX_TRACEBACK_LINES: Final = 24


def find_failure(log: str, lines: int = 20) -> str:
    """Return a log's first traceback of a program other than the launcher, shortened, or otherwise its last lines.

    The first traceback is the cause: other ranks fail later, in a collective that the failed rank does not enter.
    Without a traceback, the last lines before a launcher's traceback count, with its "root cause", such as a signal.
    """
    every = log.splitlines()
    end = len(every)
    for start, line in enumerate(every):
        if match := _HEAD.match(line):
            found = _traceback(every[start:], match[1] or "")
            if not any(name in found[-1] for name in _LAUNCHERS):
                return "\n".join(
                    found
                    if len(found) <= _MAX_TRACEBACK_LINES
                    else [*found[:5], "  …", *found[5 - _MAX_TRACEBACK_LINES :]]
                )
            end = min(end, start)
    program_lines = [line for line in every[:end] if not _LAUNCHERS_LOG.match(line)][-lines:]
    root = next(
        (start for start in range(end, len(every)) if every[start].startswith("Root Cause")),
        len(every),
    )
    return "\n".join([*program_lines, *every[root:]] if program_lines else every[-lines:])


# A rank in torchrun's report of a failed job, and torch.multiprocessing.spawn's error about a process.
_RANK_END: Final = re.compile(r"^  rank +: (\d+) .*\n  exitcode +: (-?\d+)\b", re.MULTILINE)
_PROCESS_END: Final = re.compile(
    r"\.ProcessExitedException: (process \d+) terminated with (?:signal )?(.+)$", re.MULTILINE
)


def find_rank_ends(log: str) -> dict[str, str]:
    """Return the exit code or the signal of each rank that the launcher's report names; the first to fail is last.

    Launchers exit with their own code, 1 for torchrun, whatever the code of the rank is. Ranks that the launcher has
    ended after the first failure are left out.
    """
    ends = [(f"rank {rank}", _describe_code(int(code))) for rank, code in _RANK_END.findall(log)]
    ends = [*(end for end in ends[:-1] if end[1] != signal.SIGTERM.name), *ends[-1:]]
    return dict(ends or _PROCESS_END.findall(log)[:1])


def _describe_code(code: int) -> str:
    """Return an exit code in words; a negative one means a signal."""
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"


def find_exception_name(log: str) -> str:
    """Return the class of the exception that :func:`find_failure` finds, "" for none."""
    found = find_failure(log).splitlines()
    match = _HEAD.match(found[0]) if found else None
    return found[-1].removeprefix(match[1] or "").partition(":")[0] if match else ""


def _traceback(lines: list[str], prefix: str) -> list[str]:
    """Return the lines of the traceback that starts here, up to the first that is not indented."""
    found = [lines[0]]
    for line in lines[1:]:
        if prefix and not line.startswith(prefix.rstrip()):
            # Lines of another rank may come in between.
            continue
        found.append(line)
        if not line.removeprefix(prefix).startswith(" "):
            break
    return found


def check_autoload() -> None:
    """Check that torch loads ovpatch in the command's processes, before anything runs; raise SettingsError if not."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise SettingsError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1, so no process of the command loads ovpatch. "
            "Unset it."
        )


def run_variant(
    variant: Variant,
    command: Sequence[str],
    worker: str,
    out: Path,
    *,
    timeout: float,
    progress: Callable[[int], None] = lambda step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run one variant with the tool's worker module in each process, and end all processes that it started.

    ``out`` is the parent of the variant's folder, which must not exist. A variant without a step or a new process for
    ``timeout`` seconds counts as hung. ``progress`` is called about twice a second with the last step that all
    processes have taken. ``should_stop`` is called as often, and ends the run early. Raises NotStartedError if the
    command cannot be started.
    """
    folder, log = out / variant.name, out / f"{variant.name}.log"
    folder.mkdir(parents=True)
    watch = _Watchdog(folder, timeout, progress, should_stop)
    began = time.monotonic()
    try:
        with launch.running_command(
            command, variant.build_environment(worker, folder), log=log
        ) as job:
            code = job.wait_for_exit(lambda: watch.check_job(job))
    finally:
        launch.end_processes(f"{worker_reports.REPORT_DIR}={folder.absolute()}")
    seconds, interrupted = time.monotonic() - began, job.interrupted is not None
    if watch.has_outlived:
        code = 0
    return Outcome(
        variant, folder, log, code, seconds, watch.timed_out, interrupted, read_stacks(folder)
    )


# Seconds for processes to write their stacks.
_WRITING: Final = 2.0
# Seconds that a command of a job on several nodes may take after all ranks that it started here have left: torchrun
# waits 300 for nodes on which ranks continue or have failed.
_OUTLIVE_TIMEOUT_S: Final = 60.0


class _Watchdog:
    """Ends a running variant that has hung, was interrupted, is done, or has a process that could not be patched."""

    def __init__(
        self,
        folder: Path,
        timeout: float,
        progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._folder, self._timeout, self._progress = folder, timeout, progress
        self._should_stop = should_stop
        self._seen: dict[str, int] = {}
        self._news = time.monotonic()
        self._interrupted: float | None = None
        self._ended = False
        # The time since which all ranks have left; None while one has not.
        self._left: float | None = None
        self.timed_out = False
        # Whether the command was ended because it only waited for other nodes.
        self.has_outlived = False

    def check_job(self, job: launch.Command) -> None:
        """Check the files of the processes, report progress, and end the job if necessary."""
        if self._ended:
            return
        # A command may ignore the signal, so it is ended after a while.
        if job.interrupted is not None:
            self._interrupted = self._interrupted or time.monotonic()
            if job.interrupts > 1 or time.monotonic() - self._interrupted > launch.GRACE:
                self._end(job, 1.0)
        # The pattern matches the files process-* and beat-*, which each process writes.
        seen = {path.name: path.stat().st_mtime_ns for path in self._folder.glob("[pb]*-*")}
        if seen != self._seen:
            self._seen, self._news = seen, time.monotonic()
            self._progress(read_slowest_step(self._folder))
        if any(self._folder.glob("failed-*.json")) or self._should_stop():
            self._end(job)
        elif self._outlives_ranks():
            self.has_outlived = True
            self._end(job, 1.0)
        elif time.monotonic() - self._news > self._timeout:
            self.timed_out = True
            for pid in list_processes(self._folder):
                launch.send_signal(pid, worker_orders.STACKS_SIGNAL)
            time.sleep(_WRITING)
            self._end(job)

    def _outlives_ranks(self) -> bool:
        """Return whether a launcher of several nodes still runs, long after its ranks here have left."""
        beats, marks = (len(list(self._folder.glob(f"{kind}-*"))) for kind in ("beat", "left"))
        if not 0 < beats <= marks or list_processes(self._folder):
            self._left = None
            return False
        self._left = self._left or time.monotonic()
        # The time without a step must not count as a hang first.
        limit = min(_OUTLIVE_TIMEOUT_S, self._timeout / 2)
        is_late = time.monotonic() - self._left > limit
        return is_late and bool(describe_node(self._folder))

    def _end(self, job: launch.Command, grace: float = launch.GRACE) -> None:
        self._ended = True
        job.stop_process(grace)
        # Each of torchrun's workers has its own session.
        for pid in list_processes(self._folder):
            launch.send_signal(pid, signal.SIGKILL)


def read_slowest_step(folder: Path) -> int:
    """Return the last step that all stepping processes have taken."""
    return min(_read_beats(folder), default=0)


def read_furthest_step(folder: Path) -> int:
    """Return the last step that any process has taken."""
    return max(_read_beats(folder), default=0)


def _read_beats(folder: Path) -> list[int]:
    return [int(path.read_bytes() or b"0") for path in folder.glob("beat-*")]


def list_processes(folder: Path) -> list[int]:
    """Return the ids of the processes that signed in and are alive on this host."""
    return [pid for pid in _read_processes(folder) if _is_alive(pid, folder)]


def read_ranks(folder: Path) -> dict[int, str]:
    """Return the ranks of the processes that signed in, by process id, if the launcher set a rank."""
    processes = _read_processes(folder)
    ranks = {pid: process.get("rank") for pid, process in processes.items()}
    return {pid: rank for pid, rank in ranks.items() if rank is not None}


def read_hosts(folder: Path) -> dict[int, str]:
    """Return the host names of the ranks that signed in; {} if all of them are on one host."""
    processes = _read_processes(folder).values()
    launched = [process for process in processes if process.get("rank") and "host" in process]
    hosts = {int(process["rank"]): process["host"] for process in launched}
    return hosts if len(set(hosts.values())) > 1 else {}


def _read_processes(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the files of the processes that signed in, by the process id in their names."""
    return {
        int(path.stem.partition("-")[2]): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("process-*.json"))
    }


def name_rank(rank: int, hosts: Mapping[int, str]) -> str:
    """Return the name of a rank for the user, with its host if ``hosts`` has it."""
    if not hosts:
        return f"rank {rank}"
    # Torch may have been built without torch.distributed, and then there is one host.
    from ovpatch.overlap.comm.consensus import name_ranks

    return f"rank {name_ranks([rank], hosts)}"


def name_process(pid: int, ranks: Mapping[int, str]) -> str:
    """Return the name of a process for the user, with its rank if that is known."""
    node, own_pid = divmod(pid, worker_orders.MAX_PID)
    place = f" of node {node}" if node < worker_orders.FIRST_HOST_NUMBER else " of another host"
    name = f"process {own_pid}{place if node else ''}"
    return f"rank {ranks[pid]} ({name})" if pid in ranks else name


_BY_PID: Final = re.compile(r"(process|beat|bench|facts|stacks)-(\d+)(\..*)?")


def rename_for_node(name: str, node: int) -> str:
    """Return the name for a file of another node; processes of several nodes may have the same id."""
    match = _BY_PID.fullmatch(name)
    return (
        f"{match[1]}-{node * worker_orders.MAX_PID + int(match[2])}{match[3] or ''}"
        if match
        else name
    )


def describe_node(folder: Path) -> str:
    """Return the ranks that this node saw of a job on several nodes, in words; "" if it saw all ranks."""
    reports = worker_reports.read_reports(folder, "process")
    launched = [report for report in reports if report.get("world_size") and report["rank"]]
    world = max((int(report["world_size"]) for report in launched), default=0)
    has_more_nodes = any(int(report["local_world_size"] or world) < world for report in launched)
    seen = sorted({int(report["rank"]) for report in launched})
    if not has_more_nodes or len(seen) >= world:
        return ""
    listed = f"ranks {seen[0]} to {seen[-1]}" if len(seen) > 1 else f"rank {seen[0]}"
    return f"this node saw {listed} of {world}"


def _is_alive(pid: int, folder: Path) -> bool:
    """Return whether a process is alive, and not a later one with the same id."""
    try:
        return str(folder.absolute()).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def read_stacks(folder: Path) -> dict[int, str]:
    """Return the stacks of each process that has written any, by process id."""
    texts = {int(path.stem.partition("-")[2]): path for path in folder.glob("stacks-*.txt")}
    stacks = {
        pid: path.read_text(encoding="utf-8", errors="replace")
        for pid, path in sorted(texts.items())
    }
    return {pid: text for pid, text in stacks.items() if text}

"""The role of a process, and the reports and results that a worker writes.

A process writes its report at ``apply()`` and at exit, each time atomically. So a process that is killed has left its
first report.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import current_process, parent_process, util
from pathlib import Path
from typing import Any, Final, Protocol

from ovpatch.logs import logger
from ovpatch.session import worker_reports
from ovpatch.session.session_report import Report

_LAUNCHERS: Final = frozenset(
    {
        "torchrun",
        "accelerate",
        "accelerate-launch",
        "deepspeed",
        "fabric",
        "lightning",
        "composer",
        "torchx",
    }
)
_LAUNCHER_MODULES: Final = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "accelerate.commands",
    "deepspeed.launcher",
)
_HELPERS: Final = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "torch._inductor.compile_worker",
)


def get_process_role(arguments: list[str] | None = None) -> str:
    """Return the role of this process, from the command line of its interpreter.

    The role is ``launcher`` (such as torchrun's agent, which does not train), ``helper`` (fork servers and compile
    workers, which may be patched because they fork) or ``worker``.
    """
    line = sys.orig_argv if arguments is None else arguments
    program = _program(line[1:])
    if program.startswith("-c"):
        return "helper" if any(name in program for name in _HELPERS) else "worker"
    if any(program == name or program.startswith(name + ".") for name in _LAUNCHER_MODULES):
        return "launcher"
    if any(name in os.path.normpath(program).replace(os.sep, ".") for name in _HELPERS[2:]):
        return "helper"
    stem = os.path.basename(program).removesuffix(".exe").removesuffix("-script.py")
    return "launcher" if stem in _LAUNCHERS else "worker"


def _program(arguments: list[str]) -> str:
    """Return the module, ``-c`` with its code, or the script that a Python command line runs."""
    rest = iter(arguments)
    for argument in rest:
        if re.fullmatch(r"-[bBdEiIOPqsSuvx]*m", argument):
            return next(rest, "")
        if re.fullmatch(r"-[bBdEiIOPqsSuvx]*c", argument):
            return "-c " + next(rest, "")
        if argument in ("-W", "-X", "--check-hash-based-pycs"):
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return ""


class MakeReport(Protocol):
    """The function that makes the report of this process."""

    def __call__(self, *, with_fits: bool = False) -> Report:
        """Return the report; ``with_fits`` adds the features that would help this script."""


class _Reporter:
    """The report file of this process."""

    def __init__(self, directory: Path, make_report: MakeReport) -> None:
        self._directory = directory
        self._make_report = make_report
        # The time of birth by process id. The operating system may give an id to another process later.
        self._births: Final = {os.getpid(): time.time_ns()}
        # The parent's report at the fork, whose counts this process must not repeat.
        self._base: dict[str, Any] = {}
        # The report before the last fork of this process, for the child.
        self._child_base: dict[str, Any] = {}

    def get_path(self) -> Path:
        """Return the path of this process's file. A forked child has its own file."""
        birth = self._births.setdefault(os.getpid(), time.time_ns())
        return self._directory / f"worker-{os.getpid()}-{birth}.json"

    def write(self, *, is_last: bool = False) -> None:
        """Write the current report. A missing directory, as on another machine, is no error."""
        if not self._directory.is_dir():
            logger.debug(
                "no directory %s here: this process does not report to `ovpatch run`",
                self._directory,
            )
            return
        data = subtract_report(self._make_report(with_fits=is_last).to_json(), self._base)
        data["restart"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
        data["finished"] = is_last
        has_worked = any(
            count for feature in data["features"] for count in feature["counters"].values()
        )
        # Workers of a pool or data loader train nothing.
        if current_process().daemon and not has_worked:
            self.get_path().unlink(missing_ok=True)
        else:
            worker_reports.save_json(self.get_path(), data)

    def write_safely(self, *, is_last: bool) -> None:
        """Write the report of a process that may train. Never raise."""
        try:
            if may_train():
                self.write(is_last=is_last)
        # An error at exit would change the script's exit status.
        except Exception as error:  # noqa: BLE001
            logger.debug("the report was not written: %r", error)

    def write_at_exit(self) -> None:
        """Write the last report of a process that may train. Never raise."""
        self.write_safely(is_last=True)

    def write_after_fork(self) -> None:
        """Write the first report of a forked child that may train. Never raise."""
        self.write_safely(is_last=False)

    def keep_counts(self) -> None:
        """Keep the counts before a fork, so that the child does not report them again."""
        try:
            self._child_base = self._make_report().to_json()
        # An error would break the user's fork. Without the counts, the child reports them twice.
        except Exception as error:  # noqa: BLE001
            logger.debug("no report before a fork: %r", error)

    def subtract_parent(self) -> None:
        """Subtract the parent's counts in a forked child."""
        self._base = self._child_base


_reporter: _Reporter | None = None


def start_reporting(make_report: MakeReport) -> None:
    """Report this process to ``ovpatch run``, now and at exit, if that started it."""
    global _reporter
    directory = os.environ.get(worker_reports.REPORT_DIR)
    if not directory or get_process_role() == "launcher":
        return
    if _reporter is None:
        _reporter = _Reporter(Path(directory), make_report)
        os.register_at_fork(before=_reporter.keep_counts, after_in_child=_reporter.subtract_parent)
        write_at_exit(_reporter.write_at_exit)
        util.register_after_fork(_reporter, _Reporter.write_after_fork)
    if may_train():
        _reporter.write()


def may_train() -> bool:
    """Return whether this process may train: it is a worker, or the child of a fork server."""
    return get_process_role() == "worker" or parent_process() is not None


def write_report_now(*, is_last: bool) -> None:
    """Write the report of a process that may be killed, or the last report before an exit without :mod:`atexit`."""
    if _reporter is not None:
        _reporter.write_safely(is_last=is_last)


# The writers of results, which run once: by atexit or by a finalizer of multiprocessing.
_exit_actions: list[Callable[[], None]] = []


def write_at_exit(write: Callable[[], None]) -> None:
    """Call a writer of results when this process, or a forked child of multiprocessing, exits.

    An observed child has its own results. The exit functions of ranks, by ``register_at_exit`` of ``overlap``, do not
    run in forks, which are no ranks. Children of :mod:`multiprocessing` drop inherited finalizers and, until Python
    3.12, skip :mod:`atexit`. So each child registers its own finalizer.
    """
    if not _exit_actions:
        atexit.register(_run_exit_actions)
        util.register_after_fork(
            _run_exit_actions, lambda run: util.Finalize(None, run, exitpriority=100)
        )
        if parent_process() is not None:
            util.Finalize(None, _run_exit_actions, exitpriority=100)
    _exit_actions.append(write)


def _run_exit_actions() -> None:
    while _exit_actions:
        _exit_actions.pop()()
    _mark_interrupt()


def _mark_interrupt() -> None:
    """Have SIGINT end Python if Ctrl-C ended the program, as it does without a report.

    Python ends so if the last code that exec() or an import of source compiled left a KeyboardInterrupt. The writers
    of results run such code, for example to create a dataclass, and the process would exit with 1.
    """
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not is_interactive:
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def subtract_report(data: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report's JSON without the counts of an earlier report."""
    counted = {feature["name"]: feature["counters"] for feature in base.get("features", ())}
    for feature in data["features"]:
        before = counted.get(feature["name"], {})
        feature["counters"] = {
            name: count - before.get(name, 0) for name, count in feature["counters"].items()
        }
    called = {(patch["feature"], patch["target"]): patch for patch in base.get("patches", ())}
    for patch in data["patches"]:
        earlier = called.get((patch["feature"], patch["target"]), {})
        for count in ("calls", "traces"):
            patch[count] -= earlier.get(count, 0)
    return data


def write_failure(message: str) -> None:
    """Record that this process could not be patched, so that ``ovpatch run`` fails."""
    directory = os.environ.get(worker_reports.REPORT_DIR)
    if directory and Path(directory).is_dir() and get_process_role() == "worker":
        path = Path(directory) / f"failed-{os.getpid()}-{time.time_ns()}.json"
        worker_reports.save_json(
            path, {"pid": os.getpid(), "rank": os.environ.get("RANK"), "error": message}
        )

"""``ovpatch run``: patch every worker of an unmodified command, and tell afterwards what came of it.

The command runs as a child with ``OVPATCH_AUTO=1``; each Python process that imports torch then applies ovpatch by
itself (:mod:`ovpatch.autoload`) and leaves a report in a directory, which is merged when the command has ended.
Nothing is written on stdout, which belongs to the command.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ovpatch.jobs import launching
from ovpatch.reports import merging, workers
from ovpatch.reports.reporting import table_of
from ovpatch.session.plan import FeatureError
from ovpatch.settings import settings

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch run``."""
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="write the report, merged over the workers, as JSON"
    )
    parser.add_argument("--features", metavar="LIST", help="what OVPATCH would say: a,b or all or +c; --features=-c")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command, for example: torchrun train.py")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code, or 1 if it succeeded without being patched."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        _say("no command given. Write: ovpatch run -- torchrun train.py")
        return USAGE
    try:
        environment = environment_of(arguments.features)
        check(environment, arguments.report)
    except settings.SettingsError as error:
        _say(str(error))
        return USAGE
    except FeatureError as error:
        _say(str(error))
        return PROBLEM
    with tempfile.TemporaryDirectory(prefix="ovpatch-", ignore_cleanup_errors=True) as directory:
        environment[workers.REPORT_DIR] = directory
        code = _run(command, environment, Path(directory))
        return _conclude(code, Path(directory), arguments.report)


def environment_of(features: str | None) -> dict[str, str]:
    """Return the environment of the command.

    Args:
        features: What ``OVPATCH`` shall say; None for what it says already.

    Raises:
        ovpatch.SettingsError: Both say something, and not the same.
    """
    environment = dict(os.environ)
    already = environment.get("OVPATCH", "").strip()
    if features is not None and already and already != features:
        raise settings.SettingsError(f"--features {features} and OVPATCH={already} disagree. Give one of them.")
    if features is not None:
        environment["OVPATCH"] = features
    environment["OVPATCH_AUTO"] = "1"
    return environment


def check(environment: Mapping[str, str], report: Path | None, option: str = "--report") -> None:
    """Find every mistake that can be found before anything runs.

    Args:
        environment: Of the command.
        report: File that will be written in the end, if any.
        option: What names that file on the command line.

    Raises:
        ovpatch.SettingsError: A setting cannot be understood, or the report could not be written.
        ovpatch.FeatureError: A feature asked for by name cannot even be loaded.
    """
    from ovpatch.session.session import Session

    if report is not None:
        _check_writable(report, option)
    Session().plan(environ=environment, ask_machine=False).check()
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        _say("TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: only processes that call ovpatch.apply() will be patched")


def _check_writable(report: Path, option: str) -> None:
    folder = report.absolute().parent
    if not folder.is_dir():
        raise settings.SettingsError(f"{option} {report}: its directory does not exist. Create it first.")
    if report.is_dir():
        raise settings.SettingsError(f"{option} {report} is a directory. Name a file in it.")
    if not os.access(folder, os.W_OK):
        raise settings.SettingsError(f"{option} {report}: its directory is not writable. Name another file.")


def _run(command: list[str], environment: Mapping[str, str], directory: Path) -> int:
    try:
        with launching.started(command, environment) as job:
            return job.wait(_once(lambda: _stop_unpatched(job, directory)))
    except launching.NotStartedError as error:
        _say(str(error))
        return error.code


def _once(act: Callable[[], bool]) -> Callable[[], None]:
    """Return a function that calls ``act`` until that returns True."""
    pending = [act]

    def tick() -> None:
        if pending and pending[0]():
            pending.clear()

    return tick


def _stop_unpatched(job: launching.Job, directory: Path) -> bool:
    """End the command early once a worker has reported that it is not patched."""
    if not any(directory.glob("failed-*.json")):
        return False
    _say("a worker could not be patched (its message is above); stopping the command")
    job.terminate()
    return True


def _conclude(code: int, directory: Path, file: Path | None) -> int:
    """Merge what the workers reported, write and show it, and return the exit code."""
    failures, reports = workers.read_all(directory, "failed"), workers.read_all(directory, "worker")
    merged = merging.merge(reports) if reports else None
    if merged is not None:
        _say(f"{len(reports)} process(es) reported\n{table_of(merged, colour=sys.stderr.isatty())}")
    if file is not None:
        workers.write_json(file, merged if merged is not None else {"features": [], "patches": [], "processes": []})
    for failure in failures:
        _say(f"process {failure['pid']} (rank {failure['rank']}) was not patched: {failure['error']}")
    if merged is None and not failures and code not in (launching.NOT_FOUND, launching.NOT_EXECUTABLE):
        _say(_NOBODY)
    unpatched = bool(failures) or merged is None
    return PROBLEM if failures or (code == OK and unpatched) else code


_NOBODY: Final = (
    "no process of the command reported that it is patched. Possible causes: no process imported torch; "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0; the command uses another Python in which ovpatch is not installed; or a launcher "
    "dropped the variables OVPATCH_AUTO and OVPATCH_REPORT_DIR. Run `python -m ovpatch doctor` "
    "under that Python, or call ovpatch.apply() in the script."
)


def _say(message: Any) -> None:
    print(f"ovpatch run: {message}", file=sys.stderr, flush=True)

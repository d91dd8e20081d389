"""``ovpatch run``: patches every worker of an unmodified command, and reports the result.

The command runs as a child with ``OVPATCH_AUTO=1``. Each Python process that imports torch applies ovpatch
(:mod:`ovpatch.autoload`) and writes a report; the reports are merged after the end of the command. stdout belongs to
the command.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ovpatch.cli import command_line
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import launch
from ovpatch.session import workers
from ovpatch.session.report import IDLE, did_work, format_report, summarise_report, wants_colour

_say: Final = partial(command_line.say, "run")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch run``."""
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="write the report, merged over the workers, as JSON"
    )
    parser.add_argument("--full", action="store_true", help="print all of the report at the end, not six lines")
    command_line.add_features(parser)
    command_line.add_command(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code, or 1 if it succeeded unpatched."""
    command = command_line.get_command(arguments.command)
    environment = command_line.make_environment(arguments.features)
    command_line.check_file(arguments.report, "--report")
    command_line.check_settings(environment)
    command_line.check_command(command)
    command_line.warn_of_near_misses(environment, "run")
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        _say("TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: only processes that call ovpatch.apply() will be patched")
    with tempfile.TemporaryDirectory(prefix="ovpatch-", ignore_cleanup_errors=True) as directory:
        environment[workers.REPORT_DIR] = directory
        code = _run(command, environment, Path(directory))
        return _conclude(code, Path(directory), arguments.report, full=arguments.full)


def _run(command: list[str], environment: Mapping[str, str], directory: Path) -> int:
    """Run the command; terminate it if a worker reports that it is not patched."""
    stopped = False

    def look() -> None:
        nonlocal stopped
        if not stopped and any(directory.glob("failed-*.json")):
            _say("a worker could not be patched (its message is above); stopping the command")
            job.terminate()
            stopped = True

    with launch.running_command(command, environment) as job:
        return job.wait_for_exit(look)


def _conclude(code: int, directory: Path, file: Path | None, *, full: bool) -> int:
    """Merge the reports of the workers, write and print the result, and return the exit code."""
    failures, reports = (workers.read_reports(directory, kind) for kind in ("failed", "worker"))
    merged = workers.merge_reports(reports) if reports else None
    if merged is not None:
        if full:
            plural = "es" * (len(reports) != 1)
            _say(f"{len(reports)} process{plural} reported\n{format_report(merged, colour=wants_colour(sys.stderr))}")
        else:
            print(summarise_report(merged, len(reports)), file=sys.stderr)
        if merged["unfinished"]:
            _say(_UNFINISHED.format(", ".join(merged["unfinished"])))
        if code == ExitCode.OK and not _did_anything(merged):
            _say(_NO_WORK)
    if file is not None:
        workers.save_json(file, merged or {"features": [], "patches": [], "processes": []})
    for failure in failures:
        _say(f"process {failure['pid']} (rank {failure['rank']}) was not patched: {failure['error']}")
    if merged is None and not failures and code == ExitCode.OK:  # otherwise the command's own message tells
        _say(_NO_REPORT)
    unpatched = bool(failures) or merged is None
    return ExitCode.PROBLEM if failures or (code == ExitCode.OK and unpatched) else code


def _did_anything(merged: Mapping[str, Any]) -> bool:
    """Return whether any feature did work in any process, according to the report."""
    on = [feature for feature in merged["features"] if feature["state"] == "applied"]
    words = tuple(IDLE)  # the processes may follow
    idle = [
        any(remark.startswith(words) for remark in one["remarks"]) and not did_work(one["counters"], one["work"])
        for one in on
    ]
    return not all(idle)


_UNFINISHED: Final = (
    "{} left no last report, because it was killed or called os._exit. Its work since its start is not counted"
)

_NO_WORK: Final = (
    "nothing was accelerated: the script used nothing that a feature takes over (DistributedDataParallel on several "
    "ranks, parallelize_module, experts of transformers), or it was left to stock. --full shows the reasons"
)

_NO_REPORT: Final = (
    "no process of the command reported that it is patched. Possible causes: no process imported torch; "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0; the command uses another Python in which ovpatch is not installed; or a launcher "
    "dropped the variables OVPATCH_AUTO and OVPATCH_REPORT_DIR. Run `python -m ovpatch doctor` "
    "under that Python, or call ovpatch.apply() in the script."
)

"""``ovpatch run``: patches every worker of an unmodified command, and reports the result.

The command runs as a child with ``OVPATCH_AUTO=1``. Each Python process that imports torch applies
ovpatch (:mod:`ovpatch.autoload`) and writes a report. The reports are merged after the end of the
command. stdout belongs to the command.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovpatch.cli import command_line
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import launch
from ovpatch.session import worker_reports
from ovpatch.session.report_table import format_report, has_worked, summarise_report, wants_colour
from ovpatch.settings.settings import SettingsError

if TYPE_CHECKING:
    from ovpatch.insight.node_place import Place

_say: Final = partial(command_line.say, "run")

_UNFINISHED: Final = (
    "{} left no last report, because it was killed or called os._exit. Its work since "
    "its start is not counted"
)
_NO_MEETING: Final = (
    "--nodes and --meet merge the reports of several nodes, so they need a file for it. Add --report "
    "FILE, or leave them out."
)
# Seconds; the nodes of a job end together.
_MEETING_TIMEOUT_S: Final = 30.0
_NO_REPORT: Final = (
    "no process of the command reported that it is patched. Possible causes: no process imported "
    "torch; TORCH_DEVICE_BACKEND_AUTOLOAD=0; the command uses another Python in which ovpatch is "
    "not installed; or a launcher dropped the variables OVPATCH_AUTO and OVPATCH_REPORT_DIR. Run "
    "`python -m ovpatch doctor` under that Python, or call ovpatch.apply() in the script."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch run``."""
    add = parser.add_argument
    add(
        "--report", metavar="FILE", type=Path, help="write the merged report of the workers as JSON"
    )
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help="keep the reports of all processes there; it must be empty or new",
    )
    add("--full", action="store_true", help="print all features and counters at the end")
    command_line.add_features(parser)
    command_line.add_nodes(parser)
    command_line.add_command(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code, or 1 if it succeeded unpatched."""
    command = command_line.get_command(arguments.command)
    environment = command_line.make_environment(arguments.features)
    command_line.check_file(arguments.report, "--report")
    command_line.check_folder(arguments.out)
    command_line.check_settings(environment, arguments.features)
    command_line.check_command(command)
    command_line.warn_of_near_misses(environment, "run")
    place = _find_place(arguments, command)
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        _say(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: only processes that call ovpatch.apply() will "
            "be patched"
        )
    with command_line.open_folder(arguments.out) as directory:
        environment[worker_reports.REPORT_DIR] = str(directory.absolute())
        code = _run(command, environment, directory)
        if place is not None and _is_delivered(place, directory):
            return code
        return _conclude(code, directory, arguments, command)


def _find_place(arguments: argparse.Namespace, command: list[str]) -> Place | None:
    """Return the place of this node if a job of several nodes writes a report."""
    if arguments.report is None:
        if arguments.nodes is not None or arguments.meet is not None:
            raise SettingsError(_NO_MEETING)
        return None
    from ovpatch.insight import node_place

    try:
        return node_place.find_place(command, arguments.nodes, arguments.meet)
    except SettingsError as error:
        # Such a job trains all the same.
        if arguments.nodes is not None or arguments.meet is not None:
            raise
        _say(f"each node writes its own report: {error}")
        return None


def _is_delivered(place: Place, directory: Path) -> bool:
    """Meet the other nodes after the command; return whether node 0 has got the reports of this one.

    Nodes meet at the end, so no node waits for another one before it trains. On node 0 their reports
    are added to the directory.
    """
    from ovpatch.insight import nodes

    try:
        node = nodes.meet(place, "run", {}, _MEETING_TIMEOUT_S, _say, needs_all=False)
        if isinstance(node, nodes.Leader):
            try:
                node.collect(directory)
            finally:
                node.end("", ExitCode.OK)
            return False
        node.deliver(directory)
    except nodes.NodeError as error:
        _say(f"the report has not all nodes: {error}")
        return False
    own = nodes.name_node(node.index, node.names[node.index])
    _say(f"{own} reported; the report of all nodes is on {nodes.name_node(0, node.names[0])}")
    return True


def _run(command: list[str], environment: Mapping[str, str], directory: Path) -> int:
    """Run the command; terminate it if a worker reports that it is not patched."""
    has_stopped = False

    def check_workers() -> None:
        nonlocal has_stopped
        if not has_stopped and any(directory.glob("failed-*.json")):
            _say("a worker could not be patched (its message is above); stopping the command")
            job.terminate()
            has_stopped = True

    with launch.running_command(command, environment) as job:
        return job.wait_for_exit(check_workers)


def _conclude(code: int, directory: Path, arguments: argparse.Namespace, command: list[str]) -> int:
    """Merge the reports of the workers, write and print the result, and return the exit code."""
    failures = worker_reports.read_reports(directory, "failed")
    reports = worker_reports.read_reports(directory, "worker")
    merged = worker_reports.merge_reports(reports) if reports else None
    # A command that fails early has had no chance to gain anything.
    if merged is not None and (code == ExitCode.OK or arguments.full or has_worked(merged)):
        print_report(merged, shlex.join(command), full=arguments.full)
    if arguments.report is not None:
        empty: dict[str, Any] = {"features": [], "patches": [], "processes": []}
        worker_reports.save_json(arguments.report, merged or empty)
        _say(f"the report is in {arguments.report}")
    for failure in failures:
        name = f"process {failure['pid']} (rank {failure['rank']})"
        _say(f"{name} was not patched: {failure['error']}")
    # If the command failed, its own message gives the reason.
    if merged is None and not failures and code == ExitCode.OK:
        _say(_NO_REPORT)
    is_unpatched = bool(failures) or merged is None
    return ExitCode.PROBLEM if failures or (code == ExitCode.OK and is_unpatched) else code


def print_report(merged: Mapping[str, Any], command: str, *, full: bool) -> None:
    """Print a merged report on stderr: a table if ``full``, three lines otherwise."""
    if full:
        count = len(merged["processes"])
        table = format_report(merged, colour=wants_colour(sys.stderr))
        _say(f"{count} process{'es' * (count != 1)} reported\n{table}")
    print(summarise_report(merged, command), file=sys.stderr)
    if merged["unfinished"]:
        _say(_UNFINISHED.format(", ".join(merged["unfinished"])))

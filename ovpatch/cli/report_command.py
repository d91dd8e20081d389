"""``ovpatch report``: shows files of ``ovpatch run --report``, merged over the nodes of a job."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ovpatch.cli import command_line
from ovpatch.exit_codes import ExitCode
from ovpatch.session import worker_reports
from ovpatch.session.report_table import format_report, summarise_report, wants_colour
from ovpatch.settings.settings import SettingsError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch report``."""
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="files of `ovpatch run --report`")
    add("--full", action="store_true", help="print all features and counters")
    add("--json", type=Path, metavar="FILE", help="write the merged report as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Merge the files and print the result."""
    command_line.check_file(arguments.json, "--json")
    merged = worker_reports.join_reports({str(path): _read(path) for path in arguments.files})
    if arguments.full:
        print(format_report(merged, colour=wants_colour(sys.stdout)))
    print(summarise_report(merged))
    if merged["unfinished"]:
        print(f"  unfinished {', '.join(merged['unfinished'])}")
    if arguments.json is not None:
        worker_reports.save_json(arguments.json, merged)
        command_line.say("report", f"the merged report is in {arguments.json}")
    return ExitCode.OK


def _read(path: Path) -> dict[str, Any]:
    """Return the report in a file.

    Raises:
        SettingsError: The file has no report.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no JSON"
        raise SettingsError(
            f"{path} cannot be read as a report ({why}). Name a file of `ovpatch run --report FILE`."
        ) from error
    if not isinstance(data, dict) or not {"features", "patches"} <= data.keys():
        raise SettingsError(f"{path} is no report. Name a file of `ovpatch run --report FILE`.")
    if not data.get("processes"):
        raise SettingsError(
            f"{path} has no process: nothing was patched there. Leave the file out."
        )
    return data

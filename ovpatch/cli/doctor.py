"""``ovpatch list`` and ``ovpatch doctor``: installed features, settings and problems on this machine.

Both apply ovpatch in their own process, since a dry run would not find what patching finds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Final

from ovpatch.api import session
from ovpatch.exit_codes import ExitCode
from ovpatch.session import plugins
from ovpatch.session.feature_plan import FeatureRecord
from ovpatch.session.report_table import render_table, wants_colour
from ovpatch.session.session_report import TROUBLE, Report, explain_old_torch, to_plain_data
from ovpatch.settings import settings
from ovpatch.settings.options import list_variables

_LIBRARIES: Final = ("wrapt", "pluggy", "packaging", "rich", "triton", "accelerate", "transformers", "lightning")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def configure_list(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch list``."""
    parser.add_argument("feature", nargs="?", metavar="FEATURE", help="show this feature's options")
    configure(parser)


def main_list(arguments: argparse.Namespace) -> int:
    """Print the features with default, state and summary, or one feature with its options."""
    records, report = _try()
    wanted = None if arguments.feature is None else settings.normalise_name(arguments.feature)
    if wanted is not None and wanted not in records:
        raise settings.SettingsError(settings.describe_unknown_feature("the command line", wanted, records))
    rows = [
        {
            "name": feature.name,
            "default": feature.default,
            "state": feature.state,
            "reason": feature.reason,
            "options": {
                name: {"value": to_plain_data(o.value), "source": o.source} for name, o in feature.options.items()
            },
            "summary": feature.summary,
            "distribution": feature.distribution,
        }
        for feature in report.features
        if wanted in (None, feature.name)
    ]
    if arguments.json:
        print(json.dumps({"version": report.version, "features": rows}, indent=2))
    else:
        print("\n".join(_line(row, rows) for row in rows) if wanted is None else _details(records[wanted], rows[0]))
    return ExitCode.PROBLEM if any(feature.state in TROUBLE for feature in report.features) else ExitCode.OK


_HEADS: Final = ("feature", "default", "state", "summary")


def _line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a feature's line in the list of all, as wide as the terminal at most."""
    widths = [max(len(_cells(one)[column]) for one in rows) for column in range(3)]
    cells = [cell.ljust(width) for cell, width in zip(_cells(row), widths, strict=False)]
    line = "  ".join([*cells, _cells(row)[3].partition("\n")[0]])
    columns = shutil.get_terminal_size((120, 24)).columns
    return line if len(line) <= columns else line[: columns - 3] + "..."


def _details(record: FeatureRecord, row: Mapping[str, Any]) -> str:
    colour = wants_colour(sys.stdout)
    head = render_table("", _HEADS, [_cells(row)], colour=colour)
    if record.feature is None:
        return head
    rows = [
        (
            option.name,
            str(row["options"].get(option.name, {}).get("value", to_plain_data(option.default))),
            settings.make_variable_name(record.feature.name, option.name),
            option.help,
        )
        for option in record.feature.options
    ]
    return f"{head}\n\n{render_table('', ('option', 'value', 'variable', 'meaning'), rows, colour=colour)}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    default = {True: "on", False: "off", None: "?"}[row["default"]]
    summary = row["summary"] or f"(not imported) {row['distribution']}"
    return row["name"], default, row["state"], "\n".join(filter(None, (summary, row["reason"])))


def main(arguments: argparse.Namespace) -> int:
    """Print versions, plugins, settings, the state of every feature, and the problems."""
    records, report = _try()
    data = collect_findings(records, report)
    print(json.dumps(data, indent=2) if arguments.json else _text(data, report))
    return ExitCode.PROBLEM if data["problems"] else ExitCode.OK


def _try() -> tuple[dict[str, FeatureRecord], Report]:
    """Apply in this process; features that cannot run are reported, not raised."""
    import torch  # noqa: F401  # with OVPATCH_AUTO=1 this applies in the same session

    records = session.plan().records
    return records, session.apply((), None, None, tolerant=True)


def collect_findings(records: Mapping[str, FeatureRecord], report: Report) -> dict[str, Any]:
    """Return all findings as plain data: the records before anything was patched, and the report after applying."""
    autoload = _autoload()
    return {
        "versions": _versions(report),
        "entry_points": [{key: getattr(record.found, key) for key in _PLUGIN} for record in records.values()],
        "autoload": {"possible": not autoload, "reason": autoload},
        "measurements": _measurements(),
        "settings": _settings(records),
        "report": report.to_json(),
        "problems": _problems(records, report, autoload),
    }


def _versions(report: Report) -> dict[str, str]:
    found = {"ovpatch": report.version, "python": report.python, "platform": platform.platform()}
    for name in ("torch", *_LIBRARIES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = str(getattr(sys.modules.get("torch"), "__version__", found["torch"]))
    return found


def _autoload() -> str:
    """Return why ``OVPATCH_AUTO`` and ``ovpatch run`` cannot work here, or an empty string."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is set to something other than 1; unset it"
    if not hasattr(sys.modules["torch"], "_import_device_backends"):
        return "this torch does not load entry points of the group torch.backends; call ovpatch.apply() instead"
    if all(not one.value.startswith("ovpatch.autoload") for one in entry_points(group="torch.backends")):
        return "the entry point torch.backends is not installed; install the package instead of using PYTHONPATH"
    return ""


def _measurements() -> dict[str, Any]:
    """Return the directory of measurements, and whether it is writable."""
    path = settings.cache_dir()
    if path is None:
        return {"path": None, "writable": False}
    nearest = next((parent for parent in (path, *path.parents) if parent.exists()), path)
    return {"path": str(path), "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)}


def _kept(measurements: Mapping[str, Any]) -> str:
    if measurements["path"] is None:
        return "measurements are not kept: this user has no home (OVPATCH_CACHE_DIR names another place)"
    where = f"in {measurements['path']} (OVPATCH_CACHE_DIR)"
    return f"measurements are kept {where}" if measurements["writable"] else f"measurements cannot be kept {where}"


def _settings(records: Mapping[str, FeatureRecord]) -> list[dict[str, str]]:
    """Return every variable that is set, with its meaning."""
    meanings = {variable.name: variable.help for variable in settings.VARIABLES}
    for name, record in records.items():
        meanings[settings.make_variable_name(name)] = f"the switch of feature {name!r}"
        meanings |= list_variables(record.feature) if record.feature is not None else {}
    ours = {name: value for name, value in os.environ.items() if name == "OVPATCH" or name.startswith("OVPATCH_")}
    unread = "an option of a feature that is not imported"
    return [
        {"variable": name, "value": value, "source": "environment", "meaning": meanings.get(name, unread)}
        for name, value in sorted(ours.items())
    ]


def _problems(records: Mapping[str, FeatureRecord], report: Report, autoload: str) -> list[str]:
    problems = [f"{one.name} is {one.state}: {one.reason}" for one in report.features if one.state in TROUBLE]
    problems += [
        f"{one.name} was asked for by name ({records[one.name].request.reason}) and is skipped: {one.reason}"
        for one in report.features
        if one.state == "skipped" and records[one.name].request.by_name
    ]
    problems += [f"{name}: {record.found.remark}" for name, record in records.items() if record.found.remark]
    if not records:
        problems.append(f"no entry points of the group {plugins.GROUP!r}: install the package with pip")
    problems += settings.find_near_misses(os.environ)
    problems += filter(None, [explain_old_torch()])
    if autoload and settings.read_environment().auto:
        problems.append(f"OVPATCH_AUTO is on and cannot work: {autoload}")
    return problems


_PLUGIN: Final = ("name", "distribution", "version", "target", "path")
_SETTING: Final = ("variable", "value", "meaning")


def _text(data: Mapping[str, Any], report: Report) -> str:
    colour = wants_colour(sys.stdout)
    auto = data["autoload"]["reason"] or "possible"
    options = [
        (f"{feature.name}.{name}", str(to_plain_data(option.value)), option.source)
        for feature in report.features
        for name, option in feature.options.items()
    ]
    parts = [
        render_table("versions", ("what", "version"), list(data["versions"].items()), colour=colour),
        render_table("plugins", ("feature", *_PLUGIN[1:]), _rows(data["entry_points"], _PLUGIN), colour=colour),
        f"ovpatch run and OVPATCH_AUTO=1: {auto}",
        _kept(data["measurements"]),
        render_table("settings", _SETTING, _rows(data["settings"], _SETTING), colour=colour),
        render_table("options", ("option", "value", "source"), options, colour=colour),
        report.table(colour=colour),
        "\n".join(f"PROBLEM: {problem}" for problem in data["problems"]) or "No problems found.",
    ]
    return "\n\n".join(parts)


def _rows(found: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(str(one[key]) for key in keys) for one in found]

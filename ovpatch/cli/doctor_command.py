"""``ovpatch list`` and ``ovpatch doctor``: installed features, settings and problems on this machine.

Both apply ovpatch in their own process, because some problems show only when functions are patched.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Final

from ovpatch.api import session
from ovpatch.exit_codes import ExitCode
from ovpatch.session import plugins
from ovpatch.session.feature_plan import FeatureRecord
from ovpatch.session.gains import format_bytes
from ovpatch.session.report_table import render_table, wants_colour
from ovpatch.session.session_report import (
    IDLE,
    TROUBLE,
    FeatureReport,
    Report,
    explain_old_torch,
    to_plain_data,
)
from ovpatch.settings import settings
from ovpatch.settings.feature_options import list_variables

_LIBRARIES: Final = (
    "wrapt",
    "pluggy",
    "packaging",
    "rich",
    "triton",
    "accelerate",
    "transformers",
    "lightning",
    "megatron-core",
)
_LIST_HEADS: Final = ("feature", "default", "state", "why", "summary")
_PLUGIN_KEYS: Final = ("name", "distribution", "version", "target", "path")
_SETTING_KEYS: Final = ("variable", "value", "meaning")
_LABEL_WIDTH: Final = 13
_MISSING: Final = "not installed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--full", action="store_true", help="print plugins, all options and all counters, too"
    )


def configure_list(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch list``."""
    parser.add_argument("feature", nargs="?", metavar="FEATURE", help="show this feature's options")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def main_list(arguments: argparse.Namespace) -> int:
    """Print the features with default, state and summary, or one feature with its options."""
    records, report = _apply()
    wanted = None if arguments.feature is None else settings.normalise_name(arguments.feature)
    if wanted is not None and wanted not in records:
        raise settings.SettingsError(
            settings.describe_unknown_feature("the command line", wanted, records)
        )
    rows = [
        {
            "name": feature.name,
            "default": feature.default,
            "state": feature.state,
            "reason": feature.reason,
            "options": {
                name: {"value": to_plain_data(o.value), "source": o.source}
                for name, o in feature.options.items()
            },
            "summary": feature.summary,
            "distribution": feature.distribution,
        }
        for feature in report.features
        if wanted in (None, feature.name)
    ]
    if arguments.json:
        print(json.dumps({"version": report.version, "features": rows}, indent=2))
    elif wanted is None:
        cells = [_list_cells(row) for row in rows]
        print(render_table("", _LIST_HEADS, cells, colour=wants_colour(sys.stdout)))
    else:
        print(_render_feature(records[wanted], rows[0]))
    return (
        ExitCode.PROBLEM
        if any(feature.state in TROUBLE for feature in report.features)
        else ExitCode.OK
    )


def _render_feature(record: FeatureRecord, row: Mapping[str, Any]) -> str:
    """Return the tables of one feature and its options."""
    colour = wants_colour(sys.stdout)
    head = render_table("", _LIST_HEADS, [_list_cells(row)], colour=colour)
    if record.feature is None:
        return head
    rows = []
    for option in record.feature.options:
        default = to_plain_data(option.default)
        value = row["options"].get(option.name, {}).get("value", default)
        variable = settings.make_variable_name(record.feature.name, option.name)
        rows.append((option.name, str(value), variable, option.meaning))
    heads = ("option", "value", "variable", "meaning")
    return f"{head}\n\n{render_table('', heads, rows, colour=colour)}"


def _list_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    default = {True: "on", False: "off", None: "?"}[row["default"]]
    summary = row["summary"] or f"(not imported) {row['distribution']}"
    return row["name"], default, row["state"], row["reason"], summary


def main(arguments: argparse.Namespace) -> int:
    """Print versions, plugins, settings, the state of every feature, and the problems."""
    records, report = _apply()
    data = collect_findings(records, report)
    if arguments.json:
        print(json.dumps(data, indent=2))
    else:
        print("\n\n".join(_list_parts(data, report, full=arguments.full)))
    return ExitCode.PROBLEM if data["problems"] else ExitCode.OK


def _apply() -> tuple[dict[str, FeatureRecord], Report]:
    """Apply in this process. Features that cannot run are in the report and raise no error."""
    # With OVPATCH_AUTO=1 this import applies in the same session.
    import torch  # noqa: F401

    records = session.plan().records
    return records, session.apply((), None, None, tolerant=True)


def collect_findings(records: Mapping[str, FeatureRecord], report: Report) -> dict[str, Any]:
    """Return all findings as plain data.

    Args:
        records: The features before anything was patched.
        report: The report after applying.
    """
    autoload = _explain_no_autoload()
    return {
        "versions": _find_versions(report),
        "entry_points": [
            {key: getattr(record.found, key) for key in _PLUGIN_KEYS} for record in records.values()
        ],
        "machine": find_machine(),
        "autoload": {"possible": not autoload, "reason": autoload},
        "measurements": _find_measurements(),
        "settings": _list_settings(records),
        "report": report.to_json(),
        "problems": _list_problems(records, report, autoload),
    }


def _find_versions(report: Report) -> dict[str, str]:
    found = {"ovpatch": report.version, "python": report.python, "platform": platform.platform()}
    for name in ("torch", *_LIBRARIES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = _MISSING
    found["torch"] = str(getattr(sys.modules.get("torch"), "__version__", found["torch"]))
    return found


def _explain_no_autoload() -> str:
    """Return the reason why ``OVPATCH_AUTO`` and ``ovpatch run`` cannot work here, or ""."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is set to something other than 1; unset it"
    if not hasattr(sys.modules["torch"], "_import_device_backends"):
        return "this torch does not load entry points of the group torch.backends; call ovpatch.apply() instead"
    if all(
        not point.value.startswith("ovpatch.autoload")
        for point in entry_points(group="torch.backends")
    ):
        return "the entry point torch.backends is not installed; install the package instead of using PYTHONPATH"
    return ""


def _find_measurements() -> dict[str, Any]:
    """Return the directory of measurements, and whether it is writable."""
    path = settings.cache_dir()
    if path is None:
        return {"path": None, "writable": False}
    nearest = next((parent for parent in (path, *path.parents) if parent.exists()), path)
    return {
        "path": str(path),
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    }


def find_machine() -> dict[str, Any]:
    """Return the hardware and the libraries that torch was built with, as plain data."""
    import torch

    cuda, distributed = torch.cuda, torch.distributed
    count = cuda.device_count() if cuda.is_available() else 0
    gpus = [cuda.get_device_properties(number) for number in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    checks = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    return {
        "gpus": [{"name": gpu.name, "bytes": gpu.total_memory} for gpu in gpus],
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(map(str, cuda.nccl.version())) if count and has_nccl else None,
        "peer_access": [pair for pair in pairs if cuda.can_device_access_peer(*pair)],
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "backends": [
            name
            for name, check in checks.items()
            if distributed.is_available() and getattr(distributed, check)()
        ],
    }


def _list_settings(records: Mapping[str, FeatureRecord]) -> list[dict[str, str]]:
    """Return every variable that is set, with its meaning."""
    meanings = {variable.name: variable.help for variable in settings.VARIABLES}
    for name, record in records.items():
        meanings[settings.make_variable_name(name)] = f"the switch of feature {name!r}"
        meanings |= list_variables(record.feature) if record.feature is not None else {}
    ours = {
        name: value
        for name, value in os.environ.items()
        if name == "OVPATCH" or name.startswith("OVPATCH_")
    }
    unread = "an option of a feature that is not imported"
    return [
        {
            "variable": name,
            "value": value,
            "source": "environment",
            "meaning": meanings.get(name, unread),
        }
        for name, value in sorted(ours.items())
    ]


def _list_problems(
    records: Mapping[str, FeatureRecord], report: Report, autoload: str
) -> list[str]:
    problems = [
        f"{feature.name} is {feature.state}: {feature.reason}"
        for feature in report.features
        if feature.state in TROUBLE
    ]
    problems += [
        f"{feature.name} was requested by name ({records[feature.name].request.reason}) "
        f"and is skipped: {feature.reason}"
        for feature in report.features
        if feature.state == "skipped" and records[feature.name].request.by_name
    ]
    problems += [
        f"{name}: {record.found.remark}" for name, record in records.items() if record.found.remark
    ]
    if not records:
        problems.append(
            f"no entry points of the group {plugins.GROUP!r}: install the package with pip"
        )
    problems += settings.find_near_misses(os.environ)
    problems += filter(None, [explain_old_torch()])
    if autoload and settings.read_environment().auto:
        problems.append(f"OVPATCH_AUTO is on and cannot work: {autoload}")
    return problems


def _list_parts(data: Mapping[str, Any], report: Report, *, full: bool) -> Iterator[str]:
    """Yield the parts of the report: one screen, unless it is ``full``."""
    colour = wants_colour(sys.stdout)
    problems = data["problems"]
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "no problems"
    yield f"ovpatch {data['versions']['ovpatch']}: {count} found"
    if problems:
        yield "\n".join(f"PROBLEM: {problem}" for problem in problems)
    yield "\n".join(f"{name:<{_LABEL_WIDTH}}{text}" for name, text in _list_facts(data))
    if data["settings"]:
        rows = _list_rows(data["settings"], _SETTING_KEYS)
        yield render_table("settings", _SETTING_KEYS, rows, colour=colour)
    if not full:
        states = [
            (feature.name, feature.state, _explain_state(feature)) for feature in report.features
        ]
        yield render_table("", ("feature", "state", "why"), states, colour=colour)
        return
    yield report.table(colour=colour)
    rows = _list_rows(data["entry_points"], _PLUGIN_KEYS)
    yield render_table("plugins", ("feature", *_PLUGIN_KEYS[1:]), rows, colour=colour)
    options = [
        (f"{feature.name}.{name}", str(to_plain_data(option.value)), option.source)
        for feature in report.features
        for name, option in feature.options.items()
    ]
    yield render_table("options", ("option", "value", "source"), options, colour=colour)


def _explain_state(feature: FeatureReport) -> str:
    """Return the reason for a state, and the remarks that are not about work, because doctor trains nothing."""
    remarks = [remark for remark in feature.remarks if remark not in IDLE]
    return "\n".join(filter(None, (feature.reason, *remarks)))


def _list_facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines about the machine."""
    versions, machine = data["versions"], data["machine"]
    yield "versions", f"torch {versions['torch']}, Python {versions['python']}"
    yield "platform", versions["platform"]
    found = [f"{name} {versions[name]}" for name in _LIBRARIES if versions[name] != _MISSING]
    missing = [name for name in _LIBRARIES if versions[name] == _MISSING]
    yield (
        "libraries",
        ", ".join(found) + (f"; not installed: {', '.join(missing)}" if missing else ""),
    )
    kinds = Counter(f"{gpu['name']} ({format_bytes(gpu['bytes'])})" for gpu in machine["gpus"])
    yield "GPUs", ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "none"
    if machine["gpus"]:
        pairs = len(machine["gpus"]) * (len(machine["gpus"]) - 1)
        yield "CUDA", f"{machine['cuda']}, NCCL {machine['nccl'] or 'none'}"
        yield "peer access", f"{len(machine['peer_access'])} of {pairs} pairs of GPUs"
    yield "CPUs", f"{machine['cpus']}, {format_bytes(machine['memory_bytes'])} of memory"
    yield "backends", ", ".join(machine["backends"]) or "none: this torch has no torch.distributed"
    autoload = data["autoload"]["reason"]
    yield (
        "ovpatch run",
        f"cannot work: {autoload}" if autoload else "works (as does OVPATCH_AUTO=1)",
    )
    yield "cache", _describe_cache(data["measurements"])


def _describe_cache(measurements: Mapping[str, Any]) -> str:
    if measurements["path"] is None:
        return "measurements are not kept: this user has no home. Set OVPATCH_CACHE_DIR"
    where = f"in {measurements['path']} (OVPATCH_CACHE_DIR)"
    verb = "are" if measurements["writable"] else "cannot be"
    return f"measurements {verb} kept {where}"


def _list_rows(found: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(str(row[key]) for key in keys) for row in found]

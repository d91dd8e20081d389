"""The parts of ``docs/`` that are generated.

    python tools/docs_table.py docs/*.md docs/features/*.md

A generated part is between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. The names are:

- ``variables``: the table of the environment variables that are no options
- ``options:FEATURE``, ``counters:FEATURE``: the tables of a feature's options and counters
- ``fields:Feature``, ``fields:Option``: the table of the attributes in a docstring
- ``command:NAME``: the table of the options of a subcommand
- ``exit-codes``, ``pages``, ``features``: a table of these
- ``records``: the table of the design records
- ``versions``: the table of the file ``versions.json`` in the folder of the page
- the path of a file, relative to the page: the file as a code block
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ovpatch.cli.main import COMMANDS
from ovpatch.exit_codes import ExitCode
from ovpatch.hookspecs import Feature, Option
from ovpatch.session.plugins import Plugins, find_plugins
from ovpatch.settings.settings import VARIABLES, make_variable_name

_PART: Final = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
SITE: Final = Path(__file__).resolve().parent.parent / "mkdocs.yml"
_HEADING: Final = ("Variable", "Values", "Default", "Meaning")
_COUNTER_UNITS: Final = ("bytes", "milliseconds")
_VALUES: Final = {bool: "`0` `1`", int: "a whole number", float: "a number"}


def make_variables_table(features: Iterable[Feature] | None = None) -> str:
    """Return the Markdown table of the variables that are no options, by default with the features that ovpatch ships.

    Options are on the page of their feature, to which the row of the feature has a link.
    """
    rows = [(f"`{v.name}`", v.values, v.default, v.help) for v in VARIABLES]
    rows += [
        (
            f"`{make_variable_name(feature.name)}`",
            "`0` `1`",
            "`1`" if feature.default else "`0`",
            f"{feature.summary} [Its options](features/{feature.name}-reference.md#options).",
        )
        for feature in (_shipped() if features is None else features)
    ]
    return _table([_HEADING, ("---",) * 4, *rows])


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def _shipped() -> list[Feature]:
    plugins = Plugins()
    return [plugins.load_feature(found) for found in find_plugins().values() if found.first_party]


def _option_row(feature: str, option: Option) -> tuple[str, str, str, str]:
    values = " ".join(f"`{choice}`" for choice in option.choices) or option.values
    values = values or _VALUES.get(type(option.default), "a string")
    default = (
        {True: "`1`", False: "`0`"}.get(option.default)
        if isinstance(option.default, bool)
        else None
    )
    shown = default or ("unset" if option.default in (None, "") else f"`{option.default}`")
    also = [make_variable_name(feature, alias) for alias in option.aliases]
    shown += _unless_named(option)
    return f"`{make_variable_name(feature, option.name)}`", values, shown, _explain(option, also)


def make_options_table(feature: Feature) -> str:
    """Return the Markdown table of a feature's options."""
    rows = [_option_row(feature.name, option) for option in feature.options]
    return _table([_HEADING, ("---",) * 4, *rows])


def _explain(option: Option, aliases: Iterable[str]) -> str:
    return option.meaning + "".join(f" Also `{alias}`." for alias in aliases)


def _unless_named(option: Option) -> str:
    return (
        ""
        if option.default_unless_named is None
        else f"; `{option.default_unless_named}` unless it is named"
    )


def make_command_table(name: str) -> str:
    """Return the Markdown table of the options of a subcommand, from its ``--help``."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(add_help=False)
    getattr(importlib.import_module(f"ovpatch.cli.{command.module}"), command.configure)(parser)
    rows = []
    for action in (action for action in parser._actions if action.option_strings):
        value = action.metavar or "|".join(action.choices or ())
        names = (
            f"`{option} {value}`" if value else f"`{option}`" for option in action.option_strings
        )
        rows.append((" ".join(names), (action.help or "").replace("%%", "%")))
    return _table([("Option", "Meaning"), ("---",) * 2, *rows])


def make_exit_codes_table() -> str:
    """Return the Markdown table of the exit codes."""
    rows = [(str(code.value), code.meaning) for code in ExitCode]
    return _table([("Code", "Meaning"), ("---",) * 2, *rows])


def make_pages_table(folder: Path) -> str:
    """Return the Markdown table of the pages of a folder, each with its first sentence, in the order of the site."""
    rows = []
    for name in re.findall(r": ([\w-]+\.md)$", SITE.read_text(encoding="utf-8"), re.MULTILINE):
        if (folder / name).exists():
            title, _, text = (folder / name).read_text(encoding="utf-8").partition("\n")
            paragraph = " ".join(text.strip().partition("\n\n")[0].split())
            sentence = re.split(r"(?<=[.?]) |(?<=[.?]\*\*) ", paragraph)[0]
            rows.append((f"[{title.removeprefix('# ')}]({name})", sentence))
    return _table([("Page", "What you find there"), ("---",) * 2, *rows])


def make_features_table() -> str:
    """Return the Markdown table of the features that ovpatch ships, with links to their pages."""
    rows = [
        (
            f"[`{feature.name}`](features/{feature.name}.md)",
            "on" if feature.default else "off",
            feature.summary,
            f"[options, counters, limits](features/{feature.name}-reference.md)",
        )
        for feature in _shipped()
    ]
    return _table([("Feature", "Default", "What it does", "Reference"), ("---",) * 4, *rows])


def make_records_table(folder: Path) -> str:
    """Return the Markdown table of the design records in a folder, from their titles."""
    rows = []
    for record in sorted(folder.glob("*.md")):
        title = record.read_text(encoding="utf-8").partition("\n")[0]
        number, _, decision = title.removeprefix("# ").partition(": ")
        rows.append((f"[{number}]({folder.name}/{record.name})", decision))
    return _table([("Design record", "Decides"), ("---",) * 2, *rows])


def _read_attributes(described: type) -> dict[str, str]:
    """Return the attributes that the docstring of a class describes, in Markdown, by name."""
    attributes = (inspect.getdoc(described) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {
        name: re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
        for name, text in found
    }


def make_counters_table(feature: str) -> str:
    """Return the Markdown table of the counters of a feature, from the docstring of their class.

    A description that ends with "in bytes" or "in milliseconds" names the unit. All other counters count the things
    with which their descriptions begin.
    """
    report = importlib.import_module(f"ovpatch_plugins.{feature}.{feature}_report")
    rows = []
    for name, text in _read_attributes(type(report.COUNTERS)).items():
        meaning, _, unit = text.removesuffix(".").rpartition(", in ")
        row = (f"{meaning}.", unit) if unit in _COUNTER_UNITS else (text, "count")
        rows.append((f"`{name}`", *row))
    return _table([("Counter", "Meaning", "Unit"), ("---",) * 3, *rows])


def make_fields_table(described: type) -> str:
    """Return the Markdown table of the attributes that the docstring of a dataclass describes, with their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(described)}
    lines = [("Field", "Default", "Meaning"), ("---",) * 3]
    for name, meaning in _read_attributes(described).items():
        default = (
            "**must be given**"
            if defaults[name] is dataclasses.MISSING
            else f"`{defaults[name]!r}`"
        )
        lines.append((f"`{name}`", default, meaning))
    return _table(lines)


def make_versions_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of the runs that ``tools/test_versions.py`` has recorded."""
    lines = [("torch", "Python", "Passed", "Failed", "Skipped", "Date"), ("---",) * 6]
    for row in rows:
        failed = "; ".join(f"`{name.rpartition('.')[2]}`" for name in row["failed"]) or "none"
        counts = (
            ("", row["problem"], "")
            if row["problem"]
            else (str(row["passed"]), failed, str(row["skipped"]))
        )
        lines.append((row["torch"], row["python"], *counts, row["date"]))
    return _table(lines)


def refresh_page(page: str, folder: Path) -> str:
    """Return a page with its generated parts updated; paths of files are relative to the page's folder."""

    def refresh(match: re.Match[str]) -> str:
        # Another tool makes the table of the families.
        if match[2] == "families":
            return match[0]
        return match[1] + _generate(match[2], folder) + match[3]

    return _PART.sub(refresh, page)


def _generate(name: str, folder: Path) -> str:
    if name == "variables":
        return make_variables_table()
    if name.startswith("options:"):
        return make_options_table(
            next(feature for feature in _shipped() if feature.name == name.partition(":")[2])
        )
    if name.startswith("fields:"):
        return make_fields_table({"Feature": Feature, "Option": Option}[name.partition(":")[2]])
    if name.startswith("counters:"):
        return make_counters_table(name.partition(":")[2])
    if name.startswith("command:"):
        return make_command_table(name.partition(":")[2])
    if name == "pages":
        return make_pages_table(folder)
    if name == "features":
        return make_features_table()
    if name == "exit-codes":
        return make_exit_codes_table()
    if name == "records":
        return make_records_table(folder / "adr")
    if name == "versions":
        record = folder / "versions.json"
        return (
            make_versions_table(json.loads(record.read_text(encoding="utf-8")))
            if record.exists()
            else ""
        )
    path = folder / name
    return f"```{path.suffix.lstrip('.').replace('py', 'python')}\n{path.read_text(encoding='utf-8')}```\n"


def main(paths: Iterable[str]) -> None:
    """Rewrite the generated parts of pages in place."""
    for path in map(Path, paths):
        path.write_text(
            refresh_page(path.read_text(encoding="utf-8"), path.parent), encoding="utf-8"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", help="the pages to rewrite")
    main(parser.parse_args().pages)

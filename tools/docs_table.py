"""The parts of ``docs/`` that are generated.

    python tools/docs_table.py docs/settings.md docs/write-a-plugin.md docs/features/*-reference.md

A generated part is between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. The names are:

- ``variables``: the table of all environment variables
- ``options:FEATURE``: the table of a feature's options
- ``fields:Feature``, ``fields:Option``: the table of the attributes in a docstring
- ``versions``: the table of the file ``versions.json`` in the folder of the page
- the path of a file, relative to the page: the file as a code block
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ovpatch.hookspecs import Feature, Option
from ovpatch.session.plugins import Plugins, find_plugins
from ovpatch.settings.settings import VARIABLES, make_variable_name

_PART: Final = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
_VALUES: Final = {bool: "`0` `1`", int: "a whole number", float: "a number"}


def make_variables_table(features: Iterable[Feature] | None = None) -> str:
    """Return the Markdown table of all environment variables, by default of the features that ovpatch ships."""
    rows = [(f"`{v.name}`", v.values, v.default, v.help) for v in VARIABLES]
    for feature in _shipped() if features is None else features:
        default = "`1`" if feature.default else "`0`"
        rows.append(
            (
                f"`{make_variable_name(feature.name)}`",
                "`0` `1`",
                default,
                f"The feature itself: {feature.summary}",
            )
        )
        rows += [_option_row(feature.name, option) for option in feature.options]
    lines = [("Variable", "Values", "Default", "Meaning"), ("---",) * 4, *rows]
    return _table(lines)


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
    rows = [
        (
            f"`{option.name}`",
            f"`{make_variable_name(feature.name, option.name)}`",
            ("unset" if option.default == "" else f"`{option.default}`") + _unless_named(option),
            _explain(option, option.aliases),
        )
        for option in feature.options
    ]
    return _table([("Option", "Variable", "Default", "Meaning"), ("---",) * 4, *rows])


def _explain(option: Option, aliases: Iterable[str]) -> str:
    return option.meaning + "".join(f" Also `{alias}`." for alias in aliases)


def _unless_named(option: Option) -> str:
    return (
        ""
        if option.default_unless_named is None
        else f"; `{option.default_unless_named}` unless it is named"
    )


def make_fields_table(described: type) -> str:
    """Return the Markdown table of the attributes that the docstring of a dataclass describes, with their defaults."""
    attributes = (inspect.getdoc(described) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    defaults = {field.name: field.default for field in dataclasses.fields(described)}
    lines = [("Field", "Default", "Meaning"), ("---",) * 3]
    for name, text in found:
        default = (
            "**must be given**"
            if defaults[name] is dataclasses.MISSING
            else f"`{defaults[name]!r}`"
        )
        meaning = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
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
    return _PART.sub(lambda match: match[1] + _generate(match[2], folder) + match[3], page)


def _generate(name: str, folder: Path) -> str:
    if name == "variables":
        return make_variables_table()
    if name.startswith("options:"):
        return make_options_table(
            next(feature for feature in _shipped() if feature.name == name.partition(":")[2])
        )
    if name.startswith("fields:"):
        return make_fields_table({"Feature": Feature, "Option": Option}[name.partition(":")[2]])
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
    main(sys.argv[1:])

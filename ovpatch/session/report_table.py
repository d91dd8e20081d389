"""The report as text: as a table, as HTML, and in a few lines for the end of a run."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TextIO

from ovpatch.session.gains import describe_gains
from ovpatch.session.session_report import IDLE, TROUBLE, UNTESTED, did_work
from ovpatch.settings.feature_options import DEFAULT

_HEADS: Final = ("feature", "state", "details")
_COLOURS: Final = {
    "applied": "green",
    "applied, idle": "yellow",
    "pending": "yellow",
    "skipped": "yellow",
    "disabled": "dim",
}
# The number of lines for the reasons of features that fell back.
_MAX_REASON_LINES: Final = 3
_LABEL_WIDTH: Final = 13
# The remark about one patch of a feature, which the user of a script cannot act on.
_PATCH_REMARK: Final = re.compile(r"\S+ is (pending|skipped|shadowed)\b")

_NOTHING_ON_ONE: Final = (
    "nothing to overlap on one process. Start the script on several ranks: torchrun "
    "--nproc-per-node 2 …"
)
_NOTHING: Final = (
    "nothing was accelerated: the script used nothing that a feature patches "
    "(DistributedDataParallel on several ranks, parallelize_module, experts of transformers), or "
    "all of it fell back to torch"
)


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour output to a stream, a terminal unless NO_COLOR or FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def format_report(
    data: Mapping[str, Any], *, colour: bool = False, width: int | None = None, full: bool = True
) -> str:
    """Return the table of a report in JSON types, of one process or merged.

    Args:
        data: The report.
        colour: Whether to use terminal colours.
        width: Columns; the width of the terminal by default.
        full: Whether to show counters that are zero.
    """
    rows = [
        (row["name"], _get_shown_state(row), _list_details(row, full)) for row in data["features"]
    ]
    return render_table(_make_title(data), _HEADS, rows, colour=colour, width=width)


def format_html(data: Mapping[str, Any]) -> str:
    """Return the table of a report as HTML."""
    rows = [
        (row["name"], _get_shown_state(row), _list_details(row, True)) for row in data["features"]
    ]
    body = "".join(
        f"<tr>{''.join(f'<td>{_to_html(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    caption = _to_html(_make_title(data))
    return f"<table><caption>{caption}</caption><tr>{heads}</tr>{body}</table>"


def _make_title(data: Mapping[str, Any]) -> str:
    return f"ovpatch {data['version']}, torch {data['torch']}, Python {data['python']}"


def _to_html(text: str) -> str:
    """Return text for a cell; without the alignment, Jupyter would align it to the right."""
    # Only a notebook shows a report as HTML.
    import html

    lines = "<br>".join(html.escape(line) for line in text.splitlines())
    return f'<div style="text-align: left">{lines}</div>'


def summarise_report(
    data: Mapping[str, Any], command: str = "", *, width: int | None = None
) -> str:
    """Return a merged report in three lines: gains, fallbacks and advice, and the next command.

    Features that the script has no use for are left out.

    Args:
        data: The merged report.
        command: The command that ran, for the last line; "" for no such line.
        width: Columns; the width of the terminal by default.
    """
    columns = width or shutil.get_terminal_size((120, 24)).columns
    ranks = len({process["rank"] for process in data["processes"]} - {None})
    worked = [row for row in data["features"] if _has_worked(row)]
    lines = _wrap(f"{'ovpatch:':<{_LABEL_WIDTH}}{_describe_work(worked, ranks)}", columns)
    if reasons := "; ".join(_list_fallbacks(data["features"], worked)):
        lines += _wrap(f"{'  fell back':<{_LABEL_WIDTH}}{reasons}", columns, _MAX_REASON_LINES)
    fitting = {row["name"]: row["fits"] for row in data["features"] if row.get("fits")}
    for name, reason in fitting.items():
        advice = f"--features=+{name}, because this script {reason}"
        lines += _wrap(f"{'  try':<{_LABEL_WIDTH}}{advice}", columns)
    if command:
        options = f"--features=+{next(iter(fitting))}" if fitting else "--full"
        verb = "verify" if worked else f"run {options}"
        # A command that is wrapped could not be copied.
        lines.append(f"{'  next':<{_LABEL_WIDTH}}ovpatch {verb} -- {command}")
    return "\n".join(lines)


def has_worked(data: Mapping[str, Any]) -> bool:
    """Return whether any feature did work in any process, according to a report."""
    return any(map(_has_worked, data["features"]))


def _has_worked(row: Mapping[str, Any]) -> bool:
    return row["state"] == "applied" and did_work(row["counters"], row["work"])


def _wrap(line: str, columns: int, most: int | None = None) -> list[str]:
    """Return the lines of a labeled text; with ``most``, the rest is left to ``--full``."""
    return textwrap.wrap(
        line,
        max(columns, 2 * _LABEL_WIDTH),
        subsequent_indent=" " * _LABEL_WIDTH,
        max_lines=most,
        placeholder=" … (--full)",
    )


def _describe_work(worked: Collection[Mapping[str, Any]], ranks: int) -> str:
    if not worked:
        return _NOTHING if ranks > 1 else _NOTHING_ON_ONE
    gains = "; ".join(f"{row['name']}: {_describe_row(row)}" for row in worked)
    if ranks == 1:
        return gains
    are_alike = all(_did_the_same(row, ranks) for row in worked)
    return f"{gains} ({'each' if are_alike else 'the busiest'} of {ranks} ranks)"


def _did_the_same(row: Mapping[str, Any], ranks: int) -> bool:
    """Return whether a feature did as much on each rank."""
    processes = row.get("processes") or []
    names = row["work"] or list(row["counters"])
    work = [[process["counters"].get(n, 0) for n in names] for process in processes]
    return len(work) in (0, ranks) and all(numbers == work[0] for numbers in work)


def _describe_row(row: Mapping[str, Any]) -> str:
    """Return the gains of a feature on the rank where it did most."""
    # Users have one model, and the sum over ranks counts it on each of them.
    processes = row.get("processes") or [row]
    names = row["work"] or list(row["counters"])
    most = max(processes, key=lambda process: sum(process["counters"].get(n, 0) for n in names))
    # Files of earlier versions have no clauses.
    return describe_gains(row.get("gains", ()), most["counters"])


def _list_fallbacks(
    rows: Iterable[Mapping[str, Any]], worked: Collection[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the reasons for which features did less than they could have done for this script."""
    names = {row["name"] for row in worked}
    for row in rows:
        if row["state"] in TROUBLE:
            yield f"{row['name']} is {row['state']}: {row['reason']}"
            continue
        fell_back = any(count for key, count in row["counters"].items() if key[:6] == "stock_")
        # The script has a use for a feature if the features that it requires did work.
        is_useful = bool(row.get("requires")) and names.issuperset(row["requires"])
        is_idle = row["name"] not in names
        if row["state"] == "applied" and (fell_back or (is_idle and is_useful)):
            yield from (f"{row['name']}: {remark}" for remark in _list_reasons(row))


def _list_reasons(row: Mapping[str, Any]) -> list[str]:
    return [
        remark
        for remark in row["remarks"]
        if not remark.startswith((UNTESTED, *IDLE)) and not _PATCH_REMARK.match(remark)
    ]


def _get_shown_state(row: Mapping[str, Any]) -> str:
    is_idle = row["state"] == "applied" and not IDLE.isdisjoint(row["remarks"])
    return "applied, idle" if is_idle else str(row["state"])


def _list_details(row: Mapping[str, Any], full: bool) -> str:
    has_counted = any(row["counters"].values())
    counters = row["counters"] if row["state"] != "pending" or has_counted else {}
    counts = ", ".join(f"{name} {count}" for name, count in counters.items() if count or full)
    changed = [
        f"{name}={option['value']} ({option['source']})"
        for name, option in row["options"].items()
        if option["source"] != DEFAULT
    ]
    lines = (row["reason"], counts, ", ".join(changed), *row["remarks"])
    return "\n".join(line for line in lines if line)


def render_table(
    title: str,
    heads: Iterable[str],
    rows: Iterable[tuple[str, ...]],
    *,
    colour: bool = False,
    width: int | None = None,
    right: Collection[str] = (),
) -> str:
    """Return a table as text, plain ASCII unless ``colour``.

    Args:
        title: The line above the table; "" for none.
        heads: The heads of the columns.
        rows: A cell for each column.
        colour: Whether to use terminal colours.
        width: Columns of the terminal; its width by default.
        right: The heads of right-aligned columns.
    """
    # rich is slow to import, and apply() does not need it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = box.SIMPLE_HEAD if colour else box.ASCII
    table = Table(title=Text(title) if title else None, box=style, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold", justify="right" if head in right else "left")
    for row in rows:
        cells = (
            Text(cell, style="red" if cell in TROUBLE else _COLOURS.get(cell, "")) for cell in row
        )
        table.add_row(*cells)
    columns = width or shutil.get_terminal_size((120, 24)).columns
    console = Console(width=columns, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())

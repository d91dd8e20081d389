"""The record of programs that were run stock and patched, and the tables that docs/compatibility.md makes of it.

pytest tests/scripts --compatibility docs/compatibility.json   # run the programs, add their rows
python -m tests.scripts.compatibility                          # rewrite the tables from the rows
python -m tests.scripts.compatibility --check                  # exit 1 if the page is not up to date
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ovpatch.session.session_report import IDLE
from tests.torch_suite import exceptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
RECORD = ROOT / "docs" / "compatibility.json"

Row = dict[str, Any]


def row(
    style: str,
    report: Mapping[str, Any] | None,
    *,
    compared: str,
    libraries: Iterable[str] = (),
    how: str = "bitwise",
    device: str = "CPU, gloo",
    ranks: int = 2,
) -> Row:
    """Return what one program showed.

    Args:
        style: What program it is, in a few words; the same words name the row in later runs.
        report: The merged report of the patched run, from which the row says what ovpatch did.
        compared: What of stock and patched was compared.
        libraries: Distributions besides torch that the program uses.
        how: How the two compare.
        device: Where it ran, and over which backend.
        ranks: On how many ranks.
    """
    return {
        "style": style,
        "device": device,
        "ranks": ranks,
        "libraries": {name: version(name) for name in ("torch", *libraries)},
        "compared": f"{how}: {compared}",
        "ovpatch": outcome(report),
        "date": datetime.date.today().isoformat(),
    }


def outcome(report: Mapping[str, Any] | None) -> str:
    """Say in a few words what feature ``ddp`` did in a run."""
    if report is None:
        return "left alone: no process imported ovpatch"
    ddp = next(one for one in report["features"] if one["name"] == "ddp")
    counters = ddp["counters"]
    if ddp["state"] != "applied":
        return f"left alone: {ddp['reason'] or ddp['state']}"
    parts = []
    if counters["backwards"]:
        parts.append("reducer ran")
    if counters["stock_models"]:
        reasons = [text for text in ddp["remarks"] if text not in IDLE]
        parts.append("stock reducer: " + "; ".join(reasons))
    return ", ".join(parts) or "left alone: no model in DistributedDataParallel"


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Return the rows of both, in order; of rows on the same program and device the newer."""
    rows = {(row["style"], row["device"]): row for row in [*old, *new]}
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0].casefold(), key[1]))]


def load(record: Path) -> list[Row]:
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else []


def save(record: Path, new: Iterable[Row]) -> None:
    """Add rows to a record."""
    rows = merge(load(record), new)
    record.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tables(rows: Iterable[Row]) -> str:
    """Return one table for each machine and version of torch."""
    places: dict[str, list[Row]] = {}
    for one in rows:
        places.setdefault(
            f"{one['device']}, {one['ranks']} ranks, torch {one['libraries']['torch']}", []
        ).append(one)
    return "\n\n".join(f"### {place}\n\n{_table(places[place])}" for place in sorted(places))


def _table(rows: Iterable[Row]) -> str:
    header = ["Program", "Libraries", "Stock against patched", "ovpatch", "Date"]
    return "\n".join([_line(header), _line(["---"] * len(header)), *map(_cells, rows)])


def _cells(row: Row) -> str:
    libraries = ", ".join(
        f"{name} {number}" for name, number in row["libraries"].items() if name != "torch"
    )
    return _line([row["style"], libraries or "none", row["compared"], row["ovpatch"], row["date"]])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def fill(text: str, rows: Iterable[Row]) -> str:
    """Return the page with the tables made anew."""
    return _put(_put(text, "programs", tables(rows)), "torch's tests", exceptions.table())


def _put(text: str, place: str, tables: str) -> str:
    filled, count = re.subn(
        rf"(<!-- {place} -->\n).*?(<!-- /{place} -->)",
        lambda match: f"{match[1]}\n{tables}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
    assert count == 1, f"the page has no place for {place}"
    return filled


def main() -> int:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    filled = fill(text, load(RECORD))
    if check and filled != text:
        print(f"{PAGE.relative_to(ROOT)}: out of date, run python -m tests.scripts.compatibility")
        return 1
    if filled != text:
        PAGE.write_text(filled, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

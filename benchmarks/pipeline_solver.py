"""The solver of pipeline schedules against published bubble rates, and its time.

    python -m benchmarks.pipeline_solver                             # all vectors, about a minute of one core
    python -m benchmarks.pipeline_solver --effort 0                  # without the search
    python -m benchmarks.pipeline_solver --json pipeline_solver.jsonl

The rates are those that the scheduler of Zero Bubble Pipeline Parallelism prints for equal stages: memory of 1, 1.5, 2
and 2.5 p forwards, and ZB-V for two half-size stages a rank. Times are processor time of one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import ovpatch
from ovpatch.planner.solver import EFFORT, solve
from tests.plugins.pipeline.vectors import PUBLISHED, PUBLISHED_V, ROUNDED, VECTORS, make_problem


def main() -> None:
    """Solve all vectors and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--effort", type=int, default=EFFORT, help="simulated operations of a search"
    )
    parser.add_argument(
        "--json", type=Path, help="append the result to this file, one JSON object a line"
    )
    arguments = parser.parse_args()
    vees = [(*size, 1, rate) for size, rate in zip(PUBLISHED, PUBLISHED_V, strict=True)]
    rows = []
    for placement, vectors in (("straight", VECTORS), ("vee", vees)):
        for *size, memory, rate in vectors:
            started = time.process_time()
            problem = make_problem(*size, memory, vee=placement == "vee")  # type: ignore[misc]  # there are six sizes
            solution = solve(problem, effort=arguments.effort)
            seconds = time.process_time() - started
            found = solution.simulation.bubble
            verdict = (
                "beaten"
                if found < rate - ROUNDED
                else "met"
                if found <= rate + ROUNDED
                else "missed"
            )
            rows.append(
                (
                    placement,
                    *size,
                    memory,
                    rate,
                    round(found, 4),
                    verdict,
                    solution.origin,
                    round(seconds, 2),
                )
            )
    headings = (
        "placement",
        "p",
        "m",
        "F",
        "B",
        "W",
        "c",
        "memory",
        "published",
        "ours",
        "verdict",
        "from",
        "s",
    )
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)
    for verdict in ("beaten", "met", "missed"):
        print(verdict, sum(verdict in row for row in rows))
    if arguments.json:
        head = {
            "benchmark": "pipeline_solver",
            "date": time.strftime("%Y-%m-%d"),
            "effort": arguments.effort,
        }
        head |= {"python": platform.python_version(), "ovpatch": ovpatch.__version__}
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(
                    {**head, "rows": [dict(zip(headings, row, strict=True)) for row in rows]}
                )
                + "\n"
            )


if __name__ == "__main__":
    main()

"""Measures the processor time of each test, and proposes lines for ``tests/nightly.txt``.

    make pytest PYTEST_ARGS="-p tools.test_times"     write build/test_times.jsonl
    python -m tools.test_times --at-least 1.0         print slow tests that no planted fault needs by default

Each planted fault keeps two of the tests that catch it, the cheapest ones. Read the proposal before you take a line:
the main test of a feature, and the check of a kind of defects, stay. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tools import plant_faults

ROOT: Final = Path(__file__).resolve().parent.parent
TIMES: Final = ROOT / "build" / "test_times.jsonl"
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
# The number of catchers that a fault keeps, or all of them if there are fewer.
_CATCHERS: Final = 2
# Tests of these folders and files are few, and users see what they check.
_KEPT: Final = (
    "tests/docs",
    "tests/examples/",
    "tests/habits/",
    "tests/scripts/",
    "tests/test_",
    "tests/torch_suite/",
)


def read_cpu_s() -> float:
    """Return the processor time of this process and of its living children, in seconds, with children that ended."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the program, in brackets, may have spaces.
            _, _, text = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            # The process has just ended.
            continue
        fields = text.split()
        process = int(path.parent.name)
        ticks[process] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(process)
    found, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        found += ticks.get(process, 0)
        left += children.get(process, [])
    return found / _TICKS_PER_S


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Append the times of a test, in seconds, to the file of times."""
    cpu, wall = read_cpu_s(), time.monotonic()
    result = yield
    times = {
        "test": item.nodeid,
        "cpu_s": round(read_cpu_s() - cpu, 2),
        "wall_s": round(time.monotonic() - wall, 2),
    }
    TIMES.parent.mkdir(exist_ok=True)
    with TIMES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(times) + "\n")
    return result


def read_times(path: Path) -> dict[str, float]:
    """Return the longest processor time of each test in a file, in seconds."""
    found: dict[str, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        times: dict[str, Any] = json.loads(line)
        found[times["test"]] = max(found.get(times["test"], 0.0), times["cpu_s"])
    return found


def propose(
    times: Mapping[str, float],
    record: Mapping[str, Sequence[str]],
    at_least: float,
    kept: Collection[str] = _KEPT,
) -> list[str]:
    """Return the tests that may run nightly, the longest first.

    Args:
        times: Processor time of the tests that run by default, in seconds.
        record: The tests that catch each planted fault.
        at_least: Shorter tests are not proposed, in seconds.
        kept: Beginnings of the names of tests that are not proposed.
    """
    slow = {
        test for test, seconds in times.items()
        if seconds >= at_least and not test.startswith(tuple(kept))
    }  # fmt: skip
    stay = set(times) - slow
    for catchers in record.values():
        by_default = sorted((test for test in catchers if test in times), key=times.__getitem__)
        missing = _CATCHERS - sum(test in stay for test in by_default)
        stay.update([test for test in by_default if test not in stay][: max(0, missing)])
    return sorted(slow - stay, key=times.__getitem__, reverse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the proposal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("times", nargs="?", type=Path, default=TIMES, help="file of times")
    parser.add_argument("--at-least", type=float, default=1.0, metavar="SECONDS", help="(1.0)")
    given = parser.parse_args(arguments)
    if not given.times.exists():
        parser.error(
            f"there is no {given.times}. Measure first: make pytest PYTEST_ARGS='-p tools.test_times'"
        )
    times = read_times(given.times)
    found = propose(times, plant_faults.read_record(), given.at_least)
    for test in found:
        print(f"{times[test]:6.2f} s  {test}")
    saved, total = sum(times[test] for test in found), sum(times.values())
    print(f"{len(found)} of {len(times)} tests, {saved:.0f} of {total:.0f} s of processor time")


if __name__ == "__main__":
    main()

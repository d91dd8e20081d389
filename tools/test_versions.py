"""Run the core of the tests on other versions of torch and Python, each in its own environment.

    python tools/test_versions.py                              # every torch from 2.11 on, every Python from 3.10 on
    python tools/test_versions.py --torch 2.15.0 --python 3.13
    python tools/test_versions.py --list                       # what would run

Every published torch runs on this Python, and the newest torch on every other Python of the machine. Results go to
``docs/versions.json``, from which ``tools/docs_table.py docs/compatibility.md`` makes the table of the page. An
environment takes up to 6 GB; it is removed after its run unless ``--keep`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Final

from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parent.parent
RECORD: Final = ROOT / "docs" / "versions.json"
OLDEST_TORCH: Final = Version("2.11")
OLDEST_PYTHON: Final = (3, 10)
NEWEST_PYTHON: Final = (3, 20)
CORE: Final = (
    "tests/patching",
    "tests/overlap",
    "tests/plugins",
    "tests/habits",
    "tests/test_api.py",
    "tests/test_session.py",
    "tests/test_signatures.py",
)


@dataclass(frozen=True)
class Row:
    """The result of one environment.

    Attributes:
        torch: Version of torch, as it names itself.
        python: Version of Python.
        date: When it ran.
        passed: Number of tests.
        skipped: Number of tests, those that need GPUs among them.
        failed: Names of the tests that failed.
        problem: Why the tests could not run to their end, or "".
    """

    torch: str
    python: str
    date: str
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    problem: str = ""


def list_torches() -> list[str]:
    """Return the published versions of torch from the oldest that is supported on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    if line is None:
        raise SystemExit(f"pip names no versions of torch: {text!r}. Name them: --torch 2.13.0 ...")
    found = {Version(part.strip()) for part in line[1].split(",")}
    return [
        str(version) for version in sorted(found) if version >= OLDEST_TORCH and not version.local
    ]


def list_pythons() -> dict[str, str]:
    """Return the interpreters of this machine by version, such as ``{"3.12": "/usr/bin/python3.12"}``."""
    found = {}
    for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1]):
        name = f"python3.{minor}"
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        path = shutil.which(name)
        works = (
            path is not None
            and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
        )
        if works or pyenv:
            found[f"3.{minor}"] = str(path) if works else str(pyenv[-1])
    return found


def plan_runs(torches: Sequence[str], pythons: Sequence[str], here: str) -> list[tuple[str, str]]:
    """Return pairs of torch and Python: each torch on this Python, the newest torch on each other Python."""
    own = here if here in pythons else pythons[0]
    newest = max(torches, key=Version)
    return [(torch, own) for torch in torches] + [
        (newest, python) for python in pythons if python != own
    ]


def run_tests(
    torch: str, python: str, interpreter: str, folder: Path, arguments: Sequence[str]
) -> Row:
    """Set an environment up and run the tests in it."""
    environment = folder / f"torch-{torch}-python-{python}"
    settings = {
        "PYTHON": interpreter,
        "VENV": str(environment),
        "TORCH": f"torch=={torch}",
        "EXTRAS": "test",
    }
    today = date.today().isoformat()
    is_there = (environment / ".ready").exists()
    if (
        not is_there
        and subprocess.run(
            ["bash", "tools/bootstrap.sh"], cwd=ROOT, env=os.environ | settings
        ).returncode
    ):
        return Row(torch, python, today, problem="pip could not install it")
    own = str(environment / "bin" / "python")
    name = subprocess.run(
        [own, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [
            own,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "-p",
            "no:cacheprovider",
        ]
        subprocess.run([*command, f"--junitxml={report}", *(arguments or CORE)], cwd=ROOT)
        if not report.exists():
            return Row(name, python, today, problem="pytest ended without a report")
        return read_report(report, name, python, today)


def read_report(report: Path, torch: str, python: str, today: str) -> Row:
    """Return the row of a report that pytest wrote."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if _has_tag(case, "failure", "error")
    ]
    skipped = sum(_has_tag(case, "skipped") for case in cases)
    passed = len(cases) - skipped - len(failed)
    return Row(torch, python, today, passed, skipped, tuple(sorted(set(failed))))


def _has_tag(case: ElementTree.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)


def add_row(row: Row, record: Path = RECORD) -> None:
    """Put a row in the record, instead of an earlier row of the same versions."""
    rows = [Row(**fields) for fields in json.loads(record.read_text())] if record.exists() else []
    rows = [known for known in rows if _versions(known) != _versions(row)] + [row]
    rows.sort(key=_versions)
    record.write_text(json.dumps([asdict(known) for known in rows], indent=1) + "\n")


def _versions(row: Row) -> tuple[Version, Version]:
    """Return the key of a row. A torch that could not be installed has no build such as ``+cpu`` in its name."""
    return Version(Version(row.torch).public), Version(row.python)


def main() -> int:
    """Run the chosen versions; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--torch",
        nargs="+",
        default=[],
        help="versions of torch (default: all published from 2.11 on)",
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        help="versions of Python, such as 3.12 (default: all here)",
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".versions", help="where environments are made"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments, and use those that are there"
    )
    parser.add_argument("--list", action="store_true", help="only print what would run")
    parser.add_argument(
        "tests", nargs="*", help="what to run instead of the core; such a run is not recorded"
    )
    options = parser.parse_args()

    interpreters = list_pythons()
    unknown = [python for python in options.python if python not in interpreters]
    if unknown:
        parser.error(f"no Python {', '.join(unknown)} here; there are {', '.join(interpreters)}")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    runs = plan_runs(options.torch or list_torches(), options.python or list(interpreters), here)
    bad = 0
    for torch, python in runs:
        print(f"== torch {torch}, Python {python}", flush=True)
        if options.list:
            continue
        row = run_tests(torch, python, interpreters[python], options.folder, options.tests)
        if not options.tests:
            add_row(row)
        if not options.keep:
            shutil.rmtree(options.folder / f"torch-{torch}-python-{python}", ignore_errors=True)
        bad += bool(row.failed or row.problem)
        outcome = (
            row.problem or f"{row.passed} passed, {len(row.failed)} failed, {row.skipped} skipped"
        )
        print(
            f"== torch {row.torch}, Python {row.python}: {outcome}",
            *row.failed,
            sep="\n   ",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

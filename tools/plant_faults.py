"""Plant faults in the sources, one at a time, and record the tests that catch each of them.

    $ python tools/plant_faults.py                       # all faults, more than an hour
    $ python tools/plant_faults.py wait stale            # those whose names contain one of these words
    $ python tools/plant_faults.py --without tests/a.py  # the faults that nothing would catch without these files
    $ python tools/plant_faults.py --random 200 --seed 7 --room ovpatch/patching --tests tests/patching

A fault of ``tools/faults/`` is a small replacement in one file. It is planted in a scratch copy of the repository,
in which the fault's tests run. All tests that fail are its *catchers*; ``tests/faults/caught.json`` records them.

``--random`` draws mutants of the sources in a room and prints which of them some tests kill. Equal sources and seeds
give equal mutants, so the lists of two runs show what a change to the tests has lost.

The program exits with 1 if a fault is not caught, and with 2 if a replacement does not fit the sources.
``tests/test_planted_faults.py`` checks in every run of the tests that all fit.
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
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Python searches the folder of a script for modules, and not the repository.
sys.path.insert(0, str(ROOT))

from tests.support import patience  # noqa: E402
from tools.faults import FAULTS, Fault, FaultNotFoundError  # noqa: E402
from tools.mutants import Mutant, draw_mutants  # noqa: E402

RECORD: Final = ROOT / "tests" / "faults" / "caught.json"
# The catcher of a fault that makes ranks wait forever.
TIME_LIMIT: Final = "time-limit"

_COPIED: Final = ("ovpatch", "plugins", "tests", "setup.cfg", "pyproject.toml")
# The limit on a quiet machine. It has to exceed the limits of the tests that hang, which grow with the load as well.
_TIMEOUT_S: Final = 900.0
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)
# The exit code of pytest if tests ran and some failed.
_HAS_FAILED: Final = 1


def choose(words: Sequence[str]) -> list[Fault]:
    """Return the faults whose names contain one of some words; all of them without words."""
    return [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]


def find_catchers(fault: Fault, root: Path) -> list[str]:
    """Plant a fault in a copy of the repository, run its tests, and restore the file.

    Returns:
        All tests that failed.

    Raises:
        FaultNotFoundError: The fault does not fit the sources.
        RuntimeError: pytest could not run the tests.
    """
    code, output = _run_planted(fault, root)
    failed = sorted(set(_FAILED.findall(output)))
    if code == 0 or (code == _HAS_FAILED and failed):
        return failed
    raise RuntimeError(
        f"fault '{fault.name}': pytest exited with {code}. Correct its tests:\n{output[-2000:]}"
    )


def is_killed(mutant: Mutant, root: Path) -> bool:
    """Return whether a test fails with a mutant, or none can run, although the tests pass without it."""
    code, _ = _run_planted(mutant, root, "-x")
    return code != 0


def _run_planted(change: Fault | Mutant, root: Path, *arguments: str) -> tuple[int, str]:
    before = (root / change.file).read_bytes()
    change.plant(root)
    try:
        return _run_tests(change.tests, root, arguments)
    finally:
        (root / change.file).write_bytes(before)


def _run_tests(tests: Sequence[str], root: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Return pytest's exit code and output; a run that exceeds its limit has failed, as it waits forever."""
    paths = [str(root), str(root / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience.scale(_TIMEOUT_S),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _HAS_FAILED, f"FAILED {TIME_LIMIT}::{_TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout + done.stderr


def copy_repository(target: Path) -> None:
    """Copy what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy(source, target / name)


# --- the record ---


def read_record(path: Path = RECORD) -> dict[str, list[str]]:
    """Return the recorded catchers by the name of the fault."""
    record: dict[str, list[str]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    )
    return record


def update_record(name: str, catchers: Sequence[str], path: Path = RECORD) -> None:
    """Record the catchers of a fault; faults that no longer exist are dropped."""
    known = {fault.name for fault in FAULTS} | {name}
    record = {
        fault: tests
        for fault, tests in (read_record(path) | {name: list(catchers)}).items()
        if fault in known
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def exists(catcher: str, root: Path = ROOT) -> bool:
    """Return whether the sources have this test, or file of tests; parameters are not compared."""
    file, _, name = catcher.partition("::")
    function = name.partition("[")[0].rpartition("::")[2]
    if file == TIME_LIMIT:
        return True
    path = root / file
    return path.exists() and (
        not function
        or re.search(rf"\bdef {function}\(", path.read_text(encoding="utf-8")) is not None
    )


def list_uncaught(
    record: Mapping[str, Sequence[str]], without: Collection[str] = (), root: Path = ROOT
) -> list[str]:
    """Return the recorded faults without a catcher, if some tests, or files or folders of tests, did not exist."""
    gone = [name.rstrip("/") for name in without]
    parts = tuple(f"{name}{end}" for name in gone for end in ("/", "::", "["))

    def is_left(catcher: str) -> bool:
        return exists(catcher, root) and catcher not in gone and not catcher.startswith(parts)

    return sorted(name for name, catchers in record.items() if not any(map(is_left, catchers)))


# --- commands ---


def show_uncaught(without: Sequence[str]) -> int:
    """Print the faults that nothing would catch without some files, and those without a record."""
    record = read_record()
    unrecorded = sorted(fault.name for fault in FAULTS if fault.name not in record)
    uncaught = list_uncaught(record, without)
    for name in uncaught:
        print(f"{name}: no catcher left of {len(record[name])}")
    for name in unrecorded:
        print(f"{name}: not recorded")
    print(
        f"{len(uncaught)} of {len(record)} recorded faults would not be caught, {len(unrecorded)} "
        "are not recorded"
    )
    return int(bool(uncaught))


def plant_faults(chosen: Sequence[Fault]) -> int:
    """Plant faults, print a line for each and record its catchers."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy_repository(Path(folder))
        for fault in chosen:
            begin = time.monotonic()
            try:
                catchers = find_catchers(fault, Path(folder))
            except (FaultNotFoundError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 2
            update_record(fault.name, catchers)
            missed += not catchers
            verdict = (
                f"caught by {len(catchers)}, first {catchers[0]}" if catchers else "NOT CAUGHT"
            )
            print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {verdict}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(bool(missed))


def plant_mutants(mutants: Sequence[Mutant]) -> int:
    """Plant mutants and print each with its outcome, sorted by place, so that two runs can be compared."""
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_repository(Path(folder))
        code, output = _run_tests(mutants[0].tests, Path(folder), ["-x"])
        if code:
            raise SystemExit(
                "the tests fail without a mutant. Correct --tests, or the "
                f"sources:\n{output[-2000:]}"
            )
        for number, mutant in enumerate(mutants, 1):
            outcomes[mutant] = is_killed(mutant, Path(folder))
            print(f"{number} of {len(mutants)}: {mutant.name}", file=sys.stderr, flush=True)
    for mutant in sorted(outcomes, key=lambda mutant: (mutant.file, mutant.begin, mutant.kind)):
        print(f"{'killed  ' if outcomes[mutant] else 'SURVIVED'}  {mutant.name}")
    print(f"{sum(outcomes.values())} of {len(outcomes)} killed")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the command line chooses, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Plant faults and record the tests that catch each of them."
    )
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    parser.add_argument(
        "--without", nargs="+", metavar="FILE", help="list faults that only these tests catch"
    )
    parser.add_argument(
        "--random", type=int, metavar="N", help="plant N random mutants instead of the faults"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the mutants (0)")
    parser.add_argument("--room", metavar="PATH", help="folder or file that gets the mutants")
    parser.add_argument(
        "--tests", nargs="+", metavar="TEST", help="arguments for pytest that should kill them"
    )
    options = parser.parse_args(arguments)
    if options.without:
        return show_uncaught(options.without)
    if options.random:
        if not options.room or not options.tests:
            parser.error(
                "--random needs --room and --tests. Name a folder of the sources, and its tests."
            )
        return plant_mutants(
            draw_mutants(ROOT, options.room, options.random, options.seed, options.tests)
        )
    return plant_faults(choose(options.words))


if __name__ == "__main__":
    sys.exit(main())

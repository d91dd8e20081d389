"""Plants faults in the sources, one at a time, and tells which of them the tests catch.

    $ python tools/plant_faults.py              # all, more than half an hour
    $ python tools/plant_faults.py wait stale   # those whose names hold one of these words

A fault of ``tools/faults.py`` is a small replacement in one file of a scratch copy of the repository, in which the
tests that should catch it are run. The program ends with 1 if a fault is not caught, and with 2 if a replacement does
not fit the sources, which ``tests/test_planted_faults.py`` checks in every run of the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Of a script, Python searches the folder for modules, and not the repository.
sys.path.insert(0, str(ROOT))

from tools.faults import FAULTS, Fault, FaultNotFoundError  # noqa: E402

_COPIED: Final = ("ovpatch", "plugins", "tests", "setup.cfg", "pyproject.toml")
_TIMEOUT_S: Final = 900.0
_FAILED: Final = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)


def choose(words: Sequence[str]) -> list[Fault]:
    """Return the faults whose names hold one of some words; all of them without words."""
    return [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]


def find_catcher(fault: Fault, root: Path) -> str:
    """Plant a fault in a copy of the repository, run its tests, and take it out again.

    Returns:
        The first test that failed; "" if none did.

    Raises:
        FaultNotFoundError: It does not fit the sources.
        RuntimeError: pytest could not run the tests.
    """
    before = (root / fault.file).read_bytes()
    fault.plant(root)
    try:
        code, output = _run_tests(fault.tests, root)
    finally:
        (root / fault.file).write_bytes(before)
    failed = _FAILED.search(output)
    if code == 0 or (code == 1 and failed):
        return failed[1] if failed else ""
    raise RuntimeError(f"fault '{fault.name}': pytest ended with {code}; correct its tests:\n{output[-2000:]}")


def _run_tests(tests: Sequence[str], root: Path) -> tuple[int, str]:
    """Return pytest's exit code and output; a run that had to be ended counts as failed: a rank waited for ever."""
    paths = [str(root), str(root / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "FAILED by its time limit"
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


def main() -> int:
    """Plant the chosen faults and print a line for each."""
    parser = argparse.ArgumentParser(description="Plant faults and tell which of them the tests catch.")
    parser.add_argument("words", nargs="*", help="only faults whose names hold one of these")
    chosen, missed = choose(parser.parse_args().words), []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy_repository(Path(folder))
        for fault in chosen:
            begin = time.monotonic()
            try:
                catcher = find_catcher(fault, Path(folder))
            except (FaultNotFoundError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 2
            missed += [] if catcher else [fault]
            verdict = f"caught by {catcher}" if catcher else "NOT CAUGHT"
            print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {verdict}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""Runs torch's own distributed tests stock and patched: what passes stock has to pass patched.

python -m tests.torch_suite                      # all tests of what we patch, each in three variants, on two gloo ranks
python -m tests.torch_suite --only no_sync join  # those with one of these words in their names
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.failures import RankFailure
from tests.support.gloo import THREADS
from tests.support.pool import Pool
from tests.torch_suite.exceptions import REASONS
from tests.torch_suite.suite import ARMS, names, run_test

DEVICES = ("as it is", "cpu")

Result = dict[str, Any]


def outcome(pool: Pool, name: str, device: str, arm: str, *, timeout: float) -> Result:
    """Run one test on two ranks and say what became of it."""
    began = time.monotonic()
    kind, why = "passed", ""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        environment = {
            "BACKEND": "gloo",
            "TEMP_DIR": folder,
            "INIT_METHOD": f"file://{folder}/init_dir/shared",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29501",
            THREADS: "2",  # stock's number, which one of the tests asks for
        }
        try:
            skips = pool(2)(
                run_test, name, device, arm, folder, timeout=timeout, backend=None, env=environment
            )
        except RankFailure as failure:
            kind, why = "failed", str(failure)
        else:
            if any(skips):
                kind, why = "skipped", next(filter(None, skips))
    return {"outcome": kind, "why": why, "seconds": round(time.monotonic() - began, 2)}


def run(
    pool: Pool, chosen: Iterable[str], arms: Sequence[str], *, timeout: float
) -> dict[str, dict[str, Result]]:
    """Run tests as they are, and those that skip themselves once more on the CPU.

    A test that does not pass stock is not run patched.
    """
    results: dict[str, dict[str, Result]] = {}
    for name in chosen:
        for device in DEVICES:
            key = f"{name} ({device})"
            results[key] = {"stock": outcome(pool, name, device, "stock", timeout=timeout)}
            if results[key]["stock"]["outcome"] == "passed":
                for arm in arms:
                    results[key][arm] = outcome(pool, name, device, arm, timeout=timeout)
                    _show(key, arm, results[key][arm])
            if results[key]["stock"]["outcome"] != "skipped":
                break
    return results


def worse(results: dict[str, dict[str, Result]]) -> list[tuple[str, str]]:
    """Return the tests and arms that pass stock and do not pass patched."""
    return [
        (key, arm)
        for key, by_arm in results.items()
        for arm, result in by_arm.items()
        if by_arm["stock"]["outcome"] == "passed" and result["outcome"] != "passed"
    ]


def _show(key: str, arm: str, result: Result) -> None:
    if result["outcome"] != "passed":
        print(
            f"{result['outcome']}: {key} [{arm}] {result['why'].splitlines()[0][:200]}", flush=True
        )


def main() -> int:
    """Run, write the results, and list what fails patched alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="words of which names have one"
    )
    parser.add_argument(
        "--variants", nargs="+", default=[arm for arm in ARMS if arm != "stock"], choices=list(ARMS)
    )
    parser.add_argument("--timeout", type=float, default=40, help="seconds a test may take")
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    began = time.monotonic()
    chosen = [name for name in names() if any(word in name for word in options.only)]
    pool = Pool(grace=1)
    try:
        results = run(pool, chosen, options.variants, timeout=options.timeout)
    finally:
        pool.close()
    if options.json:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "tests": results}, indent=1), encoding="utf-8"
        )
    passed = sum(by_arm["stock"]["outcome"] == "passed" for by_arm in results.values())
    failures = worse(results)
    unexpected = [one for one in failures if one[0] not in REASONS]
    print(
        f"{passed} tests pass stock, {len({name for name, _ in failures})} of them fail patched; ",
        end="",
    )
    print(
        f"{len(unexpected)} failures without a reason in docs/compatibility.md; "
        f"{time.monotonic() - began:.0f} s"
    )
    for key, arm in unexpected:
        print(f"  {key} [{arm}]")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())

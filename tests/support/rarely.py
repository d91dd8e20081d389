"""Tests that run with ALL_CASES=1 alone, because others run the same code, and they take long.

A test has the mark ``RARELY`` in its file, or ``tests/nightly.txt`` lists it: there are the tests that took long when
the time of the whole suite was measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

ALL_CASES = bool(os.environ.get("ALL_CASES"))
RARELY = pytest.mark.skipif(not ALL_CASES, reason="runs with ALL_CASES=1")

_NIGHTLY: Final = Path(__file__).parents[1] / "nightly.txt"


def read_nightly() -> list[str]:
    """Return the lines of ``tests/nightly.txt``: tests, functions and files."""
    lines = _NIGHTLY.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_listed(test: str, lines: Iterable[str]) -> bool:
    """Return whether a test, or its function or file, is among these lines."""
    function = test.partition("[")[0]
    return not {test, function, function.partition("::")[0]}.isdisjoint(lines)

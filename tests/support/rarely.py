"""The mark of tests whose like runs elsewhere in the same way, and that take long: with ALL_CASES=1 alone."""

from __future__ import annotations

import os

import pytest

ALL_CASES = bool(os.environ.get("ALL_CASES"))
RARELY = pytest.mark.skipif(not ALL_CASES, reason="runs with ALL_CASES=1")

"""Tests of torch that pass stock and fail patched, each with the reason why that stays so."""

from __future__ import annotations

from typing import Final

EXPECTED: Final[dict[tuple[str, str], str]] = {}
"""Reason by test and arm, as they are named in the results."""

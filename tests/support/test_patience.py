"""Limits on a busy machine, and their use by all tests."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest

from tests.support import patience

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("load", "cores", "limit"),
    [((0.1, 0.1, 9.0), 2, 60), ((8, 2, 0), 2, 240), ((2, 8, 0), 2, 240), ((500, 1, 1), 2, 1200)],
)
def test_a_limit_grows_with_the_processes_of_a_core(load, cores, limit):
    with (
        mock.patch("os.getloadavg", return_value=load),
        mock.patch("os.cpu_count", return_value=cores),
    ):
        assert patience.scale(60) == limit
        assert patience.scale(2) == 2, "it is meant to expire"


def find_fixed_limits(source: str) -> list[int]:
    """Return the lines on which a limit of a process is not scaled, or too short for it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            ast.unparse(node.func.value) == "subprocess"
            or node.func.attr in ("communicate", "urlopen")
        )
        for keyword in node.keywords
        if keyword.arg == "timeout" and is_unscaled(keyword.value)
    ]


def is_unscaled(limit: ast.expr) -> bool:
    """Return whether a limit is no ``patience.scale()``, or that of a number that it returns as it is."""
    if not isinstance(limit, ast.Call) or ast.unparse(limit.func) != "patience.scale":
        return True
    seconds = limit.args[0]
    return isinstance(seconds, ast.Constant) and seconds.value < patience.SHORTEST_S


def test_waits_for_processes_scale_their_limits():
    assert find_fixed_limits("subprocess.run(a, timeout=60)\nprocess.communicate(timeout=60)") == [
        1,
        2,
    ]
    assert find_fixed_limits("subprocess.run(a, timeout=patience.scale(60))\nrun(timeout=60)") == []
    assert find_fixed_limits("subprocess.run(a, timeout=limit)") == [1], (
        "a variable may be a number"
    )
    assert find_fixed_limits("subprocess.run(a, timeout=patience.scale(20))") == [1]
    found = {
        str(path.relative_to(TESTS)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := find_fixed_limits(path.read_text(encoding="utf-8")))
    }
    assert not found, f"write timeout=patience.scale(...): {found}"

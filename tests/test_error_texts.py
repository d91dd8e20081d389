"""Error messages that quote other messages: each sentence ends in one full stop, before the remedy."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOREIGN = {"error", "failure", "reason", "text"}
"""Names of quoted messages, which may end in a full stop or not."""


def find_double_stops(source: str) -> list[int]:
    """Return the lines in which a full stop follows a quoted message that may have its own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, following in zip(node.values, node.values[1:], strict=False):
            is_stop = isinstance(following, ast.Constant) and str(following.value).startswith((". ", ".\n"))
            is_stop = is_stop or (isinstance(following, ast.Constant) and following.value == ".")
            # The representation of an error ends in a bracket.
            if is_stop and isinstance(value, ast.FormattedValue) and value.conversion != ord("r"):
                inner = value.value
                if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "str":
                    inner = inner.args[0]
                if isinstance(inner, ast.Name) and inner.id in FOREIGN:
                    found.append(value.lineno)
    return found


def test_the_search_finds_what_it_is_for() -> None:
    assert find_double_stops('f"it failed: {error}. Do this."') == [1]
    assert find_double_stops('f"it failed: {str(error)}."') == [1]
    assert not find_double_stops("f\"it failed: {str(error).rstrip('.')}. Do this.\"")
    assert not find_double_stops('f"it failed: {error!r}. Do this."')
    assert not find_double_stops('f"it failed ({error}). Do this."')


def test_no_message_has_two_full_stops() -> None:
    files = [path for folder in ("ovpatch", "plugins") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): find_double_stops(path.read_text(encoding="utf-8")) for path in files}
    assert not {name: numbers for name, numbers in lines.items() if numbers}

"""What was chosen in this process, for the report; it outlives the groups that chose."""

from __future__ import annotations

_said: dict[str, dict[str, None]] = {}  # lines, each once, by feature


def record(feature: str, text: str) -> None:
    """Keep a line for a feature's report."""
    _said.setdefault(feature, {})[text] = None


def remarks(feature: str) -> list[str]:
    """Return a feature's lines, in the order in which they came up."""
    return list(_said.get(feature, ()))

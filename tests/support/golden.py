"""Golden files: the full text of a report, so that a change of one word is seen in review."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare a string with its golden file; with GOLDEN=1 in the environment, write the file.

    Lines are compared without the spaces at their ends, which editors remove.
    """
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == known, (
        f"{path.name} differs. Read the new text, then renew the file by GOLDEN=1."
    )

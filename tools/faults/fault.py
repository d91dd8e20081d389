"""A fault: a small replacement in the sources, and the tests that should catch it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


class FaultNotFoundError(ValueError):
    """The text that a fault replaces is not there exactly once. Adapt the fault to the sources."""


@dataclass(frozen=True)
class Fault:
    """A replacement in the sources.

    Attributes:
        name: What is wrong then.
        file: Where, relative to the repository.
        old: The code that is replaced, which the file has exactly once.
        new: What takes its place.
        tests: What should fail: arguments for pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Change the file below ``root``.

        Raises:
            FaultNotFoundError: The old text is not there, or several times.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        pattern = re.compile(re.escape(self.old))
        if not pattern.search(text):
            pattern = _ignore_layout(self.old)
        count = len(pattern.findall(text))
        if count != 1:
            raise FaultNotFoundError(
                f"fault '{self.name}': {self.file} has {count} times what it replaces, not once: "
                f"{self.old!r}. Adapt the fault in tools/faults/ to the sources."
            )
        path.write_text(pattern.sub(lambda _: self.new, text), encoding="utf-8")


def _ignore_layout(code: str) -> re.Pattern[str]:
    """Return a pattern of the code in any layout that ``ruff format`` may give it."""
    closers = {")", "]", "}"}
    parts = [
        rf"(?:,\s*)?{re.escape(token)}" if token in closers else re.escape(token)
        for token in re.findall(r"\w+|\S", code)
    ]
    return re.compile(r"\s*".join(parts))

"""What pyproject.toml cannot say: README.md as a package index shows it, and an editable install by a path file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
FOLDERS = (ROOT, ROOT / "plugins")


class PathFile:
    """An editable wheel that holds one .pth file, which type checkers and editors read; they know no import hooks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> PathFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, wheel: Any, _files: Any, _mapping: Any) -> None:
        """Write the file into the wheel."""
        wheel.writestr(
            f"__editable__.{self.name}.pth", "".join(f"{folder}\n" for folder in FOLDERS)
        )


class EditableWheel(editable_wheel):
    """setuptools' own command with another strategy; without this method it installs an import hook, which runs too."""

    def _select_strategy(self, name: str, tag: str, _build_lib: Any) -> PathFile:
        return PathFile(f"{name}-{tag}")


def read_me() -> str:
    """Return README.md for a package index, without its pictures and links to files of the repository."""
    text = re.sub(
        r"!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n*", "", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:)[^)]*\)", r"\1", text)


setup(
    long_description=read_me(),
    long_description_content_type="text/markdown",
    cmdclass={"editable_wheel": EditableWheel},
)

"""Modules made up for a test, and a patch manager that leaves nothing behind."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ovpatch.patching import PatchManager

MakeModule = Callable[..., Any]  # a module; its attributes are whatever its source gives it
WritePackage = Callable[[dict[str, str]], None]

_numbers = itertools.count()


@pytest.fixture
def pm() -> Iterator[PatchManager]:
    manager = PatchManager()
    yield manager
    manager.revert()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeModule:
    """``make(source, name=None, **values)`` puts a module with that source into sys.modules."""

    def make(source: str = "", name: str | None = None, **values: object) -> types.ModuleType:
        module = types.ModuleType(name or f"made{next(_numbers)}")
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(textwrap.dedent(source), module.__dict__)
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        return module

    return make


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritePackage]:
    """``package({"a/b.py": source})`` writes importable files; what was imported from them is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(files: dict[str, str]) -> None:
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]

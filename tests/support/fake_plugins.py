"""Plugins in their own folder, which only their metadata installs."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ovpatch.session import plugins
from ovpatch.session.session import Session
from ovpatch.session.session_report import Report
from tests.support.environment import forget

VICTIM = """
LOG = []

def f(x):
    return x

def g(x):
    return x

class Counter:
    def step(self):
        return 1
"""

PLUGIN = """
import functools
from ovpatch import Feature, Option, hookimpl
import victim

victim.LOG.append("import {name}")
COUNT = {{"calls": 0}}

@hookimpl
def ovpatch_feature():
    return Feature(name={name!r}, summary="The feature {name}.", {feature})

@hookimpl
def ovpatch_register(patches, options):
    victim.LOG.append("register {name}")
    {register}

@hookimpl
def ovpatch_activate(options):
    victim.LOG.append("activate {name}")

@hookimpl
def ovpatch_deactivate():
    victim.LOG.append("deactivate {name}")

def add(amount):
    def wrap(original):
        @functools.wraps(original)
        def f(x):
            COUNT["calls"] += 1
            return original(x) + amount
        return f
    return wrap

{extra}
"""


class Site:
    """A folder on ``sys.path`` with plugins ``fake_<name>`` and a module ``victim`` for them to patch."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.write("victim", VICTIM)

    @property
    def victim(self) -> ModuleType:
        # From the folder.
        import victim

        return victim

    @property
    def log(self) -> list[str]:
        """The actions of the plugins so far, including their imports."""
        log: list[str] = self.victim.LOG
        return log

    def write(self, module: str, source: str) -> None:
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))

    def plugin(
        self, name: str, *, feature: str = "", register: str = "pass", extra: str = "", **where: Any
    ) -> None:
        """Install a plugin made from the template."""
        extra = textwrap.dedent(extra)
        source = PLUGIN.format(name=name, feature=feature, register=register, extra=extra)
        self.raw(name, source, **where)

    def raw(
        self, name: str, source: str, *, dist: str = "", version: str = "1.0", module: str = ""
    ) -> None:
        """Install a plugin with the given source."""
        module = module or f"fake_{name}"
        self.write(module, source)
        self.announce(name, module, dist=dist or f"dist-{name}", version=version)

    def announce(
        self, name: str, target: str, *, dist: str, version: str = "1.0", suffix: str = "dist-info"
    ) -> None:
        """Write the metadata of a distribution; a second entry point of the same distribution is appended."""
        info = self.folder / f"{dist.replace('-', '_')}-{version}.{suffix}"
        info.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n"
        (info / ("METADATA" if suffix == "dist-info" else "PKG-INFO")).write_text(metadata)
        file = info / "entry_points.txt"
        head = "" if file.exists() else "[ovpatch]\n"
        with file.open("a") as stream:
            stream.write(f"{head}{name} = {target}\n")

    def forget(self) -> None:
        """Drop the folder's modules from ``sys.modules``."""
        for name in [name for name in sys.modules if name == "victim" or name.startswith("fake_")]:
            del sys.modules[name]


# Fixtures: a test module takes them over under the names it likes, ``site = fake_plugins.site``.


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder of plugins, in addition to the installed plugins, in an environment without settings."""
    with _on_path(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def only_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder of plugins, and no others."""
    monkeypatch.setattr(
        plugins, "find_plugins", functools.partial(plugins.find_plugins, [str(tmp_path)])
    )
    with _on_path(tmp_path, monkeypatch) as made:
        yield made


@contextmanager
def _on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    forget(monkeypatch)
    monkeypatch.syspath_prepend(str(folder))
    made = Site(folder)
    yield made
    made.forget()


@pytest.fixture
def session() -> Session:
    """A fresh session. Nothing of it stays, because the site drops its targets."""
    return Session()


@pytest.fixture
def apply(session: Session) -> Callable[..., Report]:
    """``apply(*names, options=None, strict=None)`` in that session."""

    def apply(
        *names: str, options: Mapping[str, Any] | None = None, strict: bool | None = None
    ) -> Report:
        return session.apply(names, options, strict)

    return apply


def states(report: Report) -> dict[str, str]:
    """Return the state of every feature."""
    return {feature.name: feature.state for feature in report.features}


# Sources of hooks and registrations that several tests use.
ADD = "patches.register_patch('victim.f', wrap=add({}))"
OPTION = "options=(Option('n', 1, 'Amount.', aliases=('amount',)),), "
ADD_N = "patches.register_patch('victim.f', wrap=add(options['n']))"
REASON = "@hookimpl\ndef ovpatch_reasons_against():\n    return ['no such machine']"

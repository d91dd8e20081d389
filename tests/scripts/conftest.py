"""The fixture ``compatibility``, by which a test of a whole program puts a row into the record of programs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.scripts import compatibility as record

if TYPE_CHECKING:
    from tests.scripts.arms import Arm, Runner
    from tests.support.preloaded import Server

ROWS = pytest.StashKey[list[record.Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compatibility",
        type=Path,
        metavar="FILE.json",
        help="add the rows of tests that passed to it",
    )


@pytest.fixture
def compatibility(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``compatibility("style of program", patched, compared="losses, ...", libraries=[...])``: one row.

    See :func:`tests.scripts.compatibility.row` for more arguments. The style is a literal, so that a test can tell
    which rows there must be. Call it at the end of the test; the row counts only if the test passes.
    """
    rows = request.node.stash.setdefault(ROWS, [])

    def add(style: str, patched: Arm, **more: Any) -> None:
        rows.append(record.row(style, patched.report, **more))

    return add


@pytest.fixture(scope="module")
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Server
) -> Iterator[Runner]:
    """``runner.both("plain")``; what its runs shall not import each time is in the module's ``PRELOADED``."""
    from tests.scripts.arms import Runner
    from tests.support.preloaded import Server

    preloaded = getattr(request.module, "PRELOADED", ())
    server = Server(*preloaded) if preloaded else forks
    yield Runner(tmp_path_factory.mktemp("programs"), server, forks)
    if preloaded:
        server.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    # Not there if this file was found after the command line had been read, as under plain `pytest`.
    to = item.config.getoption("--compatibility", default=None)
    if to is not None and report.when == "call" and report.passed:
        record.save(to, item.stash.get(ROWS, []))
    return report

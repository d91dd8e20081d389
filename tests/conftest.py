"""Fixtures and guards of the whole suite."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support import guard, patience, rarely

if TYPE_CHECKING:
    from tests.support.pool import Pool
    from tests.support.preloaded import Server

# Seconds until a test that hangs ends the whole run with the stacks of pytest's threads. The pool and the script runner
# have shorter limits and know more. This limit is for everything else.
HARD_LIMIT = pytest.StashKey[float]()
STACKS_TO = pytest.StashKey[int]()


# Time proves nothing on a loaded machine, where any example may take seconds.
settings.register_profile("ovpatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ovpatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hard-limit",
        type=float,
        default=300,
        help="seconds until a hanging test ends the run, on a quiet machine",
    )
    parser.addoption(
        "--share-gpu",
        action="store_true",
        help="let all ranks of a test that needs GPUs use the first one",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Pytest captures stderr later, and the stacks must still go to the terminal.
    config.stash[STACKS_TO] = os.dup(2)
    # The hard limit ends a worker of pytest-xdist, which would start another one to hang in the same test, eight times.
    if getattr(config.option, "maxworkerrestart", 0) is None:
        config.option.maxworkerrestart = "0"
    # Tables fold in the width of the terminal. Under pytest-xdist these variables are always set: pytest imports
    # readline, which exports them to the children of the first process.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # Before torch is imported, here and in programs that tests start. Tests and their ranks share the cores: the
    # threads of each would wait for those that others keep from running, for seconds where the work takes some ms.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The collector would take a seventh of the time for importing all tests. It is enabled again after that, see below.
    gc.disable()
    # A shell ignores SIGINT for a command in the background, and all children would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The last file of a run that several processes share should be a short one.
    items.sort(key=lambda item: item.path.parent.name != "torch_suite")
    nightly = set(rarely.read_nightly())
    for item in items:
        if rarely.is_listed(item.nodeid, nightly):
            item.add_marker(rarely.RARELY)


def pytest_collection_finish() -> None:
    # The modules of all tests live as long as the run. A test that collects garbage would read a million objects.
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STACKS_TO])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit = patience.scale(item.config.getoption("--hard-limit"))
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[STACKS_TO])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.args[0] if marker.args else 1
    if (
        item.config.getoption("--share-gpu")
        and "ranks" in item.fixturenames
        and not marker.kwargs.get("own")
    ):
        wanted = 1
    found = _devices()
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA device{'s' if wanted > 1 else ''}, found {found}")


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Iterator[None]:
    if "torch" not in sys.modules:
        yield
        return
    before = guard.snapshot()
    yield
    left = guard.leftovers(before, guard.snapshot())
    assert not left, "the test leaves torch patched:\n  " + "\n  ".join(left)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """``ranks(world)(function, *args, timeout=60, backend="gloo", env=None, **kwargs)`` -> results by rank."""
    from tests.support.pool import Pool

    pool = Pool(share_gpu=request.config.getoption("--share-gpu"))
    yield pool
    pool.close()


_WORLDS = [
    pytest.param(world, marks=pytest.mark.gpu(world), id=f"{world}gpus") for world in (2, 4, 8)
]


# With this scope, pytest sorts tests by their number of ranks, and they share ranks.
@pytest.fixture(scope="session", params=_WORLDS)
def gpus(request: pytest.FixtureRequest) -> int:
    """A number of ranks, each with a GPU; where there are fewer, the test is skipped."""
    return int(request.param)


@pytest.fixture(scope="session")
def forks() -> Server:
    """``forks.torchrun(2, "train.py", ...)`` -> as under torchrun, without the cost of its launcher and imports."""
    from tests.support.preloaded import plain_server

    return plain_server()

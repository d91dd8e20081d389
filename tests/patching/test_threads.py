"""Applying and reverting from several threads at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ovpatch.patching import PatchManager
from ovpatch.patching.slot import WRITE_LOCK

from .conftest import MakeModule
from .tools import patch, same, snapshot, states, tag


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*functions: Callable[[], None]) -> None:
    """Run functions in threads that start at the same moment; raise what one raises."""
    barrier, problems = threading.Barrier(len(functions)), []

    def run(function: Callable[[], None]) -> None:
        barrier.wait()
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised in the main thread below
            problems.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "deadlock"
    if problems:
        raise problems[0]


@pytest.mark.parametrize("attempt", range(5))
def test_two_threads_apply_the_same(pm: PatchManager, make: MakeModule, attempt: int) -> None:
    m = make("def f(): return 'f'\nclass C:\n    def g(self): return 'g'")
    user = make(h=m.f)
    owners = (m, m.C, user)
    before = [snapshot(owner) for owner in owners]
    log: list[str] = []

    class Handle:
        def __init__(self) -> None:
            log.append("+")

        def remove(self) -> None:
            log.append("-")

    pm.register_patch(f"{m.__name__}.f", wrap=tag("w"))
    pm.register_patch(f"{m.__name__}.C.g", wrap=tag("w"))
    pm.register_hook("hook", Handle)
    together(pm.apply, pm.apply)
    assert (m.f(), m.C().g(), user.h()) == ("w(f)", "w(g)", "w(f)")
    assert log.count("+") - log.count("-") == 1
    together(pm.revert, pm.revert)
    assert log.count("+") == log.count("-")
    assert all(same(old, snapshot(owner)) for old, owner in zip(before, owners, strict=True))


def test_threads_apply_and_revert_their_own_features_on_one_target(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("class C:\n    def f(self): return 'f'")
    before = snapshot(m.C)
    for name in "abcd":
        pm.register_patch(f"{m.__name__}.C.f", wrap=tag(name), feature=name)

    def cycle(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(40):
                pm.apply(name)
                assert f"{name}(" in m.C().f()
                pm.revert(name)

        return run

    together(*map(cycle, "abcd"))
    assert states(pm) == ["reverted"] * 4
    assert same(before, snapshot(m.C))


def test_two_managers_on_one_target_from_two_threads(make: MakeModule) -> None:
    m = make("def f(): return 'f'")
    stock = m.f
    managers = [PatchManager(), PatchManager()]
    for manager, name in zip(managers, "ab", strict=True):
        manager.register_patch(f"{m.__name__}.f", wrap=tag(name))
    for _ in range(10):
        together(*(manager.apply for manager in managers))
        assert m.f() in ("a(b(f))", "b(a(f))")
        together(*(manager.revert for manager in managers))
        for manager in managers:
            manager.revert()
        assert m.f is stock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Python's own warning of forks among threads
def test_child_forked_while_another_thread_patches_does_not_hang(
    pm: PatchManager, make: MakeModule
) -> None:
    m = make("def f(): return 'f'")
    patch(pm, m, "f", wrap=tag("w"))
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            with WRITE_LOCK:
                sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(3):
            assert in_child(lambda: pm.revert() is None and m.f() == "f")
    finally:
        done.set()
        thread.join()
    assert m.f() == "w(f)"


def in_child(check: Callable[[], bool]) -> bool:
    """Return what a function returns in a forked child, False if it does not within 10 seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

"""Finds finalizers that take a lock of ovpatch.

The garbage collector may call a finalizer at any line of any thread. If the finalizer waits for a lock whose owner
waits for that thread, as ``Thread.start()`` waits for the new thread, both hang. Chance rarely finds this.
So in the workers of the pool every lock of ovpatch notes whether a finalizer takes it.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Final

#: The stacks of the finalizers that have taken a lock.
violations: Final[list[str]] = []

_running = threading.local()


class _CheckedLock:
    """A lock that notes whether a finalizer takes it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_running, "finalizers", 0):
            violations.append("".join(traceback.format_stack(limit=6)))
        return self._lock.acquire(*args, **kwargs)

    def __enter__(self) -> Any:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        # A condition looks up private methods of reentrant locks.
        return getattr(self._lock, name)


def install() -> None:
    """Check the locks that ovpatch makes in this process after this call."""
    reentrant = threading.RLock

    class Condition(threading.Condition):
        def __init__(self, lock: Any = None) -> None:
            super().__init__(_CheckedLock(reentrant()) if lock is None and _is_ovpatch() else lock)

    finalize: Any = weakref.finalize
    call = finalize.__call__

    def __call__(self: Any, reference: Any = None) -> Any:
        _running.finalizers = getattr(_running, "finalizers", 0) + 1
        try:
            return call(self, reference)
        finally:
            _running.finalizers -= 1

    finalize.__call__ = __call__
    threading.Condition = Condition  # type: ignore[misc]
    threading.Lock = _checked(threading.Lock)  # type: ignore[misc, assignment]
    threading.RLock = _checked(reentrant)  # type: ignore[misc, assignment]


def take() -> list[str]:
    """Return the violations since the last call."""
    found = list(violations)
    violations.clear()
    return found


def _checked(make: Callable[[], Any]) -> Callable[[], Any]:
    def make_lock() -> Any:
        return _CheckedLock(make()) if _is_ovpatch() else make()

    return make_lock


def _is_ovpatch() -> bool:
    """Return whether the function that makes a lock is ovpatch's."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("ovpatch")

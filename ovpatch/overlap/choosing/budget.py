"""How long may be measured."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

SECONDS: Final = 30.0


class Budget:
    """Time that may be spent on measuring.

    Args:
        seconds: In all.
        clock: Tells the time, in seconds.
    """

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._spent, self._lock = 0.0, threading.Lock()
        self._running: list[float] = []  # since when; threads may measure for groups of their own at the same time

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of a block."""
        began = self._clock()
        with self._lock:
            self._running.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(began)
                self._spent += self._clock() - began

    def left(self) -> float:
        """Return how many seconds are left, which may be less than none."""
        with self._lock:
            return self.seconds - self._spent - sum(self._clock() - began for began in self._running)


BUDGET: Final = Budget()
"""This process's, whatever features and groups it measures for."""

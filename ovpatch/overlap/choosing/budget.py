"""How long may be measured."""

from __future__ import annotations

import contextlib
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
        self._spent = 0.0
        self._since: float | None = None

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of a block."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - self._since
            self._since = None

    def left(self) -> float:
        """Return how many seconds are left, which may be less than none."""
        running = 0.0 if self._since is None else self._clock() - self._since
        return self.seconds - self._spent - running


BUDGET: Final = Budget()
"""This process's, whatever features and groups it measures for."""
